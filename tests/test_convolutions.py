"""Convolutions of every kind, split along any dim of any operand: what the whole gives, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from spmd.sharding.constraints import Constraints
from spmd.sharding.layout import R, join, shard
from spmd.sharding.propagate import propagate
from tests.parts import rand, run, step_graph

aten = torch.ops.aten


@dataclass(frozen=True)
class Kind:
    size: tuple[int, ...]  # of the image
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    channels: tuple[int, int]  # a group, in and out
    transposed: bool
    batch: int

    @property
    def arguments(self) -> tuple[object, ...]:
        extra = [min(s, d) - 1 for s, d in zip(self.stride, self.dilation, strict=True)]
        output = extra if self.transposed else [0] * len(self.size)
        return list(self.stride), list(self.padding), list(self.dilation), self.transposed, output, self.groups

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        (a, b), g = self.channels, self.groups
        return rand(self.batch, a * g, *self.size), rand(*((a * g, b) if self.transposed else (b * g, a)), *self.kernel)


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    dims = draw(st.integers(1, 2))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    kernel, dilation = each(1, 4), each(1, 2)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = tuple(r + draw(st.integers(0, 5)) for r in reach)  # a whole kernel fits
    channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Kind(
        size,
        kernel,
        each(1, 4),
        each(0, 1),
        dilation,
        draw(st.integers(1, 3)),
        channels,
        draw(st.booleans()),
        draw(st.integers(1, 5)),
    )


@pytest.mark.parametrize("world", [2, 3])
@settings(max_examples=12, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(kind=kinds(), bias=st.booleans(), data=st.data())
def test_split_along_any_dim(world: int, kind: Kind, bias: bool, data: st.DataObject) -> None:
    x, w = kind.tensors()
    b = rand(kind.channels[1] * kind.groups)
    given = (x, w, b) if bias else (x, w)
    convolve = lambda x, w, b: aten.convolution.default(x, w, b, *kind.arguments)  # noqa: E731
    forward = convolve if bias else lambda x, w: convolve(x, w, None)
    backward = lambda g, x, w: aten.convolution_backward.default(g, x, w, [len(b)], *kind.arguments, [True, True, True])  # noqa: E731
    for fn, args in ((forward, given), (backward, (torch.randn_like(forward(*given)), x, w))):
        which = data.draw(st.integers(0, len(args) - 1))
        dim = data.draw(st.integers(0, args[which].dim() - 1))
        layouts = tuple(shard(dim, y.shape[dim]) if i == which else R for i, y in enumerate(args))
        step = step_graph(fn, args)
        plan = propagate(step, Constraints(layouts, (None,) * len(step.outputs)), world)
        results = zip(*run(step, plan, world, args), strict=True)
        for parts, place, want in zip(results, plan.outputs, tree_leaves(fn(*args)), strict=True):
            assert place is not None
            torch.testing.assert_close(join(list(parts), place), want, rtol=1e-10, atol=1e-10)
