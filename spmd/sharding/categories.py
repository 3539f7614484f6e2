"""Rules by category: each function turns one op call into a Rule, or None where nothing but replicated inputs is exact."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from spmd.sharding import emit
from spmd.sharding.layout import RankInt
from spmd.sharding.rule import BlockRule, Call, RepeatRule, Rule, Shape, ViewRule, labelled

aten = torch.ops.aten
VIEW: dict[str, Any] = {"linear": ((0,),), "view": True}
Linear = tuple[tuple[int, ...], ...]
NONE: Linear = ()


def aligned(shape: Shape, out: Shape) -> list[int | None]:
    """Labels of a broadcast operand: the output dims it's aligned with on the right, None where it's stretched."""
    shift = len(out) - len(shape)
    return [d + shift if shape[d] == out[d + shift] else None for d in range(len(shape))]


def main_output(call: Call) -> Shape:
    return next((o for o in call.outputs if o is not None), ())


def pointwise(call: Call, linear: Linear = NONE, **options: Any) -> Rule:
    """Each output element depends on the aligned input elements alone."""
    out = main_output(call)
    linear = tuple(group for group in linear if max(group) < len(call.inputs))
    outs = [list(range(len(o))) if o == out else None for o in call.outputs]  # an unused output is empty
    return labelled([aligned(s, out) for s in call.inputs], outs, linear=linear, **options)


def add(call: Call) -> Rule:
    """Sums are linear in both operands together; adding a number isn't."""
    return pointwise(call, ((0, 1),) if len(call.inputs) == 2 else NONE)


def mul(call: Call) -> Rule:
    return pointwise(call, ((0,), (1,)))


def div(call: Call) -> Rule:
    return pointwise(call, NONE if call.arg("rounding_mode") else ((0,),))


def where(call: Call) -> Rule:
    return pointwise(call, ((1, 2),) if len(call.inputs) == 3 else NONE)


def cast(call: Call) -> Rule:
    """Upward casts are linear; a partial rounded or truncated on each rank wouldn't add up."""
    return pointwise(call, ((0,),) if widening(call) else NONE)


def like(call: Call) -> Rule:
    """zeros_like and its kin take only the shape of their input."""
    dims = list(range(len(call.inputs[0])))
    return labelled([dims, *([None] * len(s) for s in call.inputs[1:])], [dims], shape_only=True)


def factory(call: Call) -> Rule:
    """Built from numbers; built whole, except where every element is the same."""
    uniform = call.has("size") and not call.has("stride") and call.name != "eye"
    shaped = call.name.startswith("new_")  # the first input gives type and device only
    ins = [None if shaped and j == 0 else [None] * len(s) for j, s in enumerate(call.inputs)]
    return labelled(ins, [[None] * len(o or ()) for o in call.outputs], sizes="size" if uniform else "")


def random(call: Call) -> Rule:
    """Drawn at the global shape from the common generator, so that the stream is eager's; the ranks keep their parts."""
    return labelled([[None] * len(s) for s in call.inputs], [[None] * len(o or ()) for o in call.outputs], whole=True)


def bits(call: Call) -> Rule:
    """Random bits of positions: any part can be drawn by itself."""
    return labelled([None], [[None] * len(call.outputs[0] or ())], sizes="size", emit=emit.positions)


def whole_value(call: Call, **options: Any) -> Rule:
    """Reads the whole tensor by its nature: replicated inputs are no fallback."""
    return labelled([[None] * len(s) for s in call.inputs], [[None] * len(o or ()) for o in call.outputs], **options)


def view(call: Call) -> Rule | None:
    if call.has("dtype"):
        return None  # the same bytes as another type: their number may change along the last dim
    sizes = "size" if call.has("size") else "shape" if call.has("shape") else ""
    n = len(call.inputs[0])
    return ViewRule(
        (tuple(range(n)),),
        (tuple(range(len(main_output(call)))),),
        linear=((0,),),
        sizes=sizes,
        view=True,
        emit=emit.reshape,
        source=call.inputs[0],
        result=main_output(call),
    )


def squeeze(call: Call) -> Rule:
    """Dims of size 1 dropped, by number: capture spells them out."""
    n = len(call.inputs[0])
    dropped = {d for d in call.dims(call.arg("dim"), n) if call.inputs[0][d] == 1}
    labels = [None if d in dropped else d for d in range(n)]
    return labelled([labels], [[d for d in labels if d is not None]], emit=emit.reshape, **VIEW)


def unsqueeze(call: Call) -> Rule:
    n = len(call.inputs[0])
    d = call.dims(call.arg("dim"), n + 1)[0]
    return labelled([list(range(n))], [[*range(d), None, *range(d, n)]], **VIEW)


def view_complex(call: Call) -> Rule:
    """view_as_real and view_as_complex: the last dim of the real side holds the two parts."""
    n = min(len(call.inputs[0]), len(main_output(call)))
    labels = lambda shape: [*range(n), *[None] * (len(shape) - n)]  # noqa: E731
    return labelled([labels(call.inputs[0])], [labels(main_output(call))], **VIEW)


def permute(call: Call) -> Rule:
    n = len(call.inputs[0])
    order = list(range(n))
    if call.name == "t":
        order.reverse()
    elif call.name == "transpose":
        a, b = call.dims([call.arg("dim0"), call.arg("dim1")], n) if n else (0, 0)
        if n:
            order[a], order[b] = order[b], order[a]
    else:
        order = call.dims(call.arg("dims"), n)
    return labelled([list(range(n))], [order], **VIEW)


def expand(call: Call) -> Rule:
    return pointwise(call, ((0,),), sizes="size")


REDUCE = {
    "sum": "sum",
    "mean": "sum",
    "amax": "max",
    "max": "max",
    "amin": "min",
    "min": "min",
    "any": "max",
    "all": "min",
}


def reduction(call: Call) -> Rule | None:
    """A reduced dim that is split gives a partial; a mean is a sum over the global count."""
    if len(call.inputs) > 1:
        return pointwise(call)  # max(x, y)
    n = len(call.inputs[0])
    dims = call.dims(call.arg("dim"), n)
    keep = bool(call.arg("keepdim", False))
    out = [None if d in dims else d for d in range(n)] if keep else [d for d in range(n) if d not in dims]
    if call.name in ("any", "all") and call.has("dim") and call.arg("dim") == []:
        dims = []  # here an empty list means none, not all
        out = list(range(n))
    linear = ((0,),) if call.name in ("sum", "mean") and widening(call) else NONE
    alone = len(call.outputs) == 1  # max.dim also gives indices: they don't reduce
    reduce = dict.fromkeys(dims, REDUCE[call.name]) if alone else {}
    emitter = {"mean": emit.mean, "sum": None}.get(call.name, emit.extremum)
    return labelled([list(range(n))], [out] * len(call.outputs), reduce=reduce, linear=linear, emit=emitter)


def widening(call: Call) -> bool:
    """Whether every value of the input's type is one of the result's: partials converted rank by rank add up then."""
    src, dst = call.tensors[0].meta["val"].dtype, call.values[0].dtype
    return torch.promote_types(src, dst) == dst


def along(call: Call, linear: Linear = NONE, dim: str = "dim") -> Rule | None:
    """Independent along all dims but the op's own: softmax, cumsum, sort. That dim keeps its place or is dropped."""
    n = len(call.inputs[0])
    name = "dims" if call.has("dims") else dim
    dims = call.dims(call.arg(name), n)

    def labels(shape: Shape | None) -> list[Hashable] | None:
        if shape is None:
            return None
        if len(shape) == n:
            return [None if d in dims or shape[d] != call.inputs[0][d] else d for d in range(n)]
        if len(shape) == n - len(dims):
            return [d for d in range(n) if d not in dims]
        return [None] * len(shape)

    linear = linear if widening(call) else NONE
    return labelled([labels(s) for s in call.inputs], [labels(o) for o in call.outputs], linear=linear)


def fourier(call: Call) -> Rule | None:
    """Transforms along a list of dims."""
    rule = along(call, linear=((0,),))
    return rule and replace(rule, nonempty=True)


def diagonal(call: Call) -> Rule:
    """The two dims of the diagonal become the last; its adjoint and diag_embed put it back."""
    puts = call.name != "diagonal"
    whole = main_output(call) if puts else call.inputs[0]
    crossed = call.dims([call.arg("dim1"), call.arg("dim2")], len(whole))
    full = [None if d in crossed else d for d in range(len(whole))]
    thin = [*(d for d in range(len(whole)) if d not in crossed), None]
    sizes = "input_sizes" if call.has("input_sizes") else ""
    return labelled([thin if puts else full], [full if puts else thin], linear=((0,),), sizes=sizes)


def unfold_backward(call: Call) -> Rule | None:
    n = len(main_output(call))
    if n == 0:
        return None
    free = [None if j in call.dims(call.arg("dim"), n) else j for j in range(n)]
    return labelled([[*free, None]], [free], linear=((0,),), sizes="input_sizes")


def window(call: Call, linear: Linear = ((0,),)) -> Rule | None:
    """Cuts along one dim: slice, split, unfold and their adjoints."""
    n = len(call.inputs[0])
    if n == 0:
        return None
    d = call.dims(call.arg("dim" if call.has("dim") else "dimension", 0), n)[0]
    labels = [None if j == d else j for j in range(n)]
    ins = [labels] * len(call.inputs)
    outs = [None if o is None else labels + [None] * (len(o) - n) for o in call.outputs]
    cuts = blocks_of(call)
    if cuts is None:
        return labelled(ins, outs, linear=linear, sizes="input_sizes" if call.has("input_sizes") else "")
    lengths = tuple(s[d] for s in call.inputs), tuple(o[d] for o in call.outputs if o is not None)
    sizes = "input_sizes" if call.has("input_sizes") else ""
    return labelled(
        ins, outs, BlockRule, linear=linear, sizes=sizes, emit=emit.blocks, dim=d, lengths=lengths, cuts=cuts
    )


def blocks_of(call: Call) -> tuple[int, ...] | None:
    """Where a slice or a split cuts the whole; None for other windows, and where each rank of another axis cuts elsewhere."""
    if any(isinstance(bound, RankInt) for bound in (call.arg("start"), call.arg("end"))):
        return None
    if call.name in ("slice", "slice_backward", "slice_scatter") and call.arg("step") == 1:
        return emit.slice_bounds(call)
    if call.name == "split_with_sizes":
        return tuple(itertools.accumulate(call.arg("split_sizes")))
    return None


def select(call: Call) -> Rule:
    n = len(call.inputs[0])
    d = call.dims(call.arg("dim", 0), n)[0]
    return labelled(
        [[None if j == d else j for j in range(n)]],
        [[j for j in range(n) if j != d]] * len(call.outputs),
        linear=((0,),),
        view=call.name == "select",
    )


def select_adjoint(call: Call) -> Rule:
    """select_backward and select_scatter: one slice of `dim` written."""
    out = main_output(call)
    d = call.dims(call.arg("dim", 0), len(out))[0]
    full = [None if j == d else j for j in range(len(out))]
    thin = [j for j in range(len(out)) if j != d]
    if call.name == "select_backward":
        return labelled([thin], [full], linear=((0,),), sizes="input_sizes")
    return labelled([full, thin], [full], linear=((0, 1),))


def cat(call: Call) -> Rule:
    out = main_output(call)
    n = len(out)
    d = call.dims(call.arg("dim", 0), n)[0]
    labels = [None if j == d else j for j in range(n)]
    ins = [labels if len(s) == n else [None] * len(s) for s in call.inputs]  # a legacy empty (0,) operand has no say
    lengths = tuple(s[d] if len(s) == n else 0 for s in call.inputs), (out[d],)
    return labelled(ins, [labels], BlockRule, linear=(tuple(range(len(ins))),), dim=d, lengths=lengths)


def stack(call: Call) -> Rule:
    n = len(main_output(call))
    d = call.dims(call.arg("dim", 0), n)[0]
    labels = list(range(n - 1))
    return labelled(
        [labels] * len(call.inputs), [[*labels[:d], None, *labels[d:]]], linear=(tuple(range(len(call.inputs))),)
    )


def pad(call: Call) -> Rule:
    n, amounts = len(call.inputs[0]), call.arg("pad")
    ends = [amounts[2 * (n - 1 - d) : 2 * (n - 1 - d) + 2] for d in range(n)]
    cut = [d for d in range(n) if any(k or isinstance(k, RankInt) for k in ends[d])]  # where no other rank pads either
    labels = [None if d in cut else d for d in range(n)]
    return labelled([labels], [labels], linear=NONE if call.arg("value") else ((0,),))


def repeat(call: Call) -> Rule:
    times, n = tuple(call.arg("repeats")), len(call.inputs[0])
    shift = len(times) - n
    outs = [d if d >= shift and times[d] else None for d in range(len(times))]
    return labelled([outs[shift:]], [outs], RepeatRule, linear=((0,),), times=times)
