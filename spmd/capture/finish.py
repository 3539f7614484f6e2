"""Turns the raw trace into a StepGraph: tidies nodes, cuts new optimizer state out, orders inputs, drops outputs that change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
import torch.fx as fx

from spmd._torch import FakeTensor, OpOverload, free_unbacked_symbols
from spmd.capture.inputs import Entry
from spmd.capture.result import Slot
from spmd.capture.states import Init, cut, identifier
from spmd.capture.trace import Traced
from spmd.errors import CaptureError, Offence, StateError
from spmd.graph.provenance import where
from spmd.graph.step import ENTERS, LEAVES, Input, Output, Role, StepGraph

aten = torch.ops.aten
_IDENTITY = (
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.lift.default,
)
_NOISE = (
    "profiler::",
    "aten::_assert_scalar",
    "aten::_assert_tensor",
    "aten::sym_constrain",
    "aten::_local_scalar_dense_check",
)
_ORDER = (Role.PARAMETER, Role.BUFFER, Role.STATE, Role.GRADIENT, Role.HYPER, Role.USER)


@dataclass
class Finished:
    """The step graph and what else the trace says."""

    step: StepGraph
    slots: tuple[Slot, ...]
    init: StepGraph | None
    specialised: frozenset[str]  # scalars that turned out to be constants of the graph
    cleared: tuple[str, ...]  # parameters whose gradient is None at the end
    matters: frozenset[str] = field(
        default_factory=frozenset
    )  # parameters for which it matters whether a gradient exists at the start


def finish(traced: Traced) -> Finished:
    """Raises CaptureError for what the graph can't hold, all offenders at once."""
    graph = traced.module.graph
    inputs = _inputs(traced)
    placeholders = set(inputs)
    for node in graph.find_nodes(op="placeholder"):
        if node not in placeholders:
            raise AssertionError(f"unknown placeholder {node}")
    inputs.update(_constants(traced))
    _tidy(graph, placeholders)
    _shorten(graph, placeholders)
    _refuse(graph)
    roles = {node: entry.input for node, entry in inputs.items()}
    init = cut(graph, traced.marks, roles)
    inputs.update({node: Entry(input, Slot(input), None) for node, input in init.inputs.items()})
    return _assemble(traced, graph, inputs, init)


def _inputs(traced: Traced) -> dict[fx.Node, Entry]:
    """Placeholder -> entry. The first placeholders are the entries, in order; the others were lifted in mid-trace."""
    lifted = {item.node: item.entry for item in traced.lifted}
    first = (n for n in traced.module.graph.find_nodes(op="placeholder", sort=True) if n not in lifted)
    return {**dict(zip(first, traced.entries, strict=True)), **lifted}


def _constants(traced: Traced) -> dict[fx.Node, Entry]:
    """Tensors that the step makes from Python numbers: a 0-dim one becomes a factory, others become inputs that every rank holds whole."""
    out: dict[fx.Node, Entry] = {}
    graph, module = traced.module.graph, traced.module
    for node in list(graph.find_nodes(op="get_attr")):
        value = getattr(module, str(node.target))
        if isinstance(value, FakeTensor):
            value = value.constant
        if not isinstance(value, torch.Tensor):
            raise CaptureError(Offence("the step makes a tensor in a way that can't be traced", where=where(node)))
        with graph.inserting_before(node):
            if value.dim() == 0:
                new = graph.call_function(
                    aten.scalar_tensor.default, (value.item(),), {"dtype": value.dtype, "device": value.device}
                )
            else:
                new = graph.placeholder(f"constant_{len(out)}")
                input = Input(Role.USER, f"constant {node.target}")
                out[new] = Entry(input, Slot(input, value.detach().clone()), value)
        user = next(iter(node.users), node)
        new.meta = {**user.meta, "val": node.meta["val"]}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return out


def _tidy(graph: fx.Graph, placeholders: set[fx.Node]) -> None:
    """Drops nodes that do nothing in a functional graph; marks on them move to what they stood for."""
    for node in reversed(list(graph.nodes)):
        if isinstance(node.target, OpOverload) and node.target._schema.name.startswith(_NOISE) and not node.users:
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _IDENTITY:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        mark = node.meta.get("grad_of")
        if mark is not None and (source.meta.get("grad_of", mark) != mark or source in placeholders):
            continue  # two parameters share one gradient value: each needs a node of its own
        if mark is not None:
            source.meta["grad_of"] = mark
        for key in (ENTERS, LEAVES):
            if key in node.meta:
                source.meta[key] = (*source.meta.get(key, ()), *node.meta[key])
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _shorten(graph: fx.Graph, placeholders: set[fx.Node]) -> None:
    """t(t(x)) and views that lead back: writing through a view makes them in pairs."""
    for node in list(graph.nodes):
        source = _undone(node)
        if (
            source is None
            or "grad_of" in node.meta
            and (source in placeholders or source.meta.get("grad_of", node.meta["grad_of"]) != node.meta["grad_of"])
        ):
            continue
        if "grad_of" in node.meta:
            source.meta["grad_of"] = node.meta["grad_of"]
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _undone(node: fx.Node) -> fx.Node | None:
    """The node whose value `node` is again, by two views in a row."""
    inner = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(inner, fx.Node) or inner.target is not node.target or not isinstance(inner.args[0], fx.Node):
        return None
    source, val = inner.args[0], node.meta.get("val")
    before = source.meta.get("val")
    if not isinstance(val, torch.Tensor) or not isinstance(before, torch.Tensor):
        return None
    if node.target is aten.t.default:
        return source
    if node.target in (aten.view.default, aten._unsafe_view.default):
        same = list(map(str, val.shape)) == list(map(str, before.shape)) and list(map(str, val.stride())) == list(
            map(str, before.stride())
        )
        return source if same else None
    if node.target is aten.transpose.int:
        rank = val.dim()
        return source if {d % rank for d in node.args[1:]} == {d % rank for d in inner.args[1:]} else None  # type: ignore[operator]
    if node.target is aten.permute.default:
        first, second = inner.args[1], node.args[1]
        return source if [first[d] for d in second] == list(range(val.dim())) else None  # type: ignore[index,union-attr]
    return None


def _refuse(graph: fx.Graph) -> None:
    offences = []
    for node in graph.nodes:
        val = node.meta.get("val")
        tensors = [t for t in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(t, torch.Tensor)]
        if any(free_unbacked_symbols(t) for t in tensors) and not any(_unbacked(a) for a in node.all_input_nodes):
            offences.append(
                Offence(
                    f"{node.target}: the shape of its result depends on values",
                    where=where(node),
                    remedy="keep shapes fixed: use torch.where or a mask instead of nonzero, unique or indexing with a boolean tensor",
                )
            )
        if str(node.target).startswith(("c10d", "_c10d_functional")):
            offences.append(
                Offence(
                    f"the step communicates by itself: {node.target}",
                    where=where(node),
                    remedy="write the step for one device",
                )
            )
    if offences:
        raise CaptureError(offences)


def _unbacked(node: fx.Node) -> bool:
    val = node.meta.get("val")
    values = val if isinstance(val, (tuple, list)) else (val,)
    return any(isinstance(v, torch.Tensor) and bool(free_unbacked_symbols(v)) for v in values)


def _assemble(traced: Traced, graph: fx.Graph, inputs: dict[fx.Node, Entry], init: Init) -> Finished:
    output = graph.output_node()
    results = list(zip(traced.outputs, output.args[0], strict=True))  # type: ignore[arg-type]
    entry_nodes = {id(e): n for n, e in inputs.items()}
    sources = [entry_nodes[id(e)] for e in (*traced.entries, *(item.entry for item in traced.lifted))]
    by_state = {i.name: n for n, i in init.inputs.items()}
    kept: list[tuple[Output, Any, fx.Node | None]] = []
    for spec, value in results:
        target = sources[spec.updates] if spec.updates is not None else None
        if target is None and spec.role is Role.STATE:
            target = by_state.get(spec.name)
        if spec.role is Role.USER and isinstance(value, fx.Node) and "grad_of" in value.meta:
            spec = replace(spec, grad_of=value.meta["grad_of"])  # also one that zero_grad took off the parameter since
        if target is not value or spec.updates is None:
            kept.append((spec, value, target))
        if isinstance(value, fx.Node) and target is not None and target is not value:
            _check_update(spec, value, target)
    output.args = (tuple(v for _, v, _ in kept),)
    graph.eliminate_dead_code()
    order = [n for n in inputs if n.users or inputs[n].input.role is not Role.GRADIENT and n not in init.unused]
    order.sort(key=lambda n: _ORDER.index(inputs[n].input.role))
    _reorder(graph, inputs, order)
    index = {n: i for i, n in enumerate(order)}
    outputs = tuple(replace(s, updates=index.get(t) if t is not None else None) for s, _, t in kept)
    env = traced.faker.env
    specialised = frozenset(name for symbol, name in traced.faker.symbols.items() if symbol in env.replacements)
    step = StepGraph(
        fx.GraphModule(torch.nn.Module(), graph),
        tuple(inputs[n].input for n in order),
        outputs,
        traced.faker.batch,
        traced.faker.size if traced.faker.batch is None else None,
        tuple(dict.fromkeys(g.expr for g in env.guards if g.expr is not sympy.true)),
    )
    slots = tuple(inputs[n].slot for n in order)
    names = [e.input.name for e in traced.entries if e.input.role is Role.PARAMETER]
    cleared = tuple(n for n in names if n not in traced.alive and n in traced.watch.first)
    return Finished(
        step, slots, init.graph, specialised, cleared, frozenset(n for n in names if traced.watch.matters(n))
    )


def _check_update(spec: Output, value: fx.Node, target: fx.Node) -> None:
    """The new value of a stored tensor must fit its place."""
    new, old = value.meta["val"], target.meta["val"]
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return  # a number, or an optimizer's flag
    if list(map(str, new.shape)) != list(map(str, old.shape)) or new.dtype != old.dtype:
        raise StateError(
            Offence(
                f"the step replaces {spec.name}, {list(old.shape)} {old.dtype}, by {list(new.shape)} {new.dtype}",
                where=where(value),
                fqn=spec.name,
                remedy="a stored tensor keeps its shape and dtype; return what has the size of the batch instead of keeping it",
            )
        )


def _reorder(graph: fx.Graph, inputs: dict[fx.Node, Entry], order: list[fx.Node]) -> None:
    """Placeholders first, in `order`; the others go."""
    for node in [n for n in inputs if n not in set(order)]:
        graph.erase_node(node)
    for node in reversed(order):
        first = next(iter(graph.nodes))
        if first is not node:
            first.prepend(node)
        node._rename(identifier(inputs[node].input.name))
        node.target = node.name
