"""Rows of a table that are looked up by index: where the rows are split, each rank finds those that it has, and gives zeros for the others.

The rows have the label ROWS, which stands only on axes that have no part in the batch: there a table (a vocabulary) stays where it is.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.fx as fx

from spmd.sharding.build import Build
from spmd.sharding.emit import Expansion, with_row
from spmd.sharding.layout import RankInt, Sharded, bounds, offset
from spmd.sharding.rule import ROWS, Call, Rule, has_empty, labelled

aten = torch.ops.aten
NOWHERE = -100  # a class that no loss counts


def embedding(call: Call) -> Rule:
    k = len(call.inputs[1])
    table: list[Hashable] = [ROWS, "d"]
    return labelled([table, [*range(k)]], [[*range(k), "d"]], reduce={ROWS: "sum"}, linear=((0,),), emit=found)


def embedding_backward(call: Call) -> Rule | None:
    if call.arg("scale_grad_by_freq"):
        return None  # frequencies are counted over the whole batch
    k = len(call.inputs[1])
    sums = dict.fromkeys(range(k), "sum")
    return labelled([[*range(k), "d"], [*range(k)]], [[ROWS, "d"]], reduce=sums, linear=((0,),), emit=put_back)


def gather(call: Call) -> Rule:
    n = len(call.inputs[0])
    d = call.dims(call.arg("dim"), n)
    free = [j if j not in d and call.inputs[0][j] == call.inputs[1][j] else None for j in range(n)]
    table = [ROWS if j in d else label for j, label in enumerate(free)]
    index = ["g" if j in d else label for j, label in enumerate(free)]
    return labelled([table, index], [index], reduce={ROWS: "sum"}, linear=((0,),), emit=found)


def loss_backward(call: Call) -> Rule:
    """nll_loss_backward: what the loss was divided by is given, so samples are independent; and so are classes."""
    grad, scores, target, *rest = call.inputs
    if len(scores) == 1:
        return labelled([[None] * len(s) for s in call.inputs], [[None]])
    classes: list[Hashable | None] = [0, ROWS, *[None] * (len(scores) - 2)]
    ins: list[list[Hashable | None]] = [
        [0, *[None] * (len(grad) - 1)] if grad else [],
        classes,
        [0, *[None] * (len(target) - 1)],
    ]
    weights: list[list[Hashable | None]] = [[ROWS] if s else [] for s in rest]
    return labelled([*ins, *weights], [classes], linear=((0,),), nonempty=True, emit=own_classes)


# ---------------------------------------------------------------------------------------------- local programs


def found(x: Expansion) -> fx.Node:
    """Lookup in this rank's rows. A rank without rows has one of zeros, as all ranks do then."""
    s, build = x.wants[0], x.build
    d = 0 if x.call.name == "embedding" else x.call.dims(x.call.arg("dim"), len(x.call.inputs[0]))[0]
    if not isinstance(s, Sharded) or s.dim != d:
        return x.run()
    if has_empty(s, build.world):
        x.args[0] = with_row(build, x.args[0], d, 0)
    name = "indices" if x.call.has("indices") else "index"
    place, elsewhere = local_rows(build, x.get(name), s)
    x.put(name, place)
    if d == 0 and x.call.name == "embedding":
        elsewhere = build.op(aten.unsqueeze.default, elsewhere, -1)
    return build.op(aten.masked_fill.Scalar, x.run(), elsewhere, 0)


def put_back(x: Expansion) -> fx.Node:
    """The gradient of this rank's rows."""
    s, build = x.outs[0], x.build
    if not isinstance(s, Sharded) or s.dim != 0:
        return x.run()
    length = build.local(x.call.outputs[0] or (), s)[0]
    index = x.get("indices")
    place, elsewhere = local_rows(build, index, s)
    padding = x.call.arg("padding_idx")
    if padding >= 0:
        elsewhere = build.op(aten.logical_or.default, elsewhere, build.op(aten.eq.Scalar, index, padding))
    drop = build.op(aten.unsqueeze.default, elsewhere, -1)
    x.put("grad_output", build.op(aten.masked_fill.Scalar, x.get("grad_output"), drop, 0))
    x.put("indices", place)
    x.put("padding_idx", -1)
    if not has_empty(s, build.world):
        x.put("num_weights", length)
        return x.run()
    x.put("num_weights", RankInt(length + 1, f"{getattr(length, 'formula', length)}+1"))  # a row for a rank without any
    return build.op(aten.slice.Tensor, x.run(), 0, 0, length)


def own_classes(x: Expansion) -> fx.Node:
    """Targets that are other ranks' classes count for nothing here."""
    s, build, target = x.outs[0], x.build, x.get("target")
    if not isinstance(s, Sharded) or s.dim != 1:
        return x.run()
    place, elsewhere = local_rows(build, target, s)
    ignored = build.op(aten.eq.Scalar, target, x.call.arg("ignore_index"))
    x.put(
        "target",
        build.op(aten.masked_fill.Scalar, place, build.op(aten.logical_or.default, elsewhere, ignored), NOWHERE),
    )
    x.put("ignore_index", NOWHERE)
    return x.run()


def local_rows(build: Build, index: fx.Node, s: Sharded) -> tuple[fx.Node, fx.Node]:
    """Where the rows of the whole lie on this rank, 0 for those that don't; and which don't."""
    start, end = bounds(s.n, build.world, build.rank)
    first, last = offset(s.n, start, s.inner), offset(s.n, end, s.inner, upper=True)
    row = index if s.outer == 1 else build.op(aten.remainder.Scalar, index, s.n * s.inner)
    outside = build.op(aten.lt.Scalar, row, first), build.op(aten.ge.Scalar, row, last)
    elsewhere = build.op(aten.logical_or.default, *outside)
    place = build.op(aten.sub.Tensor, row, first)
    if s.outer > 1:
        block = build.op(aten.div.Tensor_mode, index, s.n * s.inner, rounding_mode="floor")
        size = RankInt((end - start) * s.inner, f"chunk({s.n})*{s.inner}")
        place = build.op(aten.add.Tensor, place, build.op(aten.mul.Tensor, block, size))
    return build.op(aten.masked_fill.Scalar, place, elsewhere, 0), elsewhere
