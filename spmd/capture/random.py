"""Random draws that don't depend on values: nodes without tensor inputs, drawing in eager's order.

Eager fills memory in order, whatever the strides, so a draw for a permuted tensor is a contiguous draw in memory order, permuted
(checked bit for bit on CPU in float32, float64 and bfloat16). Only `normal_` has another routine for tensors that aren't contiguous, so
there the permuted empty tensor itself is drawn into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.capture.fakes import memory_order

aten = torch.ops.aten


def _ordered(x: torch.Tensor) -> tuple[list[Any], list[int]]:
    """Sizes of `x` in memory order, and the permutation that leads back."""
    order = memory_order(x)
    return [x.size(d) for d in order], [order.index(d) for d in range(x.dim())]


def empty_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor with the sizes and strides of `x` that doesn't depend on it."""
    sizes, back = _ordered(x)
    e = aten.empty.memory_format(sizes, dtype=dtype or x.dtype, device=x.device)
    return e if back == sorted(back) else aten.permute.default(e, back)


def bernoulli(x: torch.Tensor, p: float, generator: torch.Generator | None = None) -> torch.Tensor:
    """Zeros and ones with the sizes and dtype of `x`, one with probability `p`."""
    sizes, back = _ordered(x)
    e = aten.empty.memory_format(sizes, dtype=x.dtype, device=x.device)
    drawn = aten.bernoulli.p(e, p, generator=generator)
    return drawn if back == sorted(back) else aten.permute.default(drawn, back)


def eager_dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout in the very arithmetic of eager on CPU: `x * (mask / (1 - p))`, the scaled mask rounded to x's dtype."""
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    with torch.no_grad():
        noise = bernoulli(x, 1 - p).div(1 - p)
    return x * noise


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The fused op's own arithmetic, `x * mask * scale`, with an explicit mask."""
    if train is False or p == 0:
        return aten.clone.default(x), aten.ones.default(list(x.size()), dtype=torch.bool, device=x.device)
    mask = bernoulli(empty_like(x, torch.bool), 1 - p)
    return aten.mul.Tensor(aten.mul.Tensor(x, mask), 0.0 if p == 1 else 1 / (1 - p)), mask


def native_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return aten.mul.Tensor(aten.mul.Tensor(grad, mask), scale)


def _functional(op: Any) -> Callable[..., torch.Tensor]:
    """A functional form of an in-place draw: only the sizes of its first argument matter."""

    def draw(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if _is_empty(x) else op(empty_like(x), *args, **kwargs)

    return draw


def _random_from(x: torch.Tensor, low: int, high: int | None, generator: torch.Generator | None = None) -> Any:
    """`random_.from` can't be written as code, for its name; the numbers are those of a draw from 0, moved."""
    if high is None:
        high = torch.iinfo(x.dtype).max + 1
    drawn = aten.random.to(empty_like(x, torch.int64), high - low, generator=generator)
    return (drawn + low).to(x.dtype)


def _is_empty(x: torch.Tensor) -> bool:
    """Whether `x` is already an empty factory, so that the rewriting stops."""
    from spmd.capture.marks import node_of

    node = node_of(x)
    while node is not None and node.target is aten.permute.default:
        node = node.args[0]  # type: ignore[assignment]
    return node is not None and node.target is aten.empty.memory_format


def _bernoulli_p(x: torch.Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> Any:
    return NotImplemented if _is_empty(x) and x.is_contiguous() else bernoulli(x, p, generator)


def _like(factory: Any) -> Callable[..., torch.Tensor]:
    def draw(
        x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        sizes, back = _ordered(x)
        drawn = factory(*args, sizes, dtype=dtype or x.dtype, device=device or x.device)
        return drawn if back == sorted(back) else aten.permute.default(drawn, back)

    return draw


def _randn_like(
    x: torch.Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> torch.Tensor:
    if x.is_contiguous():
        return aten.randn.default(list(x.size()), dtype=dtype or x.dtype, device=device or x.device)
    return aten.normal_functional.default(empty_like(x, dtype))


def table() -> dict[Any, Callable[..., Any]]:
    """Decompositions of random ops."""
    draws = (
        aten.normal_functional.default,
        aten.uniform.default,
        aten.exponential.default,
        aten.geometric.default,
        aten.cauchy.default,
        aten.log_normal.default,
        aten.random.default,
        aten.random.to,
    )
    return {
        aten.native_dropout.default: native_dropout,
        aten.native_dropout_backward.default: native_dropout_backward,
        aten.bernoulli.p: _bernoulli_p,
        getattr(aten.random, "from"): _random_from,
        aten.rand_like.default: _like(aten.rand.default),
        aten.randn_like.default: _randn_like,
        aten.randint_like.default: _like(aten.randint.default),
        aten.randint_like.low_dtype: _like(aten.randint.low),
        **{op: _functional(op) for op in draws},
    }
