"""Overlap: collectives start early and are waited for late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from spmd.graph.edit import nbytes, places, reorder
from spmd.graph.local import LocalGraph
from spmd.passes.base import GraphPass
from spmd.passes.windows import Window, windows


@dataclass(frozen=True)
class Overlap(GraphPass):
    """Collectives start early and are waited for late.

    One starts as soon as its input exists, a gather when the one before it is first used; each wait comes just before the first reader.

    prefetch: how many gathers ahead of the one in use. More hide more and hold more parameters at once.
    max_in_flight_mb: bytes under way at any time. Beyond, gathers start later and reductions are waited for earlier.

    torch's `fx_passes.overlap_scheduling` isn't used: it benchmarks on CUDA, needs patches without it, and makes cycles in graphs that hold a backward.
    """

    name = "overlap"
    max_in_flight_mb: float = 512.0
    prefetch: int = 1

    def run(self, graph: LocalGraph) -> LocalGraph:
        place = places(graph.graph)
        found = list(windows(graph.graph, place))
        flights = self.schedule(found, place)
        wish = dict(place)
        for w, (start, end) in zip(found, flights, strict=True):
            for x in (*w.feed, w.start):
                wish[x] = min(wish[x], start)
            wish[w.start] = start
            for x in (w.wait, *w.spread):
                wish[x] = max(wish[x], end)
        reorder(graph.graph, wish)
        return graph

    def schedule(self, found: Sequence[Window], place: dict[fx.Node, float]) -> list[tuple[float, float]]:
        """Where each collective starts and where it's waited for."""
        flights = [(place[w.ready] + 0.5, place[w.first] - 0.5) for w in found]
        gathers = sorted((i for i, w in enumerate(found) if early(w)), key=lambda i: (flights[i][1], i))
        for turn, i in enumerate(gathers):
            before = place[found[gathers[turn - self.prefetch]].first] - 0.25 if turn >= self.prefetch else 0.0
            flights[i] = max(flights[i][0], min(before, flights[i][1])), flights[i][1]
        under_way: list[int] = []
        for i in sorted(range(len(found)), key=lambda i: (flights[i][0], i)):
            start, end = flights[i]
            under_way = [j for j in under_way if flights[j][1] > start]
            room = self.max_in_flight_mb * 2**20 - size(found[i])
            if early(found[i]) and sum(size(found[j]) for j in under_way) > room:
                start = end
            under_way.sort(key=lambda j: flights[j][1])
            while under_way and not early(found[i]) and sum(size(found[j]) for j in under_way) > room:
                j = under_way.pop(0)
                flights[j] = flights[j][0], start - 0.1
            flights[i] = start, max(start, end)
            under_way.append(i)
        return flights


def early(w: Window) -> bool:
    """Whether it could start long before it's needed: what it moves is there from the beginning."""
    return all(x.op == "placeholder" for x in w.sources)


def size(w: Window) -> int:
    return max(nbytes(w.start), sum(map(nbytes, w.start.all_input_nodes)))
