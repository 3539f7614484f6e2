"""Partition: the step graph and a plan become the local graph of one rank.

Redistributions are inserted once per value and target, at their first use; a gradient is reduced where it appears. Stored tensors are written
back by `copy_` as soon as nothing reads their old value any more.

A mesh of several axes is cut along one after the other, the last first: `divide` gives the part along an axis as a step graph again, with that
axis's collectives as nodes like any other, and `partition` ends it along the first. So every layout is of what the later axes have left, and
the engine never sees more than one axis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from spmd._torch import FakeTensorMode, LazyGraphModule, tree_leaves
from spmd.errors import Offence, PlacementError, SpmdError, VerifyError
from spmd.graph.axis import Axis
from spmd.graph.local import Collective, LocalGraph
from spmd.graph.provenance import source_of, step_name, where
from spmd.graph.step import STORED, Output, Role, StepGraph
from spmd.sharding.build import Build, is_number, sample
from spmd.sharding.emit import Expansion
from spmd.sharding.layout import Layout, Partial, RankInt, Replicated, Sharded, padded_shape
from spmd.sharding.plan import Choice, Plan
from spmd.sharding.propagate import accumulates
from spmd.sharding.redistribute import Wire, redistribute
from spmd.sharding.rule import OWN, Shape
from spmd.sharding.store import place_settle, write_back

aten = torch.ops.aten


def partition(step: StepGraph, plan: Plan, axis: Axis, agree: bool | None = None) -> LocalGraph:
    """Write this rank's program. `step` is at a concrete batch, and divided already along the mesh's other axes; `plan` covers this one.

    agree: whether there are ranks to agree with; default: those of this axis.
    """
    return Partition(step, plan, axis).run(axis.world > 1 if agree is None else agree)


def divide(step: StepGraph, plan: Plan, axis: Axis) -> StepGraph:
    """What is left of `step` for the ranks that share this rank's place on `axis`. Functional; stored tensors come in without padding."""
    return Partition(step, plan, axis).part()


class Partition:
    def __init__(self, step: StepGraph, plan: Plan, axis: Axis) -> None:
        self.step, self.plan, self.axis = step, plan, axis
        self.next = step.size  # the batch that is left for the other axes
        if step.size is not None and plan.blocks is not None:
            self.next = step.size // axis.world
        self.build = Build(FakeTensorMode(), axis.world, axis.rank)
        self.env: dict[tuple[fx.Node, Layout | None], fx.Node] = {}  # local nodes by step node and layout
        self.padded: dict[fx.Node, fx.Node] = {}  # step placeholder -> its padded buffer
        self.owner = dict(zip(step.placeholders, step.inputs, strict=True))
        self.reader: fx.Node | None = None
        results = zip(step.outputs, step.results, strict=True)
        self.renewed = {x: spec.name for spec, x in results if spec.role is Role.PARAMETER and spec.updates is not None}

    def part(self) -> StepGraph:
        for ph in self.owner:
            self.placeholder(ph, stored=False)
        for ph in self.owner:
            self.settle(ph, self.layout(ph))
        self.nodes()
        wanted = zip(self.step.outputs, self.step.results, self.plan.outputs, strict=True)
        self.build.graph.output(tuple(self.result(spec, x, want) for spec, x, want in wanted))
        module = LazyGraphModule(self.constants(), self.build.graph)
        module.graph.eliminate_dead_code()
        return replace(self.step, module=module, size=self.next)

    def nodes(self) -> None:
        for node in self.step.graph.nodes:
            if node.op == "call_function":
                self.reader = node
                self.write(node)
            elif node.op == "get_attr":
                self.env[node, self.layout(node)] = self.constant(node)
        self.reader = self.step.graph.output_node()
        self.build.origin = None

    def run(self, agree: bool) -> LocalGraph:
        for ph, spec in self.owner.items():
            self.placeholder(ph, spec.role in STORED)
        if agree:
            self.build.graph.placeholder("settle").meta["val"] = None
        for ph in self.owner:
            self.cut(ph)
        self.nodes()
        outputs = self.finish()
        module = LazyGraphModule(self.constants(), self.build.graph)
        graph = LocalGraph(
            module,
            self.step,
            tuple(self.layers(ph) for ph in self.owner),
            outputs,
            (self.axis.world,),
            (self.axis.rank,),
            list(self.plan.fallbacks),
        )
        place_settle(graph)
        module.graph.eliminate_dead_code()
        module.recompile()
        return graph

    # ---------------------------------------------------------------------------------------------- inputs

    def placeholder(self, ph: fx.Node, stored: bool) -> None:
        node = self.build.graph.placeholder(ph.name)
        val, layout = ph.meta["val"], self.layout(ph)
        if layout is None:
            node.meta["val"] = sample(val)
        else:
            shape = padded_shape(val.shape, layout, self.axis.world) if stored else self.build.local(val.shape, layout)
            node.meta["val"] = self.fake(val, shape)
        self.mark(node, ph, layout)
        self.env[ph, layout] = node
        if stored:
            self.padded[ph] = node

    def cut(self, ph: fx.Node) -> None:
        """The real part of a padded buffer."""
        layout, node = self.layout(ph), self.env[ph, self.layout(ph)]
        if ph in self.padded and isinstance(layout, Sharded):
            length = self.build.local(ph.meta["val"].shape, layout)[layout.dim]
            self.env[ph, layout] = self.build.narrow(node, layout.dim, 0, length)
        self.settle(ph, layout)

    def fake(self, val: torch.Tensor, shape: Shape) -> torch.Tensor:
        """A local fake of `shape` with the dim order of `val`."""
        strides = val.stride()
        order = sorted(range(val.dim()), key=lambda d: (-strides[d], d))
        with self.build.fake:
            x = torch.empty([int(shape[d]) for d in order], dtype=val.dtype, device=val.device)
            return x.permute([order.index(d) for d in range(val.dim())])

    def constant(self, node: fx.Node) -> fx.Node:
        copy = self.build.graph.get_attr(str(node.target))
        copy.meta.update(node.meta)
        with self.build.fake:
            val = node.meta["val"]
            copy.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
        return copy

    def constants(self) -> dict[str, Any]:
        return {n.target: getattr(self.step.module, n.target) for n in self.step.graph.find_nodes(op="get_attr")}

    # ---------------------------------------------------------------------------------------------- nodes

    def write(self, node: fx.Node) -> None:
        """The local nodes of one node. An op whose shapes can't be told without values has no place in a program."""
        try:
            self.expand(node)
        except SpmdError:
            raise
        except Exception as error:
            remedy = "keep shapes fixed: replace the op by one whose result has a shape of its own"
            what = f"{node.target} can't be placed: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise PlacementError(Offence(what, where(node), remedy=remedy)) from error

    def expand(self, node: fx.Node) -> None:
        build, choice = self.build, self.plan.choices.get(node)
        build.origin = node
        if choice is None:  # an element of a tuple
            (source,) = node.all_input_nodes
            layout = self.layout(node)
            self.env[node, layout] = build.op(node.target, self.env[source, None], node.args[1])
            self.mark(self.env[node, layout], node, layout)
            self.settle(node, layout)
            return
        wants = iter(choice.wants)

        def take(x: fx.Node) -> fx.Node:
            return self.fetch(x, next(wants)) if isinstance(x.meta.get("val"), torch.Tensor) else self.env[x, None]

        args, kwargs = map_arg((node.args, node.kwargs), take)
        single = isinstance(node.meta.get("val"), torch.Tensor)
        local = self.call(choice, list(args), dict(kwargs))
        self.check(node, local, choice)
        if (note := node.meta.get("collective")) is not None:  # of an axis that is done
            across = f"{choice.outs[0]},{note.across}" if note.across else str(choice.outs[0])
            local.meta["collective"] = replace(note, across=across)
        if single:
            self.mark(local, node, choice.outs[0])
        self.env[node, choice.outs[0] if single else None] = local
        self.settle(node, choice.outs[0])

    def settle(self, node: fx.Node, layout: Layout | None) -> None:
        if node in self.plan.settled and layout is not None:
            self.move(node, self.env[node, layout], layout, self.plan.settled[node])

    def mark(self, local: fx.Node, x: fx.Node, layout: Layout | None) -> None:
        """Note how `local` lies, which of its dims differ from rank to rank, and how it varies with the batch that is left."""
        if layout is None or not isinstance(x.meta.get("val"), torch.Tensor):
            return
        local.meta["layouts"] = (layout, *x.meta.get("layouts", ()))
        shape = self.build.local(x.meta["val"].shape, layout)
        local.meta["uneven"] = {*x.meta.get("uneven", ()), *(d for d, n in enumerate(shape) if isinstance(n, RankInt))}
        if (varies := x.meta.get("varies")) is not None:
            local.meta["varies"] = [
                scale and self.scale(size, isinstance(layout, Sharded) and layout.dim == d)
                for d, (scale, size) in enumerate(zip(varies, local.meta["val"].shape, strict=True))
            ]

    def scale(self, size: int, split: bool) -> int:
        """How many times the rest of the batch a dim is that carries it; 0 where it isn't a multiple."""
        share = split or self.plan.blocks is None
        return size // self.next if share and self.next and size % self.next == 0 else 0

    def check(self, node: fx.Node, local: fx.Node, choice: Choice) -> None:
        """Every rule is held to the traced shapes and types."""
        for whole, part, layout in zip(
            tree_leaves(node.meta.get("val")), tree_leaves(local.meta["val"]), choice.outs, strict=False
        ):
            if not isinstance(whole, torch.Tensor):
                continue
            shape = tuple(map(int, self.build.local(whole.shape, layout)))
            if tuple(part.shape) != shape or part.dtype != whole.dtype:
                what = f"{node.target} as {layout} yields {part.dtype}{list(part.shape)} on a rank, not {whole.dtype}{list(shape)}"
                raise VerifyError(Offence(what, where(node)))

    def call(self, choice: Choice, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        build, call, rule = self.build, choice.call, choice.rule
        if is_number(call.node.meta.get("val")):
            return build.number(call.target, tuple(args), kwargs, call.node.meta.get("val"))
        expansion = Expansion(build, call, args, kwargs, choice.wants, choice.outs)
        if rule is not None and rule.sizes:
            expansion.put(rule.sizes, list(build.local(call.outputs[0] or (), choice.outs[0])))
        return rule.emit(expansion) if rule is not None and rule.emit is not None else expansion.run()

    def fetch(self, x: fx.Node, want: Layout | None) -> fx.Node:
        """The local node that holds `x` as `want`."""
        found = self.plan.layouts[x]
        if want is None:
            want = found
        if (x, want) in self.env:
            return self.env[x, want]
        settled = self.plan.settled.get(x)
        start = settled if settled is not None and not accumulates(x, self.reader) else found  # type: ignore[arg-type]
        if want == Replicated() and self.plan.views.get(x, x) is not x and isinstance(found, Sharded):
            return self.replay(x)
        return self.move(x, self.env[x, start], start, want)

    def replay(self, x: fx.Node) -> fx.Node:
        """A view of a stored tensor, taken again of the gathered one: views share their root's gather."""
        (source,) = [a for a in x.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
        whole = self.fetch(source, Replicated())
        saved, self.build.origin = self.build.origin, x
        args, kwargs = map_arg((x.args, x.kwargs), lambda a: whole if a is source else self.env[a, None])
        rule = self.plan.choices[x].rule
        reshapes = rule is not None and rule.emit is not None
        node = self.build.view(whole, x.meta["val"].shape) if reshapes else self.build.op(x.target, *args, **kwargs)
        self.build.origin = saved
        self.env[x, Replicated()] = node
        return node

    def move(self, x: fx.Node, local: fx.Node, a: Layout, b: Layout) -> fx.Node:
        """Redistribute `x`, and remember it. On one rank all layouts are the same."""
        if self.axis.world == 1:
            self.env[x, b] = local
            return local
        if a == Partial(OWN):
            what = f"{x.target} is taken of each rank's own part of the batch; {self.reader} needs it of the whole"
            raise PlacementError(Offence(what, where(self.reader or x), remedy='use buffers="global"'))
        shape = tuple(x.meta["val"].shape)
        self.build.moving = x
        moved = redistribute(
            self.build, local, shape, a, b, Wire(self.axis.group, self.note(x, a, b)), self.padded.get(x)
        )
        self.build.moving = None
        self.mark(moved, x, b)
        self.env[x, b] = moved
        return moved

    def note(self, x: fx.Node, a: Layout, b: Layout) -> Collective:
        val, reader = x.meta["val"], self.reader
        root = self.plan.roots.get(x)
        fqn = x.meta.get("grad_of", "")
        role = "grad_reduce" if fqn and isinstance(a, Partial) else "value"
        if root is not None and isinstance(a, Sharded):
            spec = self.owner[root]
            role, fqn = ("param_gather", spec.name) if spec.role is Role.PARAMETER else ("state_gather", spec.name)
        elif x in self.renewed:
            role, fqn = "param_gather", self.renewed[x]
        reason = (
            f"{getattr(reader.target, '__name__', reader.target)} reads it as {b}"
            if reader is not None and reader.op == "call_function"
            else f"returned as {b}"
        )
        return Collective(
            role,
            "",
            self.axis.index,
            step_name(x),
            fqn,
            val.numel() * val.element_size(),
            str(a),
            str(b),
            reason,
            (source_of(reader) if reader is not None else None)
            or source_of(x),  # what's returned has the line that made it
        )

    def layout(self, x: fx.Node) -> Layout | None:
        found = self.plan.layouts.get(x)
        return found if isinstance(found, (Replicated, Partial, Sharded)) else None

    def layers(self, ph: fx.Node) -> tuple[Layout, ...] | None:
        layout = self.layout(ph)
        return None if layout is None else (layout, *ph.meta.get("layouts", ()))

    # ---------------------------------------------------------------------------------------------- outputs

    def finish(self) -> tuple[tuple[Layout, ...] | None, ...]:
        """Outputs, then the updates of stored tensors in place."""
        placeholders = self.step.placeholders
        results: list[Any] = []
        layouts: list[tuple[Layout, ...] | None] = []
        updates: list[tuple[fx.Node, fx.Node]] = []
        for spec, x, want in zip(self.step.outputs, self.step.results, self.plan.outputs, strict=True):
            local = self.result(spec, x, want)
            layouts.append(None if want is None else (want,))
            if spec.updates is not None and self.step.inputs[spec.updates].role in STORED:
                home = placeholders[spec.updates]
                if x is not home:
                    updates.append((self.env[home, self.layout(home)], local))
                results.append(None)
            else:
                results.append(local)
        results = write_back(self.build, updates, results)
        self.build.graph.output(tuple(results))
        return tuple(layouts)

    def result(self, spec: Output, x: Any, want: Layout | None) -> Any:
        if spec.alias_of:  # the user's own object: the runtime returns it
            return None
        if not isinstance(x, fx.Node):
            return x
        return self.env[x, None] if want is None else self.fetch(x, want)
