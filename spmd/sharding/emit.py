"""Local programs of the few ops that a rank doesn't run as they stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import c10d_functional
from spmd.sharding.build import Build, add
from spmd.sharding.layout import Layout, Partial, RankInt, Sharded, bounds, offset
from spmd.sharding.rule import Call, has_empty

aten = torch.ops.aten


@dataclass
class Expansion:
    """One op call on its way into the local graph: its local arguments, and the layouts they and its outputs have."""

    build: Build
    call: Call
    args: list[Any]
    kwargs: dict[str, Any]
    wants: Sequence[Layout | None]
    outs: Sequence[Layout]

    def run(self) -> fx.Node:
        """The op itself on the local arguments."""
        return self.build.op(self.call.target, *self.args, **self.kwargs)

    def get(self, name: str) -> Any:
        """The local argument called `name`."""
        place = self.call.position(name)
        return self.args[place] if place < len(self.args) else self.kwargs[name]

    def put(self, name: str, value: Any) -> None:
        """Replace the argument called `name`."""
        place = self.call.position(name)
        if place < len(self.args):
            self.args[place] = value
        else:
            self.kwargs[name] = value


def reshape(x: Expansion) -> fx.Node:
    """A view of the local part: by the local output shape, since a dim of the batch may be 1 here and not there."""
    return x.build.view(x.args[0], x.build.local(x.call.outputs[0] or (), x.outs[0]))


def mean(x: Expansion) -> fx.Node:
    """A sum over the global count where a reduced dim is split."""
    if not (isinstance(x.outs[0], Partial) and isinstance(x.wants[0], Sharded)):
        return x.run()
    call, build = x.call, x.build
    dims, count = call.dims(call.arg("dim"), len(call.inputs[0])), 1
    for d in dims:
        count *= call.inputs[0][d]
    dtype = call.values[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype  # the sum of halves overflows
    total = build.op(aten.sum.dim_IntList, x.args[0], dims, bool(call.arg("keepdim", False)), dtype=wide)
    mean = build.op(aten.div.Scalar, total, count)
    return mean if wide is dtype else build.op(aten._to_copy.default, mean, dtype=dtype)


def extremum(x: Expansion) -> fx.Node:
    """max, min, any, all: a rank with an empty shard contributes the identity, appended on every rank alike."""
    build, s, out = x.build, x.wants[0], x.outs[0]
    if isinstance(out, Partial) and isinstance(s, Sharded) and has_empty(s, build.world):
        value = identity(out.op, build.val(x.args[0]).dtype, x.call.name in ("any", "all"))
        x.args[0] = with_row(build, x.args[0], s.dim, value)
    return x.run()


def with_row(build: Build, x: fx.Node, dim: int, value: float) -> fx.Node:
    """`x` with one more row, of `value`: what a rank without rows computes with, and all others alike."""
    val = build.val(x)
    shape = [1 if d == dim else n for d, n in enumerate(val.shape)]
    row = build.op(aten.full.default, shape, value, dtype=val.dtype, device=val.device)
    return build.op(aten.cat.default, [x, row], dim)


def identity(op: str, dtype: torch.dtype, logical: bool) -> float | int:
    """The value that changes nothing under max or min; under any or all where `logical`."""
    if dtype == torch.bool or logical:
        return int(op == "min")
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def blocks(x: Expansion) -> fx.Node:
    """Slices and splits between the blocks of a split dim: their bounds count in local blocks."""
    s, dim = x.wants[0], x.call.dims(x.call.arg("dim", 0), len(x.call.inputs[0]))
    if not isinstance(s, Sharded) or s.dim not in dim:
        return x.run()
    start, end = bounds(s.n, x.build.world, x.build.rank)

    def local(n: int) -> RankInt:
        times = n // (s.n * s.inner) * s.inner
        return RankInt((end - start) * times, f"chunk({s.n})*{times}")

    if x.call.has("split_sizes"):
        x.put("split_sizes", [local(n) for n in x.call.arg("split_sizes")])
    else:
        first, last = slice_bounds(x.call)
        x.put("start", local(first))
        x.put("end", local(last))
    return x.run()


def slice_bounds(call: Call) -> tuple[int, int]:
    """Start and end of slice and slice_backward, as offsets in the whole."""
    whole = call.arg("input_sizes") or call.inputs[0]
    (d,) = call.dims(call.arg("dim", 0), len(whole))
    first, last, _ = slice(call.arg("start"), call.arg("end")).indices(whole[d])
    return first, max(first, last)


def group_norm(x: Expansion) -> fx.Node:
    """The batch size is an argument of its own."""
    x.put("N", x.build.local(x.call.inputs[0], x.wants[0])[0])
    return x.run()


def input_size(x: Expansion) -> fx.Node:
    """Adjoints of resizing repeat the shape of what they yield."""
    x.put("input_size", list(x.build.local(x.call.outputs[0] or (), x.outs[0])))
    return x.run()


def positions(x: Expansion) -> fx.Node:
    """Random bits of a part: what `take` cuts out is described by sizes, strides and an offset in the global tensor, of which it may be a part already."""
    shape, s, build = x.call.outputs[0] or (), x.outs[0], x.build
    if not isinstance(s, Sharded):
        return x.run()
    stride = list(x.call.arg("stride") or [math.prod(shape[d + 1 :]) for d in range(len(shape))])
    inner, length, start = stride[s.dim], build.local(shape, s)[s.dim], bounds(s.n, build.world, build.rank)[0]
    size: list[int] = [*shape[: s.dim], length, *shape[s.dim + 1 :]]
    if s.outer > 1:
        run = (
            RankInt(length // s.outer, f"{length.formula}/{s.outer}")
            if isinstance(length, RankInt)
            else length // s.outer
        )
        size[s.dim : s.dim + 1], stride[s.dim : s.dim + 1] = [s.outer, run], [s.n * s.inner * inner, inner]
    x.put("size", size)
    x.put("stride", stride)
    x.put("offset", add(x.call.arg("offset") or 0, offset(s.n, start, s.inner * inner)))
    return build.view(x.run(), build.local(shape, s))


def restrided(x: Expansion) -> fx.Node:
    """as_strided addresses memory: its input must lie as it did when the step was traced."""
    build, traced = x.build, x.call.tensors[0].meta["val"]
    if build.val(x.args[0]).stride() != traced.stride():
        home = build.op(aten.new_empty_strided.default, x.args[0], list(traced.shape), list(traced.stride()))
        x.args[0] = build.op(aten.copy.default, home, x.args[0])
    return x.run()


def fused(x: Expansion) -> fx.Node:
    """Fused optimizers go through memory from end to end: the gradient's dims lie in the order of the parameter's, as eager's do."""
    build, strides = x.build, x.call.tensors[0].meta["val"].stride()
    order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
    back = [order.index(d) for d in range(len(order))]
    (gradient,) = x.args[1]
    plain = order == list(range(len(order)))
    if build.world > 1 and not (plain and gradient.target is c10d_functional.wait_tensor.default):
        turned = gradient if plain else build.op(aten.permute.default, gradient, order)
        dense = build.op(aten.contiguous.default, turned)
        x.args[1] = [dense if plain else build.op(aten.permute.default, dense, back)]
    return x.run()


def first_only(build: Build, x: fx.Node, rank: int) -> fx.Node:
    """`x` on rank 0, zeros elsewhere: what makes a replicated tensor a partial sum."""
    val = build.val(x)
    others = build.op(aten.full.default, [], RankInt(int(rank > 0), "rank>0"), dtype=torch.bool, device=val.device)
    return build.op(aten.masked_fill.Scalar, x, others, 0)
