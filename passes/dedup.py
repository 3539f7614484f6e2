"""Dedup: one node for equal ones."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import OpOverload
from spmd.graph.edit import nbytes
from spmd.graph.local import LocalGraph
from spmd.graph.memory import WAIT, draws, roots, seen_through, written
from spmd.passes.base import GraphPass

PURE = ("aten", "prims", "_c10d_functional")  # other namespaces may do what their schema doesn't say


@dataclass(frozen=True)
class Dedup(GraphPass):
    """Equal collectives become one, and so do equal ops of one phase.

    max_mb: a larger result of an op is made again rather than kept.

    What the step returns stays apart, and so do recomputed activations and parameters that are gathered again: they're equal on purpose.
    """

    name = "dedup"
    max_mb: float = 1.0

    def run(self, graph: LocalGraph) -> LocalGraph:
        root = roots(graph.graph)
        apart = {root[x] for x in graph.graph.output_node().all_input_nodes}
        apart |= {root[x] for n in graph.graph.nodes for x in written(n) if root[x].op != "placeholder"}
        seen: dict[Any, fx.Node] = {}
        for node in list(graph.graph.nodes):
            if root[node] in apart or not self.mergeable(node):
                continue
            first = seen.setdefault(key(node), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.graph.erase_node(node)
        return graph

    def mergeable(self, node: fx.Node) -> bool:
        if node.op != "call_function" or written(node) or draws(node) or node.meta.get("checkpoint"):
            return False
        if isinstance(node.target, OpOverload):
            moves = "collective" in node.meta or node.target is WAIT or seen_through(node) is not None
            return node.target.namespace in PURE and (moves or nbytes(node) <= self.max_mb * 2**20)
        return getattr(node.target, "__module__", "") in (operator.__name__, "_operator", math.__name__)


def key(node: fx.Node) -> Any:
    """Equal for nodes that yield the same. Numbers that differ from rank to rank count as their formula."""
    moves = "collective" in node.meta or node.target is WAIT
    return (
        node.target,
        frozen(node.args),
        frozen(node.kwargs),
        "" if moves else node.meta.get("phase"),
        node.meta.get("again"),
    )


def frozen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(map(frozen, x))
    if isinstance(x, dict):
        return tuple((k, frozen(v)) for k, v in x.items())
    if isinstance(x, fx.Node):
        return x
    if isinstance(x, (int, float, complex)):
        return type(x).__name__, getattr(x, "formula", None) or repr(x)
    return x if isinstance(x, (str, torch.dtype, torch.device)) else repr(x)
