"""Local programs of the few ops that a rank doesn't run as they stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from spmd.sharding.layout import Layout, Partial, RankInt, Sharded
from spmd.sharding.rule import Call, has_empty

if TYPE_CHECKING:
    from spmd.sharding.build import Build

aten = torch.ops.aten


def reshape(
    build: Build,
    call: Call,
    args: list[Any],
    kwargs: dict[str, Any],
    wants: Sequence[Layout | None],
    outs: Sequence[Layout],
) -> fx.Node:
    """A view of the local part: by the local output shape, since a dim of the batch may be 1 here and not there."""
    if call.name == "unsqueeze":
        return build.op(call.target, *args, **kwargs)
    return build.view(args[0], build.local(call.outputs[0] or (), outs[0]))


def mean(
    build: Build,
    call: Call,
    args: list[Any],
    kwargs: dict[str, Any],
    wants: Sequence[Layout | None],
    outs: Sequence[Layout],
) -> fx.Node:
    """A sum over the global count where a reduced dim is split."""
    if not (isinstance(outs[0], Partial) and isinstance(wants[0], Sharded)):
        return build.op(call.target, *args, **kwargs)
    dims, count = call.dims(call.arg("dim"), len(call.inputs[0])), 1
    for d in dims:
        count *= call.inputs[0][d]
    dtype = call.values[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype  # the sum of halves overflows
    total = build.op(aten.sum.dim_IntList, args[0], dims, bool(call.arg("keepdim", False)), dtype=wide)
    mean = build.op(aten.div.Scalar, total, count)
    return mean if wide is dtype else build.op(aten._to_copy.default, mean, dtype=dtype)


def extremum(
    build: Build,
    call: Call,
    args: list[Any],
    kwargs: dict[str, Any],
    wants: Sequence[Layout | None],
    outs: Sequence[Layout],
) -> fx.Node:
    """max, min, any, all: a rank with an empty shard contributes the identity, appended on every rank alike."""
    s = wants[0]
    if isinstance(outs[0], Partial) and isinstance(s, Sharded) and has_empty(s, build.world):
        dtype = call.tensors[0].meta["val"].dtype
        shape = list(build.val(args[0]).shape)
        shape[s.dim] = 1
        row = build.op(
            aten.full.default,
            shape,
            identity(outs[0].op, dtype, call.name in ("any", "all")),
            dtype=dtype,
            device=build.val(args[0]).device,
        )
        args = [build.op(aten.cat.default, [args[0], row], s.dim), *args[1:]]
    return build.op(call.target, *args, **kwargs)


def identity(op: str, dtype: torch.dtype, logical: bool) -> float | int:
    """The value that changes nothing under max or min; under any or all where `logical`."""
    if dtype == torch.bool or logical:
        return int(op == "min")
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def group_norm(
    build: Build,
    call: Call,
    args: list[Any],
    kwargs: dict[str, Any],
    wants: Sequence[Layout | None],
    outs: Sequence[Layout],
) -> fx.Node:
    """The batch size is an argument of its own."""
    args[call.position("N")] = build.local(call.inputs[0], wants[0])[0]
    return build.op(call.target, *args, **kwargs)


def input_size(
    build: Build,
    call: Call,
    args: list[Any],
    kwargs: dict[str, Any],
    wants: Sequence[Layout | None],
    outs: Sequence[Layout],
) -> fx.Node:
    """Adjoints of resizing repeat the shape of what they yield."""
    args[call.position("input_size")] = list(build.local(call.outputs[0] or (), outs[0]))
    return build.op(call.target, *args, **kwargs)


def restrided(
    build: Build,
    call: Call,
    args: list[Any],
    kwargs: dict[str, Any],
    wants: Sequence[Layout | None],
    outs: Sequence[Layout],
) -> fx.Node:
    """as_strided addresses memory: its input must lie as it did when the step was traced."""
    traced = call.tensors[0].meta["val"]
    if build.val(args[0]).stride() != traced.stride():
        home = build.op(aten.new_empty_strided.default, args[0], list(traced.shape), list(traced.stride()))
        args[0] = build.op(aten.copy.default, home, args[0])
    return build.op(call.target, *args, **kwargs)


def first_only(build: Build, x: fx.Node, rank: int) -> fx.Node:
    """`x` on rank 0, zeros elsewhere: what makes a replicated tensor a partial sum."""
    val = build.val(x)
    others = build.op(aten.full.default, [], RankInt(int(rank > 0), "rank>0"), dtype=torch.bool, device=val.device)
    return build.op(aten.masked_fill.Scalar, x, others, 0)
