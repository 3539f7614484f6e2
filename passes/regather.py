"""Regather: parameters are gathered again for the backward, not kept since the forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.fx as fx

from spmd.graph.edit import nbytes, places
from spmd.graph.local import LocalGraph
from spmd.graph.memory import roots, written
from spmd.passes.base import SEPARATE, GraphPass
from spmd.passes.windows import Window, windows


@dataclass(frozen=True)
class Regather(GraphPass):
    """Parameters are gathered again for the backward.

    What the forward gathers is freed after its last use there (FSDP, ZeRO-3). Without this pass it's kept (ZeRO-2).

    keep_mb: parameters used last in the forward, and so first in the backward, are kept up to this many MB; the very last one always.

    A parameter whose uses in forward and backward alternate (micro-batches) is gathered once.
    """

    name = "regather"
    requires = frozenset({SEPARATE})
    keep_mb: float = 4.0

    def run(self, graph: LocalGraph) -> LocalGraph:
        place = places(graph.graph)
        found = [s for w in windows(graph.graph, place) if (s := span(w, place)) is not None]
        found.sort(key=lambda s: -s.last)
        root, stored = roots(graph.graph), {}
        for node in graph.graph.nodes:
            stored.update({root[x]: place[node] for x in written(node) if root[x] not in stored})
        kept = 0
        for i, s in enumerate(found):
            kept += nbytes(s.window.wait)
            overwritten = stored.get(root[s.window.start.all_input_nodes[0]], s.first)
            if i and kept > self.keep_mb * 2**20 and overwritten >= s.first:
                again(graph.graph, s, place)
        return graph


@dataclass(frozen=True)
class Span:
    """A gathered parameter between its last use in the forward and its first one after it."""

    window: Window
    last: float
    first: float
    later: tuple[fx.Node, ...]  # readers after the forward


def span(w: Window, place: dict[fx.Node, float]) -> Span | None:
    """None where there's nothing to free: it's no parameter, or it's used in one phase, or in both by turns."""
    if w.start.meta["collective"].role != "param_gather":
        return None
    family = {w.wait, *w.spread}
    readers = sorted({u for x in family for u in x.users if u not in family}, key=place.__getitem__)
    early = [u for u in readers if u.meta.get("phase") == "forward"]
    later = [u for u in readers if u.meta.get("phase") != "forward"]
    if not early or not later or place[later[0]] < place[early[-1]]:
        return None
    return Span(w, place[early[-1]], place[later[0]], tuple(later))


def again(graph: fx.Graph, s: Span, place: dict[fx.Node, float]) -> None:
    """A second gather, before the first node that reads it after the forward."""
    copies: dict[fx.Node, fx.Node] = {}
    family = (s.window.start, s.window.wait, *s.window.spread)
    wanted = {x for u in s.later for x in u.all_input_nodes}
    for x in reversed(family):
        if x in wanted:
            wanted.update(x.all_input_nodes)
    with graph.inserting_before(s.later[0]):
        for x in family:
            if x in wanted:
                copies[x] = graph.node_copy(x, lambda n: copies.get(n, n))
                copies[x].meta.update(phase="backward", again=True)
                place[copies[x]] = s.first - 0.5
    note = s.window.start.meta["collective"]
    copies[s.window.start].meta["collective"] = replace(note, reason="read again after the forward")
    for reader in s.later:
        for x, copy in copies.items():
            reader.replace_input_with(x, copy)
