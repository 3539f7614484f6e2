"""Bucket: collectives of one kind become one."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import c10d_functional as c10d
from spmd.graph.edit import call, nbytes, places
from spmd.graph.local import Collective, LocalGraph
from spmd.graph.memory import WAIT
from spmd.passes.base import SEPARATE, GraphPass, Numerics
from spmd.passes.windows import STARTS, Window, windows

aten = torch.ops.aten
GATHER, SCATTER, REDUCE = STARTS


@dataclass(frozen=True)
class Bucket(GraphPass):
    """Collectives of one kind are merged.

    That's all_gather, reduce_scatter and all_reduce of one type, group and reduction, where none needs another's result.

    cap_mb: size of a bucket of reductions. first_mb: of the first one, which is then on its way early.
    gather_mb: size of a bucket of gathers: so much more memory than one block's parameters is in use.

    The parameters of one block ("blocks.3") stay in one bucket, however large. A gather stands before the first use of any member, a reduction
    after the last input. Packing is one copy (`cat`), unpacking a gather one more; reduced values are views of the bucket.

    torch's `fx_passes.bucketing` isn't used: it merges only neighbours of one key, asks for a topological sort after it, and writes this rank's
    number into the program, which then differs from rank to rank.
    """

    name = "bucket"
    invalidates = frozenset({SEPARATE})
    numerics = Numerics.ROUNDING
    cap_mb: float = 25.0
    first_mb: float = 1.0
    gather_mb: float = 4.0

    def run(self, graph: LocalGraph) -> LocalGraph:
        place = places(graph.graph)
        found = [
            w for w in windows(graph.graph, place) if w.start.target in STARTS and not chained(w) and not uneven(w)
        ]
        for members in self.groups(found, place):
            if len(members) > 1:
                merge(graph.graph, members, place)
        return graph

    def groups(self, found: Sequence[Window], place: dict[fx.Node, float]) -> list[list[Window]]:
        """What goes together, in program order."""
        gathers = [w for w in found if w.start.target is GATHER]
        others = [w for w in found if w.start.target is not GATHER]
        gathers.sort(key=lambda w: place[w.first])
        others.sort(key=lambda w: place[w.ready])
        block = blocks(found)
        sizes: Counter[Any] = Counter()
        for w in found:
            sizes[kind(w), block[w.start]] += size(w)
        bins: dict[Any, list[Bin]] = {}
        for w in [*gathers, *others]:
            opened = bins.setdefault(kind(w), [])
            whole = sizes[kind(w), block[w.start]]
            home = next((b for b in opened if b.takes(w, block[w.start], whole, place)), None)
            if home is None:
                cap = self.gather_mb if w.start.target is GATHER else self.cap_mb if opened else self.first_mb
                home = Bin(cap * 2**20)
                opened.append(home)
            home.add(w, block[w.start], place)
        return [b.members for group in bins.values() for b in group]


@dataclass
class Bin:
    """A bucket that is being filled."""

    cap: float
    members: list[Window] = field(default_factory=list)
    blocks: set[str] = field(default_factory=set)
    bytes: int = 0
    ready: float = -1.0
    first: float = float("inf")

    def takes(self, w: Window, block: str, whole: int, place: dict[fx.Node, float]) -> bool:
        """Whether it can be moved together with the members, and may by its size: `whole` is that of all of its block."""
        if max(self.ready, place[w.ready]) >= min(self.first, place[w.first]):
            return False
        return block in self.blocks or self.bytes + whole <= self.cap

    def add(self, w: Window, block: str, place: dict[fx.Node, float]) -> None:
        self.members.append(w)
        self.blocks.add(block)
        self.bytes += size(w)
        self.ready, self.first = max(self.ready, place[w.ready]), min(self.first, place[w.first])


def chained(w: Window) -> bool:
    """Whether it moves on what another collective brought. It then stays where it is: the other may move, and its own place is known by that."""
    return any(x.target is WAIT for x in w.sources)


def uneven(w: Window) -> bool:
    """Whether its size differs from rank to rank along another axis: there the lengths of a bucket's members would differ, too."""
    return bool(w.start.meta.get("uneven") or w.wait.meta.get("uneven"))


def kind(w: Window) -> Any:
    """What members of one bucket have in common."""
    val = w.start.args[0].meta["val"]  # type: ignore[union-attr]
    return w.start.target, w.start.args[1:], val.dtype, val.device, w.start.meta.get("again")


def size(w: Window) -> int:
    return max(nbytes(w.start), nbytes(w.start.args[0]))  # type: ignore[arg-type]


def blocks(found: Sequence[Window]) -> dict[fx.Node, str]:
    """The block of the model that each parameter or gradient belongs to: "layers.3" of "layers.3.norm.weight"; of other values themselves.

    A block ends at the first number of a name, or at a later one where more than half of all bytes would be in one block.
    """
    names = {w.start: w.start.meta["collective"].fqn or w.start.name for w in found}
    depth = dict.fromkeys(names, 1)
    while True:
        block = {start: prefix(name, depth[start]) for start, name in names.items()}
        sizes: Counter[str] = Counter()
        for w in found:
            sizes[block[w.start]] += size(w)
        large = [x for x in names if 2 * sizes[block[x]] > sizes.total() and prefix(names[x], depth[x] + 1) != block[x]]
        if not large:
            return block
        depth |= {x: depth[x] + 1 for x in large}


def prefix(name: str, depth: int) -> str:
    """A name up to its number `depth`; up to the last one, or to the module, if it has fewer."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()][:depth]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts[:-1]) or name


def merge(graph: fx.Graph, members: list[Window], place: dict[fx.Node, float]) -> None:
    """One collective for all of `members`."""
    target: Any = members[0].start.target
    if target is GATHER:
        where = min((w.first for w in members), key=place.__getitem__)
        with graph.inserting_before(where):
            marker = graph.call_function(merge)
        at = place[where] - 0.5
    else:
        where = max((w.ready for w in members), key=place.__getitem__)
        with graph.inserting_after(where):
            marker = graph.call_function(merge)
        at = place[where] + 0.5
    for x in sorted({x for w in members for x in w.feed if place[x] > at}, key=place.__getitem__):
        marker.prepend(x)
        place[x] = at
    with graph.inserting_before(marker):
        results = {GATHER: gather, SCATTER: scatter, REDUCE: reduce}[target](graph, members)
    for w, result in zip(members, results, strict=True):
        result.meta.update({k: v for k, v in w.wait.meta.items() if k != "val"})
        place[result] = at
        w.wait.replace_all_uses_with(result)
        graph.erase_node(w.wait)
        graph.erase_node(w.start)
    last = marker
    for x in sorted({x for w in members for x in w.spread if place[x] < at}, key=place.__getitem__):
        last.append(x)
        last, place[x] = x, at
    graph.erase_node(marker)


def gather(graph: fx.Graph, members: list[Window]) -> list[fx.Node]:
    _, world, group = members[0].start.args
    flat = call(graph, aten.cat.default, [flattened(graph, w) for w in members], origin=members[0].start)
    moved = transfer(graph, members, GATHER, flat, world, group)
    rows = call(graph, aten.view.default, moved, [world, -1], origin=moved)
    lengths = [value(w).numel() // int(world) for w in members]  # type: ignore[arg-type]
    parts = call(graph, aten.split_with_sizes_copy.default, rows, lengths, 1, origin=moved)
    return shaped(graph, parts, members)


def scatter(graph: fx.Graph, members: list[Window]) -> list[fx.Node]:
    _, op, world, group = members[0].start.args
    lengths = [value(w).numel() for w in members]
    rows = [
        call(graph, aten.view.default, w.start.args[0], [world, n], origin=w.start)
        for w, n in zip(members, lengths, strict=True)
    ]
    flat = call(graph, aten.cat.default, rows, 1, origin=members[0].start)
    flat = call(graph, aten.view.default, flat, [int(world) * sum(lengths)], origin=flat)  # type: ignore[arg-type]
    moved = transfer(graph, members, SCATTER, flat, op, world, group)
    return shaped(graph, call(graph, aten.split_with_sizes.default, moved, lengths, origin=moved), members)


def reduce(graph: fx.Graph, members: list[Window]) -> list[fx.Node]:
    _, op, group = members[0].start.args
    flat = call(graph, aten.cat.default, [flattened(graph, w) for w in members], origin=members[0].start)
    moved = transfer(
        graph, members, c10d.all_reduce_.default, flat, op, group
    )  # in place: the bucket is memory of its own
    lengths = [value(w).numel() for w in members]
    return shaped(graph, call(graph, aten.split_with_sizes.default, moved, lengths, origin=moved), members)


def value(w: Window) -> torch.Tensor:
    return w.wait.meta["val"]


def flattened(graph: fx.Graph, w: Window) -> fx.Node:
    x: Any = w.start.args[0]
    return x if x.meta["val"].dim() == 1 else call(graph, aten.view.default, x, [x.meta["val"].numel()], origin=w.start)


def transfer(graph: fx.Graph, members: list[Window], target: Any, *args: Any) -> fx.Node:
    """The collective and its wait."""
    start = call(graph, target, *args, origin=members[0].start)
    start.meta["collective"] = note([w.start.meta["collective"] for w in members])
    if again := members[0].start.meta.get("again"):
        start.meta["again"] = again
    return call(graph, WAIT, start, origin=start)


def note(notes: Sequence[Collective]) -> Collective:
    """What a bucket is for: named by its first parameter."""
    first = next((n for n in notes if n.fqn), notes[0])
    return replace(first, nbytes=sum(n.nbytes for n in notes), members=tuple(notes))


def shaped(graph: fx.Graph, parts: fx.Node, members: list[Window]) -> list[fx.Node]:
    """The members' results, from one flat part each."""
    found = []
    for i, w in enumerate(members):
        part = call(graph, operator.getitem, parts, i, origin=w.wait)
        found.append(call(graph, aten.view.default, part, list(value(w).shape), origin=w.wait))
    return found
