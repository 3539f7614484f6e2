"""Editing local graphs: new calls with their metadata, and a new order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from spmd._torch import detect_fake_mode, pytree
from spmd.errors import VerifyError
from spmd.graph.memory import before

PROVENANCE = ("phase", "source", "module", "step")


def call(graph: fx.Graph, target: Any, *args: Any, origin: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """A call at the graph's insertion point, with the value that it yields; from the user's line that `origin` comes from."""
    node = graph.call_function(target, args, kwargs)
    if origin is not None:
        node.meta.update({k: origin.meta[k] for k in PROVENANCE if k in origin.meta})
    node.meta["val"] = yielded(node)
    return node


def yielded(node: fx.Node) -> Any:
    """What a call yields for the values that its arguments have in their metadata."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = pytree.tree_map(_plain, (args, kwargs))
    mode = detect_fake_mode((args, kwargs)) or graph_mode(node.graph)
    if mode is None:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def graph_mode(graph: fx.Graph) -> Any:
    """The fake mode of a graph's values."""
    return detect_fake_mode([n.meta.get("val") for n in graph.find_nodes(op="placeholder")])


def _plain(x: Any) -> Any:
    """Numbers that differ from rank to rank are a kind of int that kernels don't take."""
    return int(x) if isinstance(x, int) and hasattr(x, "formula") else x


def nbytes(node: fx.Node) -> int:
    """Bytes of all tensors that a node yields."""
    leaves = (v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor))
    return sum(v.numel() * v.element_size() for v in leaves)


def places(graph: fx.Graph) -> dict[fx.Node, float]:
    """Each node's index."""
    return {node: float(i) for i, node in enumerate(graph.nodes)}


def reorder(graph: fx.Graph, wish: Mapping[fx.Node, float], must: Mapping[fx.Node, set[fx.Node]] | None = None) -> None:
    """Sort the graph by `wish`, as far as its dependencies let; ties keep their order. Equal on all ranks for equal programs.

    must: for each node those that come before it, from `memory.before`; default: as the present order has them.

    Raises:
        VerifyError: there is a cycle.
    """
    must = before(graph) if must is None else must
    waiting = {node: len(must[node]) for node in graph.nodes}
    after: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for earlier in must[node]:
            after.setdefault(earlier, []).append(node)
    index = {node: i for i, node in enumerate(graph.nodes)}
    fixed = {"placeholder": -1.0, "output": float("inf")}

    def key(node: fx.Node) -> tuple[float, int, fx.Node]:
        return fixed.get(node.op, wish.get(node, 0.0)), index[node], node

    ready = [key(node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        for later in after.get(node, ()):
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, key(later))
    if len(order) < len(waiting):
        stuck = next(node for node in graph.nodes if waiting[node])
        raise VerifyError(f"{stuck.name} would need itself: the graph has a cycle")
    for earlier, node in itertools.pairwise(order):
        if earlier.next is not node:
            earlier.append(node)
