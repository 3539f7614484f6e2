"""Where a collective may stand: after its input exists and before its result is used, past the views and copies on its way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from spmd._torch import c10d_functional as c10d
from spmd.graph.local import settle
from spmd.graph.memory import WAIT, roots, seen_through, written

aten = torch.ops.aten
COPIES = (
    aten.constant_pad_nd.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.split_with_sizes_copy.default,
    aten.cat.default,
)
STARTS = (c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.all_reduce.default)


def light(node: fx.Node) -> bool:
    """Whether a node only shows or copies its inputs, so that it may move along with a collective."""
    if node.op != "call_function" or written(node) or node.target is WAIT:
        return False
    return node.target in COPIES or seen_through(node) is not None


@dataclass(frozen=True)
class Window:
    """One collective, its wait, and what may stand between it and the rest of the program.

    feed: light nodes that lead to it, in order. spread: light nodes that its result leads to, in order.
    sources: what the feed starts from. first: the first node that reads the result in earnest, or overwrites the input.
    """

    start: fx.Node
    wait: fx.Node
    feed: tuple[fx.Node, ...]
    spread: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    ready: fx.Node  # the last of the sources, or the node at which the ranks settle
    first: fx.Node


def windows(graph: fx.Graph, place: dict[fx.Node, float]) -> Iterator[Window]:
    """One for each collective, in program order."""
    root = roots(graph)
    writers: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for x in written(node):
            writers.setdefault(root[x], node)
    agreed = next((n for n in graph.nodes if n.target is settle), next(iter(graph.nodes)))
    for start in graph.nodes:
        if "collective" not in start.meta:
            continue
        (wait,) = start.users
        feed, sources = leading(start, place)
        spread, readers = following(wait, place)
        overwrites = [
            writers[root[x]] for x in start.all_input_nodes if root[x] in writers and start not in written(start)
        ]
        late = [w for w in overwrites if w is not start and place[w] > place[start]]
        yield Window(
            start,
            wait,
            tuple(feed),
            tuple(spread),
            tuple(sources),
            max([agreed, *sources], key=place.__getitem__),
            min([*readers, *late, graph.output_node()], key=place.__getitem__),
        )


def leading(start: fx.Node, place: dict[fx.Node, float]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The light nodes that lead to a collective, and the nodes they start from."""
    feed: set[fx.Node] = set()
    sources: set[fx.Node] = set()
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if node in feed or node in sources:
            continue
        if light(node):
            feed.add(node)
            todo += node.all_input_nodes
        else:
            sources.add(node)
    return sorted(feed, key=place.__getitem__), sorted(sources, key=place.__getitem__)


def following(wait: fx.Node, place: dict[fx.Node, float]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The light nodes that a result alone leads to, and the nodes that read it in earnest."""
    spread: dict[fx.Node, None] = {}
    readers: set[fx.Node] = set()
    todo = [wait]
    while todo:
        for user in todo.pop().users:
            if light(user) and len(user.all_input_nodes) == 1:
                if user not in spread:
                    spread[user] = None
                    todo.append(user)
            else:
                readers.add(user)
    return sorted(spread, key=place.__getitem__), sorted(readers, key=place.__getitem__)
