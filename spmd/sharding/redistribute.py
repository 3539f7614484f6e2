"""Redistributions: O(1) nodes at any world size, the same on every rank. Uneven shards are padded to the common chunk, moved, and cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from spmd.graph.local import Collective
from spmd.sharding import emit
from spmd.sharding.build import Build
from spmd.sharding.layout import (
    Layout,
    Partial,
    RankInt,
    Replicated,
    Sharded,
    bounds,
    ceil_div,
    local_length,
    offset,
)
from spmd.sharding.rule import Shape

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Wire:
    """The process group of one axis, and what the collective to be written is for."""

    group: str
    note: Collective

    def start(self, build: Build, op: str, target: object, *args: object) -> fx.Node:
        """A collective and its wait."""
        node = build.op(target, *args)
        node.meta["collective"] = replace(self.note, op=op)
        return build.op(c10d.wait_tensor.default, node)


def redistribute(
    build: Build, x: fx.Node, shape: Shape, a: Layout, b: Layout, wire: Wire, padded: fx.Node | None = None
) -> fx.Node:
    """Bring this rank's part of a tensor of global `shape` from layout `a` to `b`. `padded`: `x` already padded to the common chunk, if it lies so."""
    if isinstance(a, Replicated):
        return part_of(build, x, shape, b)
    if isinstance(a, Partial):
        return (
            reduce_all(build, x, a, wire) if isinstance(b, Replicated) else reduce_scatter(build, x, shape, a, b, wire)
        )
    if isinstance(b, Sharded) and a.dim != b.dim:
        return exchange(build, x, a, b, wire)
    whole = gather(build, padded if padded is not None else pad(build, x, a), shape, a, wire)
    return whole if isinstance(b, Replicated) else part_of(build, whole, shape, b)


def part_of(build: Build, x: fx.Node, shape: Shape, b: Layout) -> fx.Node:
    """This rank's part of a replicated tensor."""
    if isinstance(b, Partial):
        return emit.first_only(build, x, build.rank) if b.op == "sum" else x
    assert isinstance(b, Sharded)
    start, end = bounds(b.n, build.world, build.rank)
    if b.outer == 1:
        scale = b.inner
        return build.op(aten.slice.Tensor, x, b.dim, offset(b.n, start, scale), offset(b.n, end, scale, upper=True))
    split = build.view(x, (*shape[: b.dim], b.outer, b.n, b.inner, *shape[b.dim + 1 :]))
    cut = build.op(aten.slice.Tensor, split, b.dim + 1, offset(b.n, start, 1), offset(b.n, end, 1, upper=True))
    return build.view(cut, build.local(shape, b))


def pad(build: Build, x: fx.Node, s: Sharded) -> fx.Node:
    """This rank's part with its chunk filled up; chunks are equal then."""
    if s.n % build.world == 0:
        return x
    val = build.val(x)
    start, end = bounds(s.n, build.world, build.rank)
    missing = RankInt(ceil_div(s.n, build.world) - (end - start), f"missing({s.n})")
    if s.outer > 1:
        x = build.op(
            aten.reshape.default,
            x,
            [*val.shape[: s.dim], s.outer, RankInt(end - start, f"chunk({s.n})"), s.inner, *val.shape[s.dim + 1 :]],
        )
        x = pad_end(build, x, s.dim + 1, missing)
        return build.view(
            x, [*val.shape[: s.dim], s.outer * ceil_div(s.n, build.world) * s.inner, *val.shape[s.dim + 1 :]]
        )
    return pad_end(build, x, s.dim, RankInt(missing * s.inner, f"{missing.formula}*{s.inner}"))


def pad_end(build: Build, x: fx.Node, dim: int, amount: int) -> fx.Node:
    behind = len(build.val(x).shape) - 1 - dim
    return build.op(aten.constant_pad_nd.default, x, [0, 0] * behind + [0, amount], 0)


def gather(build: Build, x: fx.Node, shape: Shape, s: Sharded, wire: Wire) -> fx.Node:
    """The whole tensor from padded shards."""
    val, world = build.val(x), build.world
    stacked = transport(
        build,
        contiguous(build, x),
        lambda y: wire.start(build, "all_gather", c10d.all_gather_into_tensor.default, y, world, wire.group),
    )
    if s.dim == 0 and s.outer == 1:
        return build.narrow(stacked, 0, 0, s.n * s.inner) if val.dim() else stacked
    return contiguous(
        build, joined(build, build.view(stacked, (world, *val.shape)), s)
    )  # where chunks are 1, a view may do


def joined(build: Build, stacked: fx.Node, s: Sharded) -> fx.Node:
    """[ranks, *padded part] -> the parts side by side along the dim of `s`, without padding."""
    _, *part = build.val(stacked).shape
    chunk, before, after = ceil_div(s.n, build.world), part[: s.dim], part[s.dim + 1 :]
    apart = build.view(stacked, (build.world, *before, s.outer, chunk, s.inner, *after))
    k = s.dim
    order = [*range(1, k + 2), 0, *range(k + 2, k + 4 + len(after))]  # the ranks' dim goes before the chunk's
    side_by_side = build.op(aten.permute.default, apart, order)
    whole = build.view(side_by_side, (*before, s.outer, build.world * chunk, s.inner, *after))
    return build.view(build.narrow(whole, k + 1, 0, s.n), (*before, s.size, *after))


def dealt(build: Build, x: fx.Node, b: Sharded) -> fx.Node:
    """`x`, whole along the dim of `b`, padded and cut into every rank's part: [ranks, *padded part]."""
    shape, k, world, chunk = build.val(x).shape, b.dim, build.world, ceil_div(b.n, build.world)
    before, after = shape[:k], shape[k + 1 :]
    split = build.view(x, (*before, b.outer, b.n, b.inner, *after))
    split = pad_end(build, split, k + 1, world * chunk - b.n) if b.n % world else split
    apart = build.view(split, (*before, b.outer, world, chunk, b.inner, *after))
    rows = build.op(aten.permute.default, apart, [k + 1, *range(k + 1), *range(k + 2, k + 4 + len(after))])
    return build.view(rows, (world, *before, b.outer * chunk * b.inner, *after))


def unpad(build: Build, mine: fx.Node, b: Sharded) -> fx.Node:
    """This rank's part without its padding along the dim of `b`."""
    shape, k = build.val(mine).shape, b.dim
    before, after = shape[:k], shape[k + 1 :]
    if b.n % build.world == 0:
        return mine
    start, end = bounds(b.n, build.world, build.rank)
    length = RankInt(end - start, f"chunk({b.n})")
    if b.outer == 1:
        size = RankInt(length * b.inner, f"{length.formula}*{b.inner}")
        return build.op(aten.slice.Tensor, mine, k, 0, size)
    split = build.view(mine, (*before, b.outer, ceil_div(b.n, build.world), b.inner, *after))
    cut = build.op(aten.slice.Tensor, split, k + 1, 0, length)
    return build.view(cut, (*before, local_length(b, build.world, build.rank), *after))


def exchange(build: Build, x: fx.Node, a: Sharded, b: Sharded, wire: Wire) -> fx.Node:
    """From parts along one dim to parts along another: every rank sends every other what both have of it."""
    rows = contiguous(build, dealt(build, pad(build, x, a), b))
    ones = [1] * build.world
    start = lambda y: wire.start(build, "all_to_all", c10d.all_to_all_single.default, y, ones, ones, wire.group)  # noqa: E731
    return unpad(build, joined(build, transport(build, rows, start), a), b)


def reduce_scatter(build: Build, x: fx.Node, shape: Shape, p: Partial, b: Layout, wire: Wire) -> fx.Node:
    """This rank's shard of the sum."""
    assert isinstance(b, Sharded)
    val = build.val(x)
    if p.op != "sum" or val.dtype == torch.bool or (val.is_floating_point() and val.itemsize == 1):
        return part_of(build, reduce_all(build, x, p, wire), shape, b)
    world = build.world
    if b.dim == 0 and b.outer == 1:
        missing = ceil_div(b.n, world) * world - b.n
        rows = pad_end(build, x, 0, missing * b.inner) if missing else x
    else:
        rows = dealt(build, x, b)
        ranks, first, *rest = build.val(rows).shape
        rows = build.view(rows, (ranks * first, *rest))
    mine = transport(
        build,
        contiguous(build, rows),
        lambda y: wire.start(build, "reduce_scatter", c10d.reduce_scatter_tensor.default, y, "sum", world, wire.group),
    )
    return unpad(build, mine, b)


def reduce_all(build: Build, x: fx.Node, p: Partial, wire: Wire) -> fx.Node:
    """The whole from summands or candidates."""
    val = build.val(x)
    if val.numel() == 0:
        return x
    if p.op == "avg":
        return build.op(aten.div.Scalar, reduce_all(build, x, Partial(), wire), build.world)
    if val.is_floating_point() and val.itemsize == 1:  # no type to add in
        wide = build.op(aten._to_copy.default, x, dtype=torch.float32)
        return build.op(aten._to_copy.default, reduce_all(build, wide, p, wire), dtype=val.dtype)
    if val.dtype == torch.bool:  # not a type that backends reduce; or is max, and is min
        wide = build.op(aten._to_copy.default, x, dtype=torch.uint8)
        moved = wire.start(
            build, "all_reduce", c10d.all_reduce.default, wide, "min" if p.op == "min" else "max", wire.group
        )
        return build.op(aten._to_copy.default, moved, dtype=torch.bool)
    if p.op != "sum" and val.dtype.is_floating_point:  # a backend's max drops a NaN that torch's keeps
        row = build.op(aten.unsqueeze.default, contiguous(build, x), 0)
        rows = wire.start(build, "all_gather", c10d.all_gather_into_tensor.default, row, build.world, wire.group)
        return build.op(aten.amax.default if p.op == "max" else aten.amin.default, rows, [0])
    return transport(
        build,
        contiguous(build, x),
        lambda y: wire.start(build, "all_reduce", c10d.all_reduce.default, y, p.op, wire.group),
    )


def contiguous(build: Build, x: fx.Node) -> fx.Node:
    """Dense in row-major order, as collectives need; copied at run time only where it isn't. Padded buffers have one shape on all ranks."""
    if x.op == "placeholder" and build.val(x).is_contiguous():
        return x
    return build.op(aten.contiguous.default, x)


def transport(build: Build, x: fx.Node, move: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Apply `move` to a form of `x` that backends carry: complex numbers go as pairs of reals, floats of one byte as bytes."""
    val = build.val(x)
    if val.is_complex():
        return build.op(aten.view_as_complex.default, move(build.op(aten.view_as_real.default, x)))
    if val.is_floating_point() and val.itemsize == 1:
        return build.op(aten.view.dtype, move(build.op(aten.view.dtype, x, torch.uint8)), val.dtype)
    return move(x)
