"""Fuse: per-parameter updates become one op over many parameters, in place."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from spmd.graph.edit import call, places
from spmd.graph.local import LocalGraph
from spmd.graph.memory import WAIT, roots, seen_through, tensors
from spmd.passes.base import GraphPass

aten = torch.ops.aten
IN_PLACE = {  # functional op -> its form in place. Lists of parameters, gradients, moments (three), counters
    aten._fused_adam.default: aten._fused_adam_.default,
    aten._fused_adamw.default: aten._fused_adamw_.default,
    aten._fused_adam.tensor_lr: aten._fused_adam_.tensor_lr,
    aten._fused_adamw.tensor_lr: aten._fused_adamw_.tensor_lr,
}
GRADIENTS, COUNTERS = 1, 5
ROWS = (
    aten.view.default,
    aten.reshape.default,
    aten.contiguous.default,
    aten.split_with_sizes.default,
    operator.getitem,
    WAIT,
)


@dataclass(frozen=True)
class Fuse(GraphPass):
    """Updates of many parameters become one op, in place.

    Fused Adam and AdamW update the parameters of one bucket of gradients in one call, in their storage; counters are raised together, and
    small values stored together.

    small_kb: stores of values up to this size wait for each other. Larger ones are done at once, so that the old and the new value aren't both kept.
    """

    name = "fuse"
    small_kb: float = 4.0

    def run(self, graph: LocalGraph) -> LocalGraph:
        updates(graph.graph)
        counters(graph.graph)
        self.stores(graph.graph)
        return graph

    def stores(self, graph: fx.Graph) -> None:
        """Small `copy_`s of one type, where the last of them stands."""
        groups: dict[Any, list[fx.Node]] = {}
        for node in graph.find_nodes(op="call_function", target=aten.copy_.default, sort=True):
            home, new = node.args[0].meta["val"], node.args[1].meta["val"]
            if (
                not node.users
                and home.dtype == new.dtype
                and home.device == new.device
                and home.shape == new.shape
                and small(home, self.small_kb)
            ):
                groups.setdefault((home.dtype, home.device), []).append(node)
        for copies in groups.values():
            if len(copies) > 1:
                with graph.inserting_before(copies[-1]):
                    call(graph, aten._foreach_copy_.default, [c.args[0] for c in copies], [c.args[1] for c in copies])
                for copy in copies:
                    graph.erase_node(copy)


def small(x: torch.Tensor, kb: float) -> bool:
    return x.numel() * x.element_size() <= kb * 1024


def updates(graph: fx.Graph) -> None:
    """Fused optimizer calls whose results are only stored where their arguments lie."""
    root = roots(graph)
    groups: dict[Any, list[tuple[fx.Node, list[fx.Node]]]] = {}
    for node in graph.nodes:
        if node.target in IN_PLACE and (found := stored(node)) is not None:
            gradients = frozenset(root[x] for x in tensors(node.args[GRADIENTS]))
            rest = (*node.args[COUNTERS + 1 :], *sorted(node.kwargs.items(), key=operator.itemgetter(0)))
            groups.setdefault((node.target, layout(node), gradients, repr(rest)), []).append((node, found))
    place = places(graph)
    for (target, *_), members in groups.items():
        nodes = [node for node, _ in members]
        lists = [[x for node in nodes for x in tensors(node.args[i])] for i in range(COUNTERS + 1)]
        last = max((x for node, copies in members for x in (node, *copies)), key=place.__getitem__)
        with graph.inserting_after(last):
            call(graph, IN_PLACE[target], *lists, *nodes[0].args[COUNTERS + 1 :], origin=nodes[0], **nodes[0].kwargs)
        for node, copies in members:
            for copy in copies:
                graph.erase_node(copy)
            for x in [u for part in node.users for u in part.users] + list(node.users) + [node]:
                graph.erase_node(x)


def stored(node: fx.Node) -> list[fx.Node] | None:
    """The `copy_`s that store what a functional call yields, if that's all that happens to it and each argument is overwritten."""
    copies: list[fx.Node] = []
    homes: set[fx.Node] = set()
    for part in node.users:
        if part.target is not operator.getitem:
            return None
        for x in part.users:
            if x.target is not operator.getitem or part.args[1] == GRADIENTS:
                return None
            home: Any = node.args[part.args[1]][x.args[1]]  # type: ignore[index]
            for copy in x.users:
                if copy.target is not aten.copy_.default or copy.args != (home, x) or copy.users:
                    return None
                copies.append(copy)
                homes.add(home)
    if not all(flat(x) for i in range(COUNTERS) for x in tensors(node.args[i])):
        return None
    needed = {x for i in (0, 2, 3, 4) for x in tensors(node.args[i])}
    return copies if homes == needed and len(copies) == len(needed) else None


def flat(x: fx.Node) -> bool:
    """Whether a tensor is contiguous on every rank, not on this one only: the kernels go through memory from end to end. A part of rows is."""
    if not x.meta["val"].is_contiguous():
        return False
    source: fx.Node | None = x
    while source is not None and (source.target in ROWS or source.target is aten.slice.Tensor and source.args[1] == 0):
        source = seen_through(source)
    return source is None or seen_through(source) is None


def layout(node: fx.Node) -> Any:
    """What the tensors of one call over lists have in common."""
    first = node.args[0][0].meta["val"]  # type: ignore[index, union-attr]
    return first.dtype, first.device, tuple(len(x) for x in node.args[: COUNTERS + 1])  # type: ignore[arg-type]


def counters(graph: fx.Graph) -> None:
    """`step + 1` of many counters that come in as inputs."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor, sort=True):
        x, amount = node.args[0], node.args[1]
        if isinstance(x, fx.Node) and x.op == "placeholder" and isinstance(amount, (int, float)) and not node.kwargs:
            val = x.meta["val"]
            if val.dim() == 0 and node.meta["val"].dtype == val.dtype:
                groups.setdefault((val.dtype, val.device, type(amount), amount), []).append(node)
    for (*_, amount), adds in groups.items():
        if len(adds) > 1:
            replace_by(graph, adds, call_before(graph, adds[0], [a.args[0] for a in adds], amount))


def call_before(graph: fx.Graph, first: fx.Node, xs: list[Any], amount: float) -> fx.Node:
    with graph.inserting_before(first):
        return call(graph, aten._foreach_add.Scalar, xs, amount, origin=first)


def replace_by(graph: fx.Graph, nodes: Iterable[fx.Node], together: fx.Node) -> None:
    """Each of `nodes` becomes an element of what `together` yields."""
    cursor = together
    for i, node in enumerate(nodes):
        with graph.inserting_after(cursor):
            cursor = call(graph, operator.getitem, together, i, origin=node)
        cursor.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        node.replace_all_uses_with(cursor)
        graph.erase_node(node)
