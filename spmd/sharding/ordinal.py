"""Indices that are 0, 1, .. n-1: `x[torch.arange(len(x)), places]` picks from each row, so rows that are split stay where they are."""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from spmd.sharding.emit import Expansion
from spmd.sharding.layout import Sharded
from spmd.sharding.rule import Call, Shape

aten = torch.ops.aten
# what keeps the order of a tensor's elements where no more than one of its dims has several
KEEPS = {
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "t", "transpose", "permute", "expand", "alias", "detach", "clone",
    "slice", "lift_fresh", "lift_fresh_copy", "_to_copy",
}  # fmt: skip


def ordinal(x: fx.Node, n: int) -> bool:
    """Whether the elements of `x` are 0 to n-1, in order, along one dim."""
    val = x.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype not in (torch.int64, torch.int32) or val.numel() != n:
        return False
    if x.op != "call_function" or not hasattr(x.target, "_schema") or n not in val.shape:
        return False
    call = Call(x)
    if call.name == "arange":
        return bool((call.arg("start", 0), call.arg("end"), call.arg("step", 1)) == (0, n, 1))
    return call.name in KEEPS and ordinal(call.tensors[0], n)


def own_rows(call: Call) -> dict[int, int]:
    """Dims of the indexed tensor that an index runs through in order: which of the indices (by dim) is it, and along which dim of it from the right."""
    found: dict[int, int] = {}
    for d, x in enumerate(call.arg("indices")):
        n = call.inputs[0][d]
        if x is not None and n > 1 and ordinal(x, n):
            shape: Shape = tuple(x.meta["val"].shape)
            place = shape.index(n) - len(shape)
            if place not in found.values() and math.prod(shape) == n:
                found[d] = place
    return found


def local_rows(x: Expansion) -> fx.Node:
    """Where the rows are split, they're counted from 0 on every rank."""
    s, d = x.wants[0], None
    if isinstance(s, Sharded) and s.dim in own_rows(x.call):
        d = s.dim
        indices = list(x.args[1])
        like = x.build.val(indices[d])
        length = x.build.local(x.call.inputs[0], s)[d]
        place = own_rows(x.call)[d]
        rows = x.build.op(aten.arange.default, length, dtype=like.dtype, device=like.device)
        shape = [length if k - like.dim() == place else n for k, n in enumerate(like.shape)]
        indices[d] = x.build.view(rows, shape)
        x.args[1] = indices
    return x.run()
