"""Rules by category: each function turns one op call into a Rule, or None where nothing but replicated inputs is exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from spmd.sharding import emit
from spmd.sharding.layout import RankInt
from spmd.sharding.ordinal import local_rows, own_rows
from spmd.sharding.rule import OWN, BlockRule, Call, Labels, Rule, Shape, ViewRule, labelled

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


def rows(call: Call) -> Rule:
    """Independent along all dims but the last, where the operands have them in common."""
    return leading(call, len(call.inputs[0]) - 1)


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


def leading(
    call: Call, count: int, operands: Sequence[int] | None = None, linear: Linear = NONE, **options: Any
) -> Rule:
    """The first `count` dims are independent; inputs outside `operands` (weights) are replicated."""
    first = call.inputs[0]

    def labels(shape: Shape | None) -> list[Hashable] | None:
        if shape is None:
            return None
        return [d if d < count and d < len(first) and shape[d] == first[d] else None for d in range(len(shape))]

    ins = [labels(s) if operands is None or j in operands else [None] * len(s) for j, s in enumerate(call.inputs)]
    return labelled(ins, [labels(o) for o in call.outputs], linear=linear, **options)


def norm(call: Call) -> Rule:
    """layer_norm and rms_norm: independent over the dims before the normalised ones."""
    return leading(call, len(call.inputs[0]) - len(call.arg("normalized_shape")), operands=(0,))


def norm_backward(call: Call) -> Rule:
    """Their adjoints: gradients of weight and bias are sums over those dims."""
    count = len(call.inputs[0]) - len(call.arg("normalized_shape"))
    alike = [j for j, s in enumerate(call.inputs) if len(s) == len(call.inputs[0])]
    rule = leading(call, count, operands=alike, linear=((0,),))
    return replace(rule, reduce=dict.fromkeys(range(count), "sum"), outputs=gradients(rule))


def weight_norm(call: Call) -> Rule:
    """Norms over all dims but one."""
    labels = lambda s: [d if d == call.arg("dim") % len(s) else None for d in range(len(s))]  # noqa: E731
    return labelled([labels(s) for s in call.inputs], [labels(o) for o in call.outputs if o is not None], nonempty=True)


def group_norm(call: Call) -> Rule:
    return leading(call, 1, operands=(0,), emit=emit.group_norm, nonempty=True)


def group_norm_backward(call: Call) -> Rule:
    rule = leading(call, 1, operands=(0, 1, 2, 3), linear=((0,),), emit=emit.group_norm, nonempty=True)
    return replace(rule, reduce={0: "sum"}, outputs=gradients(rule))


def gradients(rule: Rule) -> tuple[Labels | None, ...]:
    """The first output lies as the input does; the others, of weights, have no dim in common with it."""
    return rule.outputs[0], *(None if o is None else (None,) * len(o) for o in rule.outputs[1:])


def batch_norm(call: Call) -> Rule:
    """Channels are independent, in evaluation all is. In training the statistics are the batch's, or each rank's own where that's asked for."""
    training = bool(call.arg("training" if call.has("training") else "train", False))
    n, channels = len(call.inputs[0]), call.inputs[0][1]
    x: list[Hashable] = [OWN, 1, *[None] * (n - 2)] if training else list(range(n))

    def labels(shape: Shape | None) -> list[Hashable]:
        return x if shape is not None and len(shape) == n else [1 if size == channels else None for size in shape or ()]

    outs = [None if o is None or o == (0,) else labels(o) for o in call.outputs]
    backward = call.has("output_mask")
    how = ("", "sum", "sum") if backward else ("", OWN, OWN, "avg", "avg")
    reduce = dict.fromkeys([k for k in x if k not in (1, None)], how)
    saved = (len(call.inputs) - 2, len(call.inputs) - 1) if backward else ()
    ins = [labels(s) for s in call.inputs]
    return labelled(ins, outs, reduce=reduce, nonempty=True, own=saved if training else None)


def diagonal(call: Call) -> Rule:
    """The two dims of the diagonal become the last; its adjoint and diag_embed put it back."""
    puts = call.name != "diagonal"
    whole = main_output(call) if puts else call.inputs[0]
    crossed = call.dims([call.arg("dim1"), call.arg("dim2")], len(whole))
    full = [None if d in crossed else d for d in range(len(whole))]
    thin = [*(d for d in range(len(whole)) if d not in crossed), None]
    sizes = "input_sizes" if call.has("input_sizes") else ""
    return labelled([thin if puts else full], [full if puts else thin], linear=((0,),), sizes=sizes)


def image(call: Call, linear: Linear = NONE) -> Rule:
    """Pooling and resizing: independent over all but the spatial dims."""
    spatial = 1 if "1d" in call.name else 3 if "3d" in call.name else 2
    return leading(
        call,
        len(call.inputs[0]) - spatial,
        linear=linear,
        nonempty=True,
        emit=emit.input_size if call.has("input_size") else None,
    )


def columns(call: Call) -> Rule | None:
    """im2col and col2im of a batch."""
    batched = len(call.inputs[0]) == (4 if call.name == "im2col" else 3)
    return leading(call, 1, linear=((0,),), nonempty=True) if batched else None


def pixels(call: Call) -> Rule:
    """Channels and pixels are exchanged within an image."""
    return leading(call, len(call.inputs[0]) - 3, linear=((0,),))


def matrices(call: Call, linear: Linear = NONE) -> Rule:
    """Batched matrix functions: independent over all but the last two dims. Pivots have one dim less."""
    n = len(call.inputs[0])
    alike = [j for j, s in enumerate(call.inputs) if len(s) == n or (call.name == "linalg_lu_solve" and j == 1)]
    return leading(call, n - 2, operands=alike, linear=linear)


def attention(call: Call) -> Rule:
    """Independent over batch, and over heads where queries and keys have as many. A mask counts only where it has both dims."""
    if call.arg("dropout_p"):
        return random(call)
    first = 1 if call.name.endswith("backward") else 0
    same_heads = len({s[1] for s in call.inputs[first : first + 3]}) == 1
    operands = [j for j, s in enumerate(call.inputs) if j < first + 3 or len(s) >= 3]
    rule = leading(call, 2 if same_heads else 1, operands=operands, nonempty=True, heavy=True)
    seeds = [o is None or len(o) < 3 for o in call.outputs]  # of a dropout that isn't drawn
    return replace(rule, outputs=tuple(None if s else labels for s, labels in zip(seeds, rule.outputs, strict=True)))


def einsum(call: Call, equation: str) -> Rule:
    left, right = equation.split("->")
    ins = left.split(",")
    return labelled(
        ins, [right], reduce=dict.fromkeys(set("".join(ins)) - set(right), "sum"), linear=((0,), (1,)), heavy=True
    )


def addmm(call: Call, equation: str) -> Rule:
    """Kept whole (two roundings otherwise). Where the contracted dim is split the bias counts once: rank 0 holds it."""
    left, right = equation.split("->")
    a, b = left.split(",")
    out = main_output(call)
    bias = [None if d is None else right[d] for d in aligned(call.inputs[0], out)]
    return labelled(
        [bias, a, b],
        [right],
        reduce=dict.fromkeys(set(a) - set(right), "sum"),
        linear=((0, 1), (0, 2)),
        base=0,
        heavy=True,
    )


def distances(call: Call) -> Rule:
    """cdist of rows p and rows r; its adjoint sums over r."""
    batch = list(range(len(main_output(call)) - 2))
    first, second, between = [*batch, "p", None], [*batch, "r", None], [*batch, "p", "r"]
    if call.name == "_cdist_forward":
        return labelled([first, second], [between], heavy=True)
    return labelled([between, first, second, between], [first], reduce={"r": "sum"}, linear=((0,),), heavy=True)


def ctc(call: Call) -> Rule:
    """Sequences are independent: dim 1 of [time, batch, class], dim 0 of the rest. Targets in one row can't be told apart."""
    last = call.inputs[0] if call.name.endswith("loss") else call.inputs[1]
    if len(last) < 3 or any(len(s) == 1 and s[0] != last[1] for s in call.inputs):
        return whole_value(call)
    labels = lambda s: [None, 0, None] if len(s) == 3 else [0, *[None] * (len(s) - 1)]  # noqa: E731
    return labelled([labels(s) for s in call.inputs], [labels(main_output(call))], nonempty=True)


def trilinear(call: Call) -> Rule:
    """A product of three tensors in one space of dims, each without some of them; some are summed."""
    without = [call.arg(f"expand{k}") for k in (1, 2, 3)]
    dims = range(len(call.inputs[0]) + len(without[0]))
    present = [[d for d in dims if d not in absent] for absent in without]
    sizes = {d: n for own, s in zip(present, call.inputs, strict=True) for d, n in zip(own, s, strict=True) if n != 1}
    ins = [
        [d if sizes.get(d, 1) == n else None for d, n in zip(own, s, strict=True)]
        for own, s in zip(present, call.inputs, strict=True)
    ]
    summed = call.arg("sumdim")
    outs = [d for d in dims if d not in summed]
    return labelled(ins, [outs], reduce=dict.fromkeys(summed, "sum"), linear=((0,), (1,), (2,)), heavy=True)


def convolution(call: Call) -> Rule:
    n = len(call.inputs[0])
    rest: list[Hashable] = [None] * (n - 1)
    bias: list[list[Hashable]] = [[None] for _ in call.inputs[2:]]
    ins: list[list[Hashable]] = [["n", *rest], [None] * n, *bias]
    return labelled(
        ins, [["n", *rest]], linear=((0,), (1,)) if len(call.inputs) == 2 else NONE, heavy=True, nonempty=True
    )


def convolution_backward(call: Call) -> Rule:
    n = len(call.inputs[0])
    rest: list[Hashable] = [None] * (n - 1)
    outs: list[list[Hashable]] = [["n", *rest], [None] * n, [None]]
    kept = [labels if on else None for labels, on in zip(outs, call.arg("output_mask"), strict=True)]
    return labelled(
        [["n", *rest], ["n", *rest], [None] * n], kept, reduce={"n": "sum"}, linear=((0,),), heavy=True, nonempty=True
    )


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


def unfold_backward(call: Call) -> Rule | None:
    n = len(main_output(call))
    if n == 0:
        return None
    free = [None if j in call.dims(call.arg("dim"), n) else j for j in range(n)]
    return labelled([[*free, None]], [free], linear=((0,),), sizes="input_sizes")


def index_select(call: Call) -> Rule | None:
    n = len(call.inputs[0])
    if n == 0:
        return None
    d = call.dims(call.arg("dim"), n)[0]
    return labelled(
        [[None if j == d else j for j in range(n)], ["i"]], [["i" if j == d else j for j in range(n)]], linear=((0,),)
    )


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
    times, n = call.arg("repeats"), len(call.inputs[0])
    shift = len(times) - n
    ins = [d + shift if times[d + shift] == 1 else None for d in range(n)]
    outs = [d if d >= shift and times[d] == 1 else None for d in range(len(times))]
    return labelled([ins], [outs], linear=((0,),))


def fused_adam(call: Call) -> Rule:
    """One parameter's update: elementwise over parameter, gradient and moments; the step counter is a scalar."""
    like = call.inputs[0]
    return labelled(
        [list(range(len(s))) if s == like else [None] * len(s) for s in call.inputs],
        [list(range(len(like))) for _ in call.outputs],
        emit=emit.fused,
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
