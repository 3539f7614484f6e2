"""Layouts: how one tensor lies on one mesh axis.

  R                       the whole tensor on every rank
  P(op)                   every rank holds a summand (or candidate) of the whole: sum, avg, max, min; own: a value of its own, that stays there
  S(dim | outer, n, inner)  `dim` is seen as (outer, n, inner) and the factor n is split like `torch.chunk`. outer > 1 is the strided shard
                          of a batch that lies inside another flattened dim; inner > 1 matters where n doesn't divide.

Layouts have one canonical name each: `Sharded.canonical` gives the finest factor with the same cuts, so equal layouts compare equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Replicated:
    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True)
class Sharded:
    dim: int
    outer: int
    n: int
    inner: int

    def __str__(self) -> str:
        return (
            f"S({self.dim})" if self.outer == self.inner == 1 else f"S({self.dim}|{self.outer},{self.n},{self.inner})"
        )

    def canonical(self, world: int) -> Sharded:
        """The one name of this layout on `world` ranks."""
        chunk = ceil_div(self.n, world)
        for f in range(self.inner, 1, -1):
            if self.inner % f == 0 and ceil_div(self.n * f, world) == chunk * f:
                return replace(self, n=self.n * f, inner=self.inner // f)
        return self

    @property
    def size(self) -> int:
        """Global size of the dim."""
        return self.outer * self.n * self.inner


Layout = Replicated | Partial | Sharded
R = Replicated()


def shard(dim: int, size: int) -> Sharded:
    """Plain S(dim) of a dim with `size` elements."""
    return Sharded(dim, 1, size, 1)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def bounds(n: int, world: int, rank: int) -> tuple[int, int]:
    """The half-open range of `n` that `rank` holds, as `torch.chunk` cuts it: full chunks first, then a short one, then empty ones."""
    c = ceil_div(n, world)
    return min(rank * c, n), min((rank + 1) * c, n)


class RankInt(int):
    """An integer that differs from rank to rank; `formula` is the same text on every rank, so programs can be compared."""

    formula: str

    def __new__(cls, value: int, formula: str) -> RankInt:
        self = super().__new__(cls, value)
        self.formula = formula
        return self

    def __reduce__(self) -> tuple[type[RankInt], tuple[int, str]]:
        return RankInt, (int(self), self.formula)

    def __deepcopy__(self, memo: object) -> RankInt:
        return self


def local_length(layout: Sharded, world: int, rank: int) -> int:
    """Size of the sharded dim on `rank`; a RankInt where ranks differ."""
    a, b = bounds(layout.n, world, rank)
    size = layout.outer * (b - a) * layout.inner
    if layout.n % world == 0:
        return size
    scale = layout.outer * layout.inner
    return RankInt(size, f"chunk({layout.n})" + (f"*{scale}" if scale > 1 else ""))


def offset(n: int, value: int, scale: int, upper: bool = False) -> RankInt:
    """Where a rank's chunk of `n` begins or ends."""
    return RankInt(value * scale, f"{'end' if upper else 'start'}({n})" + (f"*{scale}" if scale > 1 else ""))


def local_shape(shape: Sequence[int], layout: Layout, world: int, rank: int) -> tuple[int, ...]:
    """Shape of the tensor on `rank`."""
    if not isinstance(layout, Sharded):
        return tuple(shape)
    return (*shape[: layout.dim], local_length(layout, world, rank), *shape[layout.dim + 1 :])


def padded_shape(shape: Sequence[int], layout: Layout, world: int) -> tuple[int, ...]:
    """Shape of the tensor on every rank when shards are padded to the common chunk."""
    if not isinstance(layout, Sharded):
        return tuple(shape)
    chunk = layout.outer * ceil_div(layout.n, world) * layout.inner
    return (*shape[: layout.dim], chunk, *shape[layout.dim + 1 :])


def remaining(
    shape: Sequence[int], layouts: Sequence[Layout], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[tuple[int, ...]]:
    """What is left of a tensor on a mesh, whose last axis cuts first: [k] is the shape that axis k leaves on this rank, the last one that of the whole."""
    left = [tuple(map(int, shape))]
    for layout, ranks, place in reversed(list(zip(layouts, mesh, coordinate, strict=True))):
        left.insert(0, tuple(map(int, local_shape(left[0], layout, ranks, place))))
    return left


def buffer_shape(
    shape: Sequence[int], layouts: Sequence[Layout], mesh: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Shape of a stored tensor's buffer on a mesh: the later axes' part, padded to the common chunk of the first."""
    return padded_shape(remaining(shape, layouts, mesh, coordinate)[1], layouts[0], mesh[0])


def take(whole: torch.Tensor, layout: Layout, world: int, rank: int) -> torch.Tensor:
    """The part of `whole` that `rank` holds (a view where outer == 1). A partial sum is held by rank 0."""
    if isinstance(layout, Replicated):
        return whole
    if isinstance(layout, Partial):
        return whole if rank == 0 or layout.op != "sum" else torch.zeros_like(whole)
    a, b = bounds(layout.n, world, rank)
    d = layout.dim
    if layout.outer == 1:
        return whole.narrow(d, a * layout.inner, (b - a) * layout.inner)
    split = whole.unflatten(d, (layout.outer, layout.n, layout.inner)).narrow(d + 1, a, b - a)
    return split.reshape(local_shape(whole.shape, layout, world, rank))


def join(parts: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor from the parts of all ranks: the inverse of `take`, and what a layout means."""
    if isinstance(layout, Replicated):
        return parts[0]
    if isinstance(layout, Partial):
        stack = torch.stack(list(parts))
        if stack.dtype == torch.bool:
            return stack.all(0) if layout.op == "min" else stack.any(0)
        return {
            "sum": lambda: stack.sum(0, dtype=stack.dtype),
            "avg": lambda: stack.mean(0),
            "max": lambda: stack.amax(0),
            "min": lambda: stack.amin(0),
        }[layout.op]()
    d, world = layout.dim, len(parts)
    if layout.outer == 1:
        return torch.cat(list(parts), d)
    lengths = [b - a for a, b in (bounds(layout.n, world, r) for r in range(world))]
    split = [p.unflatten(d, (layout.outer, length, layout.inner)) for p, length in zip(parts, lengths, strict=True)]
    whole = torch.cat(split, d + 1)
    return whole.flatten(d, d + 2)


def state_shard(shape: Sequence[int], world: int, uneven: Collection[int] = ()) -> Layout:
    """Where a parameter or state of `shape` is split at rest: the first dim with at least as many rows as ranks, else nowhere.

    uneven: dims whose size differs from rank to rank along other axes; all ranks must choose alike.
    """
    for d, size in enumerate(shape):
        if size >= world and d not in uneven and torch.Size(shape).numel():
            return shard(d, size)
    return R
