"""Rules of what models are made of: products, norms, convolutions, pools, attention. Each function turns one op call into a Rule, or None."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from spmd.sharding import emit
from spmd.sharding.categories import NONE, Linear, aligned, main_output, random, whole_value
from spmd.sharding.rule import OWN, Call, Labels, Rule, Shape, labelled

aten = torch.ops.aten


def rows(call: Call) -> Rule:
    """Independent along all dims but the last, where the operands have them in common."""
    return leading(call, len(call.inputs[0]) - 1)


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
    """Independent over batch, and over heads where queries and keys have as many; over queries where their place doesn't matter, the keys
    and values being whole. A mask counts only where it has these dims.
    """
    if call.arg("dropout_p"):
        return random(call)
    first = 1 if call.name.endswith("backward") else 0
    same_heads = len({s[1] for s in call.inputs[first : first + 3]}) == 1
    operands = [j for j, s in enumerate(call.inputs) if j < first + 3 or len(s) >= 3]
    rule = leading(call, 2 if same_heads else 1, operands=operands, nonempty=True, heavy=True)
    seeds = [o is None or len(o) < 3 for o in call.outputs]  # of a dropout that isn't drawn
    rule = replace(rule, outputs=tuple(None if s else labels for s, labels in zip(seeds, rule.outputs, strict=True)))
    plain = call.name.startswith("_scaled_dot_product_flash_attention_for_cpu") and not call.arg("is_causal")
    return over_queries(call, rule, first) if plain else rule


def over_queries(call: Call, rule: Rule, first: int) -> Rule:
    """Dim 2 of queries and of all that lies as they do; gradients of keys and values are sums over it."""
    length = call.inputs[first][2]

    def mark(labels: Labels | None, shape: Shape, dim: int) -> Labels | None:
        assert labels is not None
        return (*labels[:dim], "query", *labels[dim + 1 :]) if shape[dim] == length else labels

    keys = (first + 1, first + 2)
    mask = 6 if first else 3
    ins = [
        labels if j in keys else mark(labels, s, len(s) - 2 if j == mask else 2)
        for j, (labels, s) in enumerate(zip(rule.inputs, call.inputs, strict=True))
    ]
    outs = [
        mark(labels, o or (), 2) if not first or j == 0 else labels
        for j, (labels, o) in enumerate(zip(rule.outputs, call.outputs, strict=True))
    ]
    return replace(rule, inputs=tuple(ins), outputs=tuple(outs), reduce={"query": "sum"} if first else {})


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


def fused_adam(call: Call) -> Rule:
    """One parameter's update: elementwise over parameter, gradient and moments; the step counter is a scalar."""
    like = call.inputs[0]
    return labelled(
        [list(range(len(s))) if s == like else [None] * len(s) for s in call.inputs],
        [list(range(len(like))) for _ in call.outputs],
        emit=emit.fused,
    )
