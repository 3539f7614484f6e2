"""Fake tensors at global shapes, the symbol of the global batch, and symbolic Python numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch

from spmd._torch import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    disable_functional_mode,
    disable_proxy_modes_tracing,
)
from spmd.graph.step import Batch


def pick_hint(near: int, taken: Iterable[int]) -> int:
    """The prime nearest to `near`, 11 or more, that equals no size in `taken`: near, so that branches on the size go as they really do."""
    avoid = set(taken)
    for distance in range(near + 1000):
        for n in (near + distance, near - distance):
            if n >= 11 and n not in avoid and sympy.isprime(n):
                return n
    raise AssertionError("there are more primes than sizes")


class Faker:
    """Makes the fakes of one trace. `size`: the concrete global batch of a static trace; else `hint` stands behind the symbol."""

    def __init__(self, size: int | None, hint: int | None) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.symbols: dict[sympy.Symbol, str] = {}  # of Python numbers: symbol -> input name
        self.batch: Batch | None = None
        self.size: Any = size
        if hint is not None:
            source = ConstantSource("global_batch")
            symbol = self.env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DUCK, constraint_dim=None)
            self.size = self.env.create_symintnode(symbol, hint=hint, source=source)
            self.batch = Batch(symbol, hint)

    def tensor(self, t: torch.Tensor, batch_dim: int | None = None) -> torch.Tensor:
        """A fake of the global tensor that `t` is the local share of. Strides keep the order of `t`'s dims and are dense."""
        shape: list[Any] = list(t.shape)
        strides: list[Any] = list(t.stride())
        if batch_dim is not None:
            shape[batch_dim] = self.size
            strides = dense_strides(shape, t)
        with disable_proxy_modes_tracing(), disable_functional_mode(), self.mode:
            return torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device)

    def number(self, value: int | float, name: str) -> Any:
        """A symbolic number of its own: it isn't specialised on 0 and 1, nor taken for another one that's equal today."""
        source = ConstantSource(name)
        symbol = self.env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        self.symbols[symbol] = name
        if isinstance(value, float):
            return self.env.create_symfloatnode(symbol, hint=value, source=source)
        return self.env.create_symintnode(symbol, hint=value, source=source)


def dense_strides(shape: list[Any], like: torch.Tensor) -> list[Any]:
    """Dense strides for `shape` in the memory order of `like`."""
    strides: list[Any] = [0] * len(shape)
    step: Any = 1
    for d in memory_order(like)[::-1]:
        strides[d] = step
        step = step * shape[d]
    return strides


def memory_order(t: torch.Tensor) -> list[int]:
    """Dims of `t`, or of what torch makes like it, from outermost to innermost in memory; dims of size 1 keep their place among equals."""
    order = list(range(t.dim()))
    if t.is_contiguous():
        return order
    if 0 in t.stride():
        return _order_like(t)
    return sorted(order, key=lambda d: t.stride()[d], reverse=True)  # stable; no int(): strides may be symbolic


def _order_like(t: torch.Tensor) -> list[int]:
    """For an expanded tensor: ATen's infer_dense_strides, an insertion sort from the innermost dim in which a stride of 0 compares to nothing."""
    order = list(reversed(range(t.dim())))
    for place in range(1, len(order)):
        for j in reversed(range(place)):
            inner, outer = order[j], order[place]
            a, b = t.stride()[inner], t.stride()[outer]
            if a == 0 or b == 0 or (a == b and t.size(inner) <= t.size(outer)):
                continue
            if a < b:
                break
            order[j], order[place], place = outer, inner, j
    return order[::-1]
