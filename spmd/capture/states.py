"""Cuts the graph at the marks: what makes new optimizer state becomes a graph of its own, run once before the first step."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from spmd.capture.fakes import memory_order
from spmd.capture.marks import Marks
from spmd.graph.step import Input, Output, Role, StepGraph

aten = torch.ops.aten

# Ops that read only the shape of their first argument, and the value they fill in.
_FILL = {
    aten.zeros_like.default: lambda node: 0,
    aten.ones_like.default: lambda node: 1,
    aten.full_like.default: lambda node: node.args[1],
    aten.empty_like.default: lambda node: 0,
    aten.new_zeros.default: lambda node: 0,
    aten.new_ones.default: lambda node: 1,
    aten.new_full.default: lambda node: node.args[2],
}
_ALLOWED = (Role.PARAMETER, Role.BUFFER, Role.HYPER)


@dataclass
class Init:
    """The outcome: new STATE placeholders in the step, and the graph that makes their first values."""

    inputs: dict[fx.Node, Input] = field(default_factory=dict)
    graph: StepGraph | None = None
    unused: set[fx.Node] = field(default_factory=set)


def cut(graph: fx.Graph, marks: Marks, roles: dict[fx.Node, Input]) -> Init:
    """A mark whose value follows from parameters, buffers, hyper-parameters and constants becomes an input; others are just removed.

    `roles`: the placeholders. A state made from gradients or arguments stays an output of a first-step graph.
    """
    result = Init()
    makers: list[tuple[Input, fx.Node]] = []
    for node, key in marks.nodes.items():
        value = node.args[0]
        assert isinstance(value, fx.Node)
        if not node.users or not _independent(value, roles, {}):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            continue
        input = Input(Role.STATE, key.name, key.optimizer, key.parameter, key.key)
        with graph.inserting_before(next(iter(graph.nodes))):
            place = graph.placeholder(identifier(input.name))
        place.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(place)
        graph.erase_node(node)
        result.inputs[place] = input
        makers.append((input, value))
    if makers:
        result.graph = _build(makers, roles)
    return result


def identifier(name: str) -> str:
    """A Python identifier for a placeholder."""
    text = re.sub(r"\W+", "_", name).strip("_")
    return text if text.isidentifier() and not keyword.iskeyword(text) else f"_{text}"


def _independent(node: fx.Node, roles: dict[fx.Node, Input], seen: dict[fx.Node, bool]) -> bool:
    """Whether `node` can be computed before the step, drawing no random numbers and knowing no batch."""
    if node in seen:
        return seen[node]
    val = node.meta.get("val")
    if node.op == "placeholder":
        ok = roles[node].role in _ALLOWED if node in roles else False
    elif isinstance(val, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in val.shape):
        ok = False
    elif node.target in _FILL:
        ok = all(_independent(a, roles, seen) for a in node.all_input_nodes if a is not node.args[0])
    elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        ok = False
    else:
        ok = all(_independent(a, roles, seen) for a in node.all_input_nodes)
    seen[node] = ok
    return ok


def _build(makers: list[tuple[Input, fx.Node]], roles: dict[fx.Node, Input]) -> StepGraph:
    """The graph of all makers; its inputs are the parameters, buffers and numbers that they read."""
    needed: dict[fx.Node, None] = {}
    for _, value in makers:
        _collect(value, needed)
    graph, env = fx.Graph(), {}
    sources = [n for n in needed if n.op == "placeholder"]
    for node in sources:
        env[node] = graph.node_copy(node)
    for node in needed:
        if node.op == "placeholder":
            continue
        env[node] = _factory(graph, node, env) if node.target in _FILL else graph.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
    graph.output(tuple(env[value] for _, value in makers))
    outputs = tuple(Output(Role.STATE, input.name) for input, _ in makers)
    return StepGraph(fx.GraphModule(torch.nn.Module(), graph), tuple(roles[n] for n in sources), outputs)


def _collect(node: fx.Node, needed: dict[fx.Node, None]) -> None:
    """Topological order of what `node` needs."""
    if node in needed:
        return
    for a in node.all_input_nodes:
        if not (node.target in _FILL and a is node.args[0]):
            _collect(a, needed)
    needed[node] = None


def _factory(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """`zeros_like(x)` without x: the same shape, strides, dtype and device."""
    val: torch.Tensor = node.meta["val"]
    fill: Any = map_arg(_FILL[node.target](node), env.__getitem__)  # type: ignore[index]
    order = memory_order(val)
    kwargs: dict[str, Any] = {"dtype": val.dtype, "device": val.device}
    made = graph.call_function(aten.full.default, ([val.shape[d] for d in order], fill), kwargs)
    if order == sorted(order):
        return made
    made.meta = {**node.meta, "val": val.permute(order)}
    return graph.call_function(aten.permute.default, (made, [order.index(d) for d in range(val.dim())]))
