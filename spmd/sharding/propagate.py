"""Propagation: one rule for each node, on one mesh axis, under a mode's constraints.

A forward pass takes the cheapest candidate at each node: run on replicated inputs, follow one of the shards that come in, or carry a partial
through where the op is linear. A backward pass (`sink`) then moves replicated values that are only ever wanted in parts onto the parts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import tree_flatten, tree_leaves, tree_unflatten
from spmd.graph.step import Role, StepGraph
from spmd.sharding.constraints import Constraints
from spmd.sharding.decompose import decompose, decomposition
from spmd.sharding.layout import Layout, Partial, R, Replicated, Sharded, shard
from spmd.sharding.plan import Choice, Plan
from spmd.sharding.rule import OWN, ROWS, Call, Rule
from spmd.sharding.sink import sink
from spmd.sharding.sources import rule_for

# What a shard is a part of: the policy never gathers the first where the second will do.
BATCH, STATE = "batch", "state"

# Costs are bytes moved, weighted; only their order matters. Measured to give minimal collective counts on the models of the suite.
STAYS = 1000.0  # gathering the batch; or a parameter, on an axis that has no part in the batch
HELD = 1000.0 * STAYS  # gathering a parameter that a mode wants used where it lies
REPLICATED_WORK = 1e5  # running a heavy op on the whole batch on every rank
ACCIDENTAL_TP = 1e6  # following a weight's shard where the batch could be followed
FORBIDDEN = 1e17


def propagate(step: StepGraph, constraints: Constraints, world: int) -> Plan:
    """Choose a layout for every value of `step` (at a concrete batch) on one axis of `world` ranks. Ops along a split dim are decomposed in place."""
    return Propagation(step, constraints, world).run()


def batch_shard(node: fx.Node, blocks: int | None, share: bool = True) -> Sharded | None:
    """The batch shard of a value in which exactly one dim carries the batch, on an axis that cuts it in `blocks`.

    share: only where the dim is a multiple of the batch, so that a part is a rank's share; else a part of the batch will do (a micro-batch).
    """
    varies, val = node.meta.get("varies"), node.meta.get("val")
    if blocks is None or varies is None or not isinstance(val, torch.Tensor):
        return None
    dims = [(d, c) for d, c in enumerate(varies) if c is not None]
    if len(dims) != 1 or (not dims[0][1] and (share or blocks > 1)):
        return None
    d, scale = dims[0]
    return Sharded(d, blocks, val.shape[d] // (scale * blocks), scale) if scale else shard(d, val.shape[d])


class Propagation:
    def __init__(self, step: StepGraph, constraints: Constraints, world: int) -> None:
        self.step, self.constraints, self.world = step, constraints, world
        self.plan = Plan(world, constraints.blocks)
        self.kind: dict[fx.Node, str] = {}
        self.moved: set[tuple[fx.Node, Layout]] = set()
        self.whole: set[fx.Node] = set()  # gathered for a whole-matrix computation: stay replicated until stored
        self.rules: dict[fx.Node, tuple[Call, Rule | None]] = {}
        self.shapes: dict[str, torch.Size] = {}  # of parameters
        self.values = dict(constraints.values)  # layouts that values are moved to as they appear
        self.held: set[fx.Node] = set()  # stored inputs that stay where they are

    def run(self) -> Plan:
        placeholders = self.step.placeholders
        for node, spec, layout in zip(placeholders, self.step.inputs, self.constraints.inputs, strict=True):
            self.plan.layouts[node] = layout
            self.kind[node] = BATCH if spec.role is Role.USER and self.plan.blocks is not None else STATE
            if spec.name in self.constraints.stays:
                self.held.add(node)
            if spec.role is Role.PARAMETER:
                self.shapes[spec.name] = node.meta["val"].shape
            if spec.role is Role.USER:
                self.settle(node)
            else:
                self.plan.views[node] = self.plan.roots[node] = node
        for node in self.step.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                self.visit(node)
        wanted = zip(self.step.outputs, self.step.results, self.constraints.outputs, strict=True)
        self.plan.outputs = [None if spec.alias_of else self.output(x, want) for spec, x, want in wanted]
        if self.world > 1:
            sink(self.step, self.plan)
        return self.plan

    # ---------------------------------------------------------------------------------------------- one node

    def visit(self, node: fx.Node) -> None:
        nest = self.plan.layouts.get(node.all_input_nodes[0]) if node.target is operator.getitem else None
        if node.op == "get_attr":
            self.plan.layouts[node] = R
        elif isinstance(nest, (tuple, list)):
            self.plan.layouts[node] = nest[node.args[1]]  # type: ignore[index]
            self.kind[node] = self.kind.get(node.all_input_nodes[0], "")
            self.settle(node)
        else:
            self.place(node)

    def rule(self, node: fx.Node) -> tuple[Call, Rule | None]:
        if node not in self.rules:
            call = Call(node)
            rule = rule_for(call)
            if rule is not None and rule.own is not None and self.constraints.buffers == "global":
                rule = rule.without(OWN)
            if rule is not None and self.plan.blocks is not None:
                rule = rule.without(ROWS)
            self.rules[node] = call, rule
        return self.rules[node]

    def place(self, node: fx.Node) -> None:
        call, rule = self.rule(node)
        current = [self.read(x, node) for x in call.tensors]
        wish = self.constraints.prefer(call, current) if self.constraints.prefer and self.world > 1 else None
        if (instead := self.instead(call, rule, wish or current)) is not None:
            made, heirs = decompose(self.step.graph, node, instead)
            self.values.update({heirs[name].name: want for name, want in self.values.items() if name in heirs})
            for reader in {reader for new in made for reader in new.users}:
                self.rules.pop(reader, None)  # looked at before, it read `node`
            for new in made:
                self.visit(new)
            return
        found = list(self.candidates(call, rule, current, wish))
        asked = [c for c in found if wish is not None and all(w in (None, p) for w, p in zip(c[0], wish, strict=True))]
        wants, outs, kind, _ = min(asked or found, key=lambda c: self.cost(call, rule, current, *c))
        self.commit(call, rule, current, wants, outs, kind)

    def instead(self, call: Call, rule: Rule | None, current: Sequence[Layout]) -> Callable[..., Any] | None:
        """What to decompose the op into: not where each rank's own part is meant."""
        own = rule is not None and rule.own is not None and self.constraints.buffers == "local"
        return None if own or self.world == 1 else decomposition(call, current)

    def read(self, x: fx.Node, reader: fx.Node) -> Layout:
        """The layout in which `reader` finds `x`: a gradient is partial only to what accumulates into it."""
        if x in self.plan.settled and not accumulates(x, reader):
            return self.plan.settled[x]
        return self.plan.layouts[x]

    def candidates(
        self, call: Call, rule: Rule | None, current: list[Layout], wish: Sequence[Layout] | None = None
    ) -> Iterable[tuple[list[Layout | None], list[Layout], str, bool]]:
        replicated: list[Layout] = [R] * len(call.values)
        yield [None if self.ignored(rule, j, p) else R for j, p in enumerate(current)], replicated, "", False
        if rule is None or rule.whole or self.world == 1:
            return
        seen = set()
        for i, (x, p) in enumerate(zip(call.tensors, current, strict=True)):
            late = self.late(call, rule, current, i)
            own = self.kind.get(x, "")
            followed = [(p, own) if late is None else (late, BATCH), *([(wish[i], own)] if wish else [])]
            for part, kind in followed:
                if isinstance(part, Sharded) and (i, part) not in seen:
                    seen.add((i, part))
                    found = rule.transfer(i, part, self.world)
                    if found:
                        yield *found, kind, False
        for group in self.linear(call, rule):
            if all(current[i] == Partial() and self.keeps_partial(call.tensors[i]) for i in group):
                yield (
                    [Partial() if i in group else R for i in range(len(current))],
                    [Partial()] * len(call.values),
                    "",
                    True,
                )

    def ignored(self, rule: Rule | None, j: int, p: Layout) -> bool:
        """Only the shape of input `j` matters, and its local shape is the global one."""
        return rule is not None and (rule.inputs[j] is None or (rule.shape_only and j == 0 and isinstance(p, Partial)))

    def late(self, call: Call, rule: Rule, current: list[Layout], i: int) -> Sharded | None:
        """A replicated value that carries the batch is cut where work is heavy or a weight's shard would decide otherwise."""
        if current[i] != R:
            return None
        beside_state = any(
            isinstance(p, Sharded) and self.kind.get(x) == STATE for x, p in zip(call.tensors, current, strict=True)
        )
        share = self.share(call.tensors[i], part=True) if rule.heavy or beside_state else None
        return share.canonical(self.world) if share is not None else None

    def share(self, x: fx.Node, part: bool = False) -> Sharded | None:
        """The batch shard of a value, whatever its layout: where the batch lies within a dim is known from what it was made of.

        part: a part of the batch will do (a micro-batch), where the dim is no multiple of it.
        """
        found = batch_shard(x, self.plan.blocks, share=not part)
        if found is None or found.inner == 1 or x.op != "call_function" or x.target is operator.getitem:
            return found
        call, rule = self.rule(x)
        if rule is not None and not rule.whole and call.tensors and rule.inputs[0] is not None:
            source = self.share(call.tensors[0], part)
            moved = rule.transfer(0, source, self.world) if source is not None else None
            if moved is not None and isinstance(moved[1][0], Sharded) and moved[1][0].dim == found.dim:
                return moved[1][0]
        return found

    def keeps_partial(self, x: fx.Node) -> bool:
        """If one reader of a partial forces its reduction, all read the reduced value."""
        readers = [u for u in x.users if not (x in self.plan.settled and not accumulates(x, u))]
        if len(readers) < 2:
            return True
        return all(self.linear_in(u, x) for u in readers)

    def linear_in(self, reader: fx.Node, x: fx.Node) -> bool:
        if reader.op != "call_function" or reader.target is operator.getitem:
            return False
        call, rule = self.rule(reader)
        if rule is None or not any(call.tensors[i] is x for group in self.linear(call, rule) for i in group):
            return False
        return not rule.view or x in self.plan.settled or all(self.linear_in(user, reader) for user in reader.users)

    def linear(self, call: Call, rule: Rule) -> tuple[tuple[int, ...], ...]:
        """Sets of inputs through which a partial sum may go on. One of samples, on an axis that all have the same of, ends before it spreads."""
        spreads = rule.heavy or len(call.values) > 1
        return () if spreads and self.plan.blocks is None and self.of_samples(call) else rule.linear

    # ---------------------------------------------------------------------------------------------- cost

    def cost(
        self,
        call: Call,
        rule: Rule | None,
        current: list[Layout],
        wants: list[Layout | None],
        outs: list[Layout],
        kind: str,
        linear: bool,
    ) -> float:
        moves = dict.fromkeys((x, p, w) for x, p, w in zip(call.tensors, current, wants, strict=True) if w is not None)
        cost = sum(self.move_cost(x, p, w) for x, p, w in moves)
        sharded = any(isinstance(p, Sharded) for p in [*wants, *outs]) and not linear
        cost += 0.0 if sharded else 0.002 if linear else 0.001
        if rule is None:
            return cost
        carries = any(
            self.kind.get(x) == BATCH and isinstance(p, Sharded) for x, p in zip(call.tensors, current, strict=True)
        )
        carries = carries or any(self.late(call, rule, current, i) is not None for i in range(len(current)))
        if carries and not (sharded and kind == BATCH):
            cost += REPLICATED_WORK if rule.heavy else 0.0
            cost += ACCIDENTAL_TP if sharded else 0.0
        if linear:
            carried = max(self.bytes(x) for x, w in zip(call.tensors, wants, strict=True) if w == Partial())
            cost += 2.0 * max(0, self.bytes(call.node) - carried)  # reduce before it grows
        if (
            sharded
            and kind == STATE
            and call.name in ("expand", "repeat")
            and batch_shard(call.node, self.plan.blocks) is not None
        ):
            cost += 2.0 * max(
                0, self.bytes(call.node) - self.bytes(call.tensors[0])
            )  # gather before each sample has its own
        if (
            sharded
            and self.of_matrices(call, rule)
            and not carries
            and (cost > 1 or any(isinstance(o, Partial) for o in outs))
        ):
            cost += FORBIDDEN  # a matrix optimizer gathers its matrix once and computes whole
        if kind == BATCH and self.plan.blocks is not None and Partial() in outs and self.share(call.node) is not None:
            cost += STAYS * self.bytes(call.node)  # samples are split, not summed
        if sharded and any(x in self.whole for x in call.tensors):
            cost += 1.0
        return cost

    def of_matrices(self, call: Call, rule: Rule) -> bool:
        """Whether this may be an optimizer's work on whole matrices. Where the axis has no part in the batch, what carries it is the model's."""
        return rule.heavy and (self.plan.blocks is not None or not self.of_samples(call))

    def of_samples(self, call: Call) -> bool:
        return any(c is not None for x in call.tensors for c in x.meta.get("varies") or ())

    def move_cost(self, x: fx.Node, a: Layout, b: Layout) -> float:
        """Weighted bytes of bringing `x` from layout `a` to `b`."""
        if a == b or (x, b) in self.moved:
            return 0.0
        size = self.bytes(x)
        if isinstance(a, Replicated):
            return 0.01 if isinstance(b, Sharded) else 0.02
        if isinstance(a, Partial) and a.op == OWN:
            return FORBIDDEN
        if isinstance(a, Partial):
            return 2.0 * size + 1 if isinstance(b, Replicated) else size + 1.0 if isinstance(b, Sharded) else FORBIDDEN
        if b == R and (self.plan.views.get(x), R) in self.moved:
            return 0.0
        stays = self.kind.get(x) == BATCH or (self.plan.blocks is None and x in self.plan.roots)
        weight = HELD if self.plan.roots.get(x, x) in self.held else STAYS if stays else 1.0
        return weight * size * (1.0 if b == R else 0.5) + 1

    def bytes(self, x: fx.Node) -> int:
        return sum(v.numel() * v.element_size() for v in tree_leaves(x.meta.get("val")) if isinstance(v, torch.Tensor))

    # ---------------------------------------------------------------------------------------------- commit

    def commit(
        self,
        call: Call,
        rule: Rule | None,
        current: list[Layout],
        wants: list[Layout | None],
        outs: list[Layout],
        kind: str,
    ) -> None:
        node, plan = call.node, self.plan
        for x, p, w in zip(call.tensors, current, wants, strict=True):
            if w is not None and w != p:
                self.moved.add((x, w))
                if w == R and x in plan.views:
                    self.moved.add((plan.views[x], R))
        if rule is None and any(p != R for p in current):
            plan.fallbacks.append(node)
        _, spec = tree_flatten(node.meta.get("val"), is_leaf=lambda v: v is None)
        plan.layouts[node] = tree_unflatten(outs, spec)
        plan.choices[node] = Choice(call, rule, wants, outs)
        self.kind[node] = kind
        self.note_view(call, rule)
        if rule is not None and self.of_matrices(call, rule) and kind != BATCH and all(w == R for w in wants):
            self.whole.update(
                x for x, p in zip(call.tensors, current, strict=True) if isinstance(p, Sharded) or x in self.whole
            )
            self.whole.add(node)
        elif all(w == R for w in wants) and any(x in self.whole for x in call.tensors):
            self.whole.add(node)
        self.settle(node)
        fqn = str(node.meta.get("grad_of", ""))
        if not fqn or self.shapes.get(fqn, node.meta["val"].shape) != node.meta["val"].shape:
            return  # no gradient, or one that other axes have yet to cut
        if isinstance(plan.layouts[node], Partial) and any(not accumulates(node, u) for u in node.users):
            plan.settled[node] = self.constraints.gradients.get(fqn, R)
            self.kind[node] = STATE

    def settle(self, node: fx.Node) -> None:
        """What a mode wants to lie elsewhere is moved as it appears."""
        want = self.values.get(node.name)
        if want is not None and want != self.plan.layouts[node]:
            self.plan.settled[node] = want

    def note_view(self, call: Call, rule: Rule | None) -> None:
        """Views share the gather of what they are of: a stored tensor or a cast of one, and any value that they hold all elements of."""
        if rule is None or not (rule.view or call.name == "_to_copy"):
            return
        node, source, plan = call.node, call.tensors[0], self.plan
        if source in plan.roots:
            plan.roots[node] = plan.roots[source]
            plan.views[node] = plan.views[source] if rule.view else node
        elif rule.view and math.prod(call.inputs[0]) == math.prod(call.outputs[0] or ()):
            plan.views[node] = plan.views.get(source, source)

    def output(self, x: Any, want: Layout | None) -> Layout | None:
        if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), torch.Tensor):
            return None
        if want is not None:
            return want
        found = self.read(x, self.step.graph.output_node())
        share = self.share(x)
        if share is None:
            return R
        if isinstance(found, Sharded) and found.dim == share.dim and self.kind.get(x) == BATCH:
            return found
        return share.canonical(self.world)


def accumulates(x: fx.Node, reader: fx.Node) -> bool:
    """Whether `reader` only adds to the gradient `x`."""
    fqn = x.meta.get("grad_of")
    return fqn is not None and reader.meta.get("grad_of") == fqn
