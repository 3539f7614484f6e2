"""One op call without data: shapes, types and the other arguments; and numbers drawn for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from spmd.sharding.rule import Call, Shape

TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-5, torch.complex64: 1e-5}
COARSE = 3e-2  # of half precision: a few roundings


@dataclass(frozen=True)
class Spec:
    """A tensor without data."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Example:
    """An op call; equal calls are equal and hash alike."""

    target: Any
    leaves: tuple[Any, ...]  # of (args, kwargs): a Spec for each tensor, the value of anything else
    tree: TreeSpec
    outputs: tuple[Shape | None, ...]

    @classmethod
    def of(cls, call: Call) -> Example | None:
        """The call in a graph; None where it has an argument that is known only at run time."""
        leaves, tree = tree_flatten((call.node.args, call.node.kwargs), is_leaf=lambda x: isinstance(x, fx.Node))
        found = [leaf(x) for x in leaves]
        known = not any(isinstance(x, fx.Node) for x in found)
        return cls(call.target, tuple(found), tree, tuple(call.outputs)) if known else None

    @property
    def specs(self) -> list[Spec]:
        return [x for x in self.leaves if isinstance(x, Spec)]

    @property
    def shapes(self) -> list[Shape]:
        return [x.shape for x in self.specs]

    @property
    def elements(self) -> int:
        return sum(math.prod(s) for s in (*self.shapes, *self.outputs) if s is not None)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The outputs, flat. Raises what the op raises, and TypeError where it yields anything but tensors."""
        given = iter(tensors)
        args, kwargs = tree_unflatten([next(given) if isinstance(x, Spec) else x for x in self.leaves], self.tree)
        outs = tree_leaves(self.target(*args, **kwargs), is_leaf=lambda x: x is None)
        if not all(y is None or isinstance(y, torch.Tensor) for y in outs):
            raise TypeError(f"{self.target} yields numbers")
        return outs

    def cut(self, limit: int) -> Example | None:
        """The call with its large dims made about `limit` long, unlike sizes unlike; None where that makes it no smaller.

        Integers that equal a size follow it. Others may be windows or counts, which have to stay smaller than the dims.
        """
        shapes = [s for s in (*self.shapes, *self.outputs) if s is not None]
        sizes = {n for s in shapes for n in s}
        numbers = {x for x in self.leaves if isinstance(x, int) and not isinstance(x, bool)}
        limit = max([limit, *(2 * abs(x) + 1 for x in numbers - sizes)])
        large = sorted(n for n in sizes if n > limit)
        free = (n for n in range(limit, max(sizes, default=0)) if n not in sizes)
        new = dict(zip(large, free, strict=False))
        if not new:
            return None
        at = lambda shape: tuple(new.get(n, n) for n in shape)  # noqa: E731
        leaves = tuple(
            replace(x, shape=at(x.shape))
            if isinstance(x, Spec)
            else new.get(x, x)
            if isinstance(x, int) and not isinstance(x, bool)
            else x
            for x in self.leaves
        )
        return replace(self, leaves=leaves, outputs=tuple(None if s is None else at(s) for s in self.outputs))


def leaf(x: Any) -> Any:
    val = x.meta.get("val") if isinstance(x, fx.Node) else None
    if isinstance(val, torch.Tensor):
        return Spec(tuple(map(int, val.shape)), val.dtype)
    if isinstance(val, (float, torch.SymFloat)):
        return 0.75  # a number of run time: its value doesn't move tensors about
    return torch.device("cpu") if isinstance(x, torch.device) else x


class Data:
    """Numbers for the tensors of one call, always the same for the same seed."""

    def __init__(self, example: Example, seed: int) -> None:
        self.specs = example.specs
        self.generator = torch.Generator("cpu").manual_seed(seed)
        floating = [s for s in self.specs if s.dtype.is_floating_point] or self.specs
        self.high = min((n for s in floating for n in s.shape if n > 1), default=2)  # below it: positions in any dim

    def draw(self, kind: int, scale: float = 1.0) -> list[torch.Tensor]:
        """kind 0: normal numbers; 1: small integers, so that ties and zeros occur; 2: positive ones, for logarithms and roots."""
        return [self.one(spec, kind, scale) for spec in self.specs]

    def one(self, spec: Spec, kind: int, scale: float) -> torch.Tensor:
        shape, dtype, g = spec.shape, spec.dtype, self.generator
        if dtype == torch.bool:
            return torch.rand(shape, generator=g, device="cpu") < 0.5
        if not dtype.is_floating_point and not dtype.is_complex:
            return torch.randint(0, self.high, shape, generator=g, device="cpu").to(dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        if kind == 1:
            return (scale * torch.randint(-2, 3, shape, generator=g, device="cpu")).to(wide).to(dtype)
        x = scale * torch.randn(shape, generator=g, dtype=wide, device="cpu")
        return (x.abs() * 0.4 + 0.3 if kind == 2 else x).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor, *terms: torch.Tensor) -> bool:
    """Equal up to rounding of what they were summed from; NaN equals nothing."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    bound = max(
        (float(x[torch.isfinite(x)].abs().max()) for x in (expected, *terms) if torch.isfinite(x).any()), default=0.0
    )
    tolerance = max(
        TOLERANCE.get(x.dtype, COARSE) for x in (expected, *terms) if x.dtype.is_floating_point or x.dtype.is_complex
    )
    return torch.allclose(found.to(wide), expected.to(wide), rtol=tolerance, atol=tolerance * bound)


def constant(xs: Sequence[torch.Tensor]) -> bool:
    """Whether all elements of all tensors are one number. No tensor at all isn't."""
    flat = [x.reshape(-1) for x in xs if x.numel()]
    return bool(flat) and all(bool((x == flat[0][0]).all()) for x in flat)
