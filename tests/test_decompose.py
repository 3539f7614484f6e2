"""Every decomposition against its op, along a split dim: equal, and a few numbers move, not the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from spmd.sharding.constraints import Constraints
from spmd.sharding.decompose import TABLE
from spmd.sharding.layout import Sharded, join
from spmd.sharding.partition import Axis, partition
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


# An op of each row along dim 0, the first input split there.
CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
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
    layouts = tuple(layout.canonical(world) for _ in args)
    plan = propagate(step, Constraints(layouts, (None,) * len(step.outputs)), world)
    results = run(step, plan, world, args)
    for parts, place, want in zip(zip(*results, strict=True), plan.outputs, tree_leaves(fn(*args)), strict=True):
        assert place is not None
        tolerance = 2e-2 if want.dtype == torch.bfloat16 else 1e-12
        torch.testing.assert_close(join(list(parts), place), want, rtol=tolerance, atol=tolerance, equal_nan=True)
    collectives = partition(step, plan, Axis(world, 0, "0")).collectives
    gathered = [c for c in collectives if c.op == "all_gather" and c.after == "R" and c.before.startswith("S")]
    assert all(c.reason.startswith("returned") for c in gathered)
