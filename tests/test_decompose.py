"""Every decomposition against its op, along a split dim: equal, and a few numbers move, not the tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from spmd.graph.axis import Axis
from spmd.sharding.constraints import Constraints
from spmd.sharding.decompose import TABLE
from spmd.sharding.layout import R, Sharded, join
from spmd.sharding.partition import partition
from spmd.sharding.propagate import propagate
from tests.parts import F64, ints, rand, run, step_graph

aten = torch.ops.aten
INF = float("inf")


def masked(*shape: int) -> torch.Tensor:
    """A few entries are -inf, and a whole row and column too."""
    x = rand(*shape)
    x[x > 1] = -INF
    x[0], x[:, 0] = -INF, -INF
    return x


def softmaxed(*shape: int) -> torch.Tensor:
    return rand(*shape).softmax(0)


def default(name: str, *rest: Any) -> Callable[..., Any]:
    return lambda *tensors: getattr(aten, name).default(*tensors, *rest)


QKV = rand(3, 2, 14, 4), rand(3, 2, 5, 4), rand(3, 2, 5, 4)
# An op of each row; what has a dim of 14 is split there.
CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True)[0],
        QKV,
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda *tensors: aten._scaled_dot_product_flash_attention_for_cpu_backward.default(*tensors, 0.0, True),
        (rand(3, 2, 14, 4), *QKV, *aten._scaled_dot_product_flash_attention_for_cpu.default(*QKV, 0.0, True)),
    ),
    "_softmax": (lambda x: aten._softmax.default(x, 0, False), (rand(14, 6),)),
    "_softmax half": (lambda x: aten._softmax.default(x, -2, False), (rand(14, 6).bfloat16(),)),
    "_safe_softmax": (lambda x: aten._safe_softmax.default(x, 0), (masked(14, 6),)),
    "_log_softmax": (lambda x: aten._log_softmax.default(x, 0, False), (rand(14, 6),)),
    "_softmax_backward_data": (
        lambda g, y: aten._softmax_backward_data.default(g, y, 0, F64),
        (rand(14, 6), softmaxed(14, 6)),
    ),
    "_log_softmax_backward_data": (
        lambda g, y: aten._log_softmax_backward_data.default(g, y, 0, F64),
        (rand(14, 6), softmaxed(14, 6).log()),
    ),
    "logsumexp": (lambda x: aten.logsumexp.default(x, [0]), (masked(14, 6),)),
    "logsumexp all": (lambda x: aten.logsumexp.default(x, [0, 1], True), (rand(14, 6),)),
    "max": (lambda x: aten.max.dim(x, 0), (rand(14, 6),)),
    "max ties": (lambda x: aten.max.dim(x, 0, True), (ints(3, 14, 6),)),
    "min": (lambda x: aten.min.dim(x, 0), (rand(14, 6),)),
    "argmax": (lambda x: aten.argmax.default(x, 0), (rand(14, 6),)),
    "argmax all": (lambda x: aten.argmax.default(x), (rand(14, 6),)),
    "argmin": (lambda x: aten.argmin.default(x, 0, True), (rand(14, 6),)),
    "tril": (lambda x: aten.tril.default(x, 1), (rand(14, 6),)),
    "triu": (lambda x: aten.triu.default(x), (rand(14, 6),)),
    "diagonal": (lambda x: aten.diagonal.default(x), (rand(14, 14, 2),)),
    "diagonal_backward": (lambda g: aten.diagonal_backward.default(g, [14, 14], 0, 0, 1), (rand(14),)),
    "as_strided": (lambda x: aten.as_strided.default(x, [14, 6, 1], [6, 1, 6]), (rand(14, 6),)),
    "as_strided pooled": (lambda x: aten.as_strided.default(x, [14, 6, 1, 1], [6, 1, 6, 6], 0), (rand(14, 6, 1, 1),)),
    "as_strided_scatter": (
        lambda x, y: aten.as_strided_scatter.default(x, y, [14, 6], [6, 1], 0),
        (rand(84), rand(14, 6)),
    ),
    "var": (lambda x: aten.var.correction(x, [0], correction=1), (rand(14, 6),)),
    "var all": (lambda x: aten.var.correction(x, None), (rand(14, 6),)),
    "var complex": (lambda x: aten.var.correction(x, [0]), (torch.complex(rand(14, 6), rand(14, 6)),)),
    "var_mean": (lambda x: aten.var_mean.correction(x, [0, 1], correction=0, keepdim=True), (rand(14, 6),)),
    "std": (lambda x: aten.std.correction(x, [0]), (rand(14, 6),)),
    "std_mean": (lambda x: aten.std_mean.correction(x, [-2]), (rand(14, 6).bfloat16(),)),
    **{f"linalg_vector_norm {p}": (default("linalg_vector_norm", p), (rand(14, 6),)) for p in (0, 1, 2, 3, INF, -INF)},
    "linalg_vector_norm dim": (lambda x: aten.linalg_vector_norm.default(x, 2, [0], True), (rand(14, 6),)),
    "linalg_vector_norm cast": (
        lambda x: aten.linalg_vector_norm.default(x, 2, dtype=torch.float32),
        (rand(14, 6).bfloat16(),),
    ),
    "_native_batch_norm_legit": (
        lambda x, w: aten._native_batch_norm_legit.no_stats(x, w, None, True, 0.1, 1e-5),
        (rand(14, 3, 2), rand(3)),
    ),
    "_native_batch_norm_legit_functional": (
        lambda x, w, m, v: aten._native_batch_norm_legit_functional.default(x, w, w, m, v, True, 0.1, 1e-5),
        (rand(14, 3, 2), rand(3), rand(3), rand(3).abs()),
    ),
    "native_batch_norm_backward": (
        lambda g, x, w, m, v: aten.native_batch_norm_backward.default(
            g, x, w, m, v, m, v, True, 1e-5, [True, True, True]
        ),
        (rand(14, 3, 2), rand(14, 3, 2), rand(3), rand(3), rand(3).abs()),
    ),
    "nll_loss_forward": (
        lambda x, t, w: aten.nll_loss_forward.default(x, t, w, 1, 1),
        (rand(14, 3), ints(3, 14), rand(3).abs()),
    ),
    "nll_loss2d_forward": (
        lambda x, t: aten.nll_loss2d_forward.default(x, t, None, 2, -100),
        (rand(14, 3, 2, 2), ints(3, 14, 2, 2)),
    ),
    **{
        name: (
            default(name),
            (rand(14, 3).sigmoid(), rand(14, 3).sigmoid()),
        )
        for name in (
            "mse_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "soft_margin_loss",
        )
    },
    **{
        f"{name}_backward": (
            default(f"{name}_backward", *rest),
            (rand(), rand(14, 3).sigmoid(), rand(14, 3).sigmoid()),
        )
        for name, rest in {
            "mse_loss": (1,),
            "smooth_l1_loss": (1, 0.3),
            "huber_loss": (2, 0.3),
            "binary_cross_entropy": (None, 1),
            "soft_margin_loss": (1,),
        }.items()
    },
    "trace": (lambda x: aten.trace.default(x), (rand(14, 14),)),
}


def test_every_decomposition_is_tested() -> None:
    assert {name.split()[0] for name in CALLS} == set(TABLE)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("layout", [Sharded(0, 1, 14, 1), Sharded(0, 2, 7, 1), Sharded(0, 1, 7, 2)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_decomposition_is_the_op(name: str, layout: Sharded, world: int) -> None:
    fn, args = CALLS[name]
    step = step_graph(fn, args)
    layouts = tuple(
        replace(layout, dim=tuple(x.shape).index(14)).canonical(world) if 14 in x.shape else R for x in args
    )
    plan = propagate(step, Constraints(layouts, (None,) * len(step.outputs)), world)
    results = run(step, plan, world, args)
    for parts, place, want in zip(zip(*results, strict=True), plan.outputs, tree_leaves(fn(*args)), strict=True):
        assert place is not None
        tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5}.get(want.dtype, 1e-12)
        torch.testing.assert_close(join(list(parts), place), want, rtol=tolerance, atol=tolerance, equal_nan=True)
    collectives = partition(step, plan, Axis(world, 0, "0")).collectives
    gathered = [c for c in collectives if c.op == "all_gather" and c.after == "R" and c.before.startswith("S")]
    assert all(c.reason.startswith("returned") for c in gathered)
