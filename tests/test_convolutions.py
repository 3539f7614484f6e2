"""Convolutions of every kind, split in every way, forward and backward: what the ranks hold, joined, is what one device gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from spmd.debug import run_lockstep
from spmd.graph.axis import Axis
from spmd.sharding.constraints import Constraints
from spmd.sharding.layout import Layout, Partial, R, join, shard
from spmd.sharding.partition import partition
from spmd.sharding.propagate import propagate
from tests.parts import F64, pieces, step_graph

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Kind:
    """One convolution: `sizes` are spatial; every option is one number a spatial dim."""

    samples: int
    groups: int
    channels: tuple[int, int]  # in and out, a group
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    extra: tuple[int, ...]  # output_padding
    transposed: bool
    bias: bool
    channels_last: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The input, the weight, and a bias if there is one."""
        generator = torch.Generator().manual_seed(1)
        inside, outside = (c * self.groups for c in self.channels)
        weight = (inside, self.channels[1]) if self.transposed else (outside, self.channels[0])
        shapes: list[tuple[int, ...]] = [(self.samples, inside, *self.sizes), (*weight, *self.kernel)]
        if self.bias:
            shapes.append((outside,))
        found = [torch.randn(s, generator=generator, dtype=F64) for s in shapes]
        if self.channels_last and len(self.sizes) == 2:
            found[0] = found[0].contiguous(memory_format=torch.channels_last)
        return tuple(found)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        n = len(self.sizes)
        if self.transposed:
            padding: Any = self.padding
            return TRANSPOSED[n](x, weight, bias, self.stride, padding, self.extra, self.groups, self.dilation)
        return CONVOLUTIONS[n](x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


@st.composite
def kinds(draw: Any) -> Kind:
    n = draw(st.sampled_from((1, 2, 2, 2, 3)))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(n))  # noqa: E731
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    channels = draw(st.sampled_from(((1, 1), (1, 2), (2, 1), (2, 3))))
    kernel, stride, dilation = each(1, 3), each(1, 4), each(1, 2)
    transposed = draw(st.booleans())
    padding: Any = tuple(draw(st.integers(0, d * (k - 1))) for d, k in zip(dilation, kernel, strict=True))
    sizes = tuple(d * (k - 1) + draw(st.integers(1, 5)) for d, k in zip(dilation, kernel, strict=True))
    if not transposed and draw(st.integers(0, 4)) == 0:
        padding, stride = draw(st.sampled_from(("same", "valid"))), (1,) * n
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    samples, bias, last = draw(st.integers(1, 6)), draw(st.booleans()), draw(st.booleans())
    return Kind(samples, groups, channels, sizes, kernel, stride, padding, dilation, extra, transposed, bias, last)


def ways(shape: tuple[int, ...], partial: bool) -> list[Layout]:
    return [R, *([Partial()] if partial else []), *(shard(d, n) for d, n in enumerate(shape) if n > 1)]


def with_gradients(kind: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The output and the gradients of all inputs, for a gradient that is the last argument."""

    def fn(*args: Tensor) -> tuple[Tensor, ...]:
        *tensors, grad = args
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = kind(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return fn


def curved(kind: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Gradients of a norm of gradients: the backward of the backward."""

    def fn(*args: Tensor) -> tuple[Tensor, ...]:
        *tensors, grad = args
        leaves = [x.detach().requires_grad_() for x in tensors]
        inner = torch.autograd.grad(kind(*leaves).sin(), leaves[:2], grad, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in inner), leaves[:2])

    return fn


def check(
    fn: Callable[..., tuple[Tensor, ...]], args: tuple[Tensor, ...], choose: Callable[[list[Layout]], Layout], W: int
) -> Any:
    """Inputs and results lie as `choose` says; every rank's program runs in lockstep, which checks each node's shape. Returns a program."""
    step = step_graph(fn, args)
    ins = [choose(ways(tuple(x.shape), partial=True)) for x in args]
    expected = fn(*args)
    outs = [choose(ways(tuple(y.shape), partial=False)) for y in expected]
    plan = propagate(step, Constraints(tuple(ins), tuple(outs)), W)
    graphs = [partition(step, plan, Axis(W, r, "0")) for r in range(W)]
    parts = [pieces(x, layout, W) for x, layout in zip(args, ins, strict=True)]
    results = run_lockstep(graphs, [[x[r] for x in parts] for r in range(W)])
    for i, (got, layout, want) in enumerate(zip(zip(*results, strict=True), plan.outputs, expected, strict=True)):
        assert layout == outs[i]
        told = f"result {i} as {layout}, from {', '.join(map(str, ins))} on {W} ranks"
        torch.testing.assert_close(
            join(list(got), layout), want, rtol=1e-11, atol=1e-11, msg=lambda m, t=told: f"{t}: {m}"
        )
    return graphs[0]


def arguments(kind: Kind) -> tuple[Tensor, ...]:
    tensors = kind.tensors
    out = kind(*tensors)
    return *tensors, torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=F64)


def try_one(data: st.DataObject, way: Callable[..., Any]) -> None:
    kind = data.draw(kinds())
    check(
        way(kind),
        arguments(kind),
        lambda options: data.draw(st.sampled_from(options)),
        data.draw(st.sampled_from((2, 3))),
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_convolution_split_in_any_way(data: st.DataObject) -> None:
    try_one(data, with_gradients)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_its_second_derivatives(data: st.DataObject) -> None:
    try_one(data, curved)


@pytest.mark.slow
@pytest.mark.parametrize("way", [with_gradients, curved])
def test_many_more(way: Callable[..., Any]) -> None:
    settings(max_examples=400, deadline=None)(given(st.data())(lambda data: try_one(data, way)))()


PATCHES = Kind(6, 1, (3, 8), (8, 8), (4, 4), (4, 4), (0, 0), (1, 1), (0, 0), False, True, False)
DEPTHWISE = Kind(6, 4, (1, 2), (7, 6), (3, 3), (2, 1), (1, 2), (1, 2), (0, 0), False, True, True)
UPWARD = Kind(6, 2, (2, 3), (5, 4), (3, 2), (2, 3), (1, 0), (1, 2), (1, 1), True, True, False)


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("kind", [PATCHES, DEPTHWISE, UPWARD], ids=["patches", "depthwise", "transposed"])
def test_each_dim_alone(kind: Kind, W: int) -> None:
    """Batch, channel and every spatial dim of the input and of the gradient, and every dim of the weight."""
    args = arguments(kind)
    for i, x in enumerate(args):
        for d, n in enumerate(x.shape):
            if n > 1:
                given = iter([shard(d, n) if j == i else R for j in range(len(args))])
                check(with_gradients(kind), args, lambda options, given=given: next(given, R), W)


@pytest.mark.parametrize("kind", [PATCHES, DEPTHWISE, UPWARD], ids=["patches", "depthwise", "transposed"])
def test_a_split_batch_stays_split(kind: Kind) -> None:
    """The two gradients of parameters are summed over ranks, and nothing else moves."""
    args = arguments(kind)
    layouts = iter([shard(0, 6), R, R, shard(0, 6), shard(0, 6), shard(0, 6), R, R])
    program = check(with_gradients(kind), args, lambda options: next(layouts), 3)
    assert [c.op for c in program.collectives] == ["all_reduce", "all_reduce"]
