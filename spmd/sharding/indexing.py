"""Rules of reading and writing by index. Each function turns one op call into a Rule, or None where nothing but replicated inputs is exact."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from spmd.sharding.categories import NONE, aligned, main_output, pointwise
from spmd.sharding.ordinal import local_rows, own_rows
from spmd.sharding.rule import Call, Rule, Shape, labelled

aten = torch.ops.aten


def scatter(call: Call) -> Rule:
    n = len(call.inputs[0])
    d = call.dims(call.arg("dim"), n)
    free = [j if j not in d and all(s[j] == call.inputs[0][j] for s in call.inputs) else None for j in range(n)]
    return labelled(
        [free] * len(call.inputs),
        [free],
        linear=((0, 2),) if len(call.inputs) == 3 and call.name == "scatter_add" else NONE,
    )


def index_add(call: Call) -> Rule | None:
    n = len(call.inputs[0])
    if n == 0:
        return None
    d = call.dims(call.arg("dim"), n)[0]
    base = [None if j == d else j for j in range(n)]
    source = ["i" if j == d else j for j in range(n)]
    return labelled([base, ["i"], source], [base], reduce={"i": "sum"}, linear=((0, 2),), base=0)


def index_copy(call: Call) -> Rule | None:
    n = len(call.inputs[0])
    if n == 0:
        return None
    free = [None if j in call.dims(call.arg("dim"), n) else j for j in range(n)]
    return labelled([free, [None], free], [free], linear=((0, 2),))


def bucketize(call: Call) -> Rule:
    """Elementwise in the values; the boundaries are whole."""
    dims = list(range(len(main_output(call))))
    return labelled([dims, *[[None] * len(s) for s in call.inputs[1:]]], [dims])


def index_select(call: Call) -> Rule | None:
    n = len(call.inputs[0])
    if n == 0:
        return None
    d = call.dims(call.arg("dim"), n)[0]
    return labelled(
        [[None if j == d else j for j in range(n)], ["i"]], [["i" if j == d else j for j in range(n)]], linear=((0,),)
    )


def index(call: Call) -> Rule | None:
    """Advanced indexing: unindexed dims are free, and those that an index runs through in order; split index positions give a split output."""
    plan = index_plan(call)
    if plan is None:
        return None
    base, positions, out = plan
    return labelled([base, *positions], [out], linear=((0,),), emit=local_rows)


def index_put(call: Call) -> Rule | None:
    """A split contribution that accumulates gives a partial whose base rank 0 holds. One value under a mask is elementwise."""
    if len(call.inputs) == 3 and call.inputs[0] == call.inputs[1] and call.tensors[1].meta["val"].dtype == torch.bool:
        return pointwise(call) if math.prod(call.inputs[2]) == 1 and len(call.inputs[2]) < 2 else None
    plan = index_plan(call)
    if plan is None:
        return None
    base, positions, out = plan
    values = call.inputs[-1]
    shift = len(out) - len(values)
    size = index_result(call)
    labels = [out[d + shift] if values[d] == size[d + shift] else None for d in range(len(values))]
    accumulate = bool(call.arg("accumulate"))
    broadcast = {label for d, label in enumerate(out) if isinstance(label, str) and label not in base}
    if not accumulate:
        positions = [[x if x in base else None for x in p] for p in positions]
        labels = [None if isinstance(x, str) and x not in base else x for x in labels]
    return labelled(
        [base, *positions, labels],
        [base],
        reduce=dict.fromkeys(broadcast, "sum") if accumulate else {},
        linear=((0, len(call.inputs) - 1),) if accumulate else NONE,
        base=0 if accumulate else None,
        emit=local_rows,
    )


def index_plan(call: Call) -> tuple[list[Hashable], list[list[Hashable]], list[Hashable]] | None:
    n = len(call.inputs[0])
    indices = list(call.arg("indices")) + [None] * (n - len(call.arg("indices")))
    used = [j for j, x in enumerate(indices) if x is not None]
    if any(indices[j].meta["val"].dtype in (torch.bool, torch.uint8) for j in used):
        return None
    shapes = [tuple(indices[j].meta["val"].shape) for j in used]
    common = torch.broadcast_shapes(*shapes)
    names: list[Hashable] = [f"i{j}" for j in range(len(common))]
    own = own_rows(call)
    base: list[Hashable] = [names[own[j]] if j in own else None if j in used else j for j in range(n)]
    positions = [[None if label is None else names[label] for label in aligned(s, common)] for s in shapes]
    if used == list(range(used[0], used[-1] + 1)):
        out = [*base[: used[0]], *names, *base[used[-1] + 1 :]]
    else:
        out = [*names, *(x for j, x in enumerate(base) if j not in used)]
    return base, positions, out


def index_result(call: Call) -> Shape:
    """Shape of x[indices]."""
    plan = index_plan(call)
    assert plan is not None
    common = torch.broadcast_shapes(*(s for s in call.inputs[1:-1]))
    sizes: dict[Hashable, int] = {**dict(enumerate(call.inputs[0])), **{f"i{j}": n for j, n in enumerate(common)}}
    return tuple(sizes[label] for label in plan[2])
