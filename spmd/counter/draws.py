"""Draws: each random op as plain elementwise arithmetic on random bits, so that a part of the numbers needs only a part of the bits.

DRAWS has a function for each op, by name: of the draw at hand and the op's arguments. Reals are never 1 where they're uniform, and are made from
enough bits for the tails: a logarithm is taken of numbers down to 2^-32 (2^-54 in float64), so normals reach 6.7 (8.6) standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from spmd.counter import bits, keys

Arguments = Mapping[str, Any]  # by name in the op's schema
LOW31, LOW32 = (1 << 31) - 1, (1 << 32) - 1
MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # digits, as torch.rand has


@dataclass
class Draw:
    """One random op of a step. `like` is what it yields: numbers follow the order of its memory, as eager's do."""

    key: torch.Tensor
    number: int  # of the op, in the order of the captured step
    like: torch.Tensor
    first: int = 0  # of the words in use

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def wide(self) -> torch.dtype:
        """The type to compute in."""
        return torch.float64 if self.dtype in (torch.float64, torch.complex128) else torch.float32

    def word(self, i: int, size: Sequence[int] | None = None) -> torch.Tensor:
        """32 bits for each element; words with different `i` are independent."""
        stream = self.number * keys.WORDS + self.first + i
        if size is not None or self.like.is_contiguous():
            return bits.op(self.key, stream, list(self.like.shape if size is None else size))
        order = sorted(range(self.like.dim()), key=self.like.stride().__getitem__, reverse=True)
        drawn = bits.op(self.key, stream, [self.like.shape[d] for d in order])
        return drawn.permute([order.index(d) for d in range(len(order))])


def unsigned(word: torch.Tensor) -> torch.Tensor:
    return word.to(torch.int64) & LOW32


def below_one(d: Draw, dtype: torch.dtype, size: Sequence[int] | None = None) -> torch.Tensor:
    """Uniform on [0, 1), in steps of the type's precision at 1."""
    digits = MANTISSA[dtype]
    if digits <= 32:
        top = torch.bitwise_right_shift(d.word(0, size), 32 - digits)
        return (top & ((1 << digits) - 1)).to(dtype) * 2.0**-digits
    high = torch.bitwise_left_shift(unsigned(d.word(0, size)), digits - 32)
    return (high | (d.word(1, size) & ((1 << (digits - 32)) - 1))).to(dtype) * 2.0**-digits


def above_zero(d: Draw, dtype: torch.dtype, size: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform on (0, 1], precise near 0; and a word whose sign is independent of it."""
    word = d.word(0, size)
    if dtype is not torch.float64:
        return ((word & LOW31).to(dtype) + 0.5) * 2.0**-31, word
    fine = torch.bitwise_left_shift((word & 0x1FFFFF).to(torch.int64), 32) | unsigned(d.word(1, size))
    return (fine.to(dtype) + 0.5) * 2.0**-53, word


def standard_normal(d: Draw, dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """Box and Muller: a radius and an angle."""
    radius, _ = above_zero(replace(d, first=first), dtype)
    angle = d.word(first + 2).to(dtype) * (math.pi * 2.0**-31)
    return (radius.log() * -2).sqrt() * angle.cos()


def scaled(x: torch.Tensor, scale: Any, start: Any) -> torch.Tensor:
    """`x * scale + start`, without what changes nothing."""
    x = x if isinstance(scale, (int, float)) and scale == 1 else x * scale
    return x if isinstance(start, (int, float)) and start == 0 else x + start


def standard_exponential(d: Draw, dtype: torch.dtype, size: Sequence[int] | None = None) -> torch.Tensor:
    """Positive: never 0."""
    u, _ = above_zero(d, dtype, size)
    return -u.clamp(max=1 - 2.0 ** -MANTISSA[dtype]).log()


def word64(d: Draw, size: Sequence[int] | None = None) -> torch.Tensor:
    return torch.bitwise_left_shift(d.word(0, size).to(torch.int64), 32) | unsigned(d.word(1, size))


def integers(d: Draw, low: Any, high: Any) -> torch.Tensor:
    """Integers on [low, high): the upper half of the product of random bits and their number. 32 bits for up to 2^16, which is a bias of 2^-16 of
    a probability at most; else 64, whose product is made of halves."""
    count = high - low
    if isinstance(count, int) and not 0 < count <= 1 << 63:
        raise ValueError(f"there are no integers to draw, or too many: from {low} to below {high}")
    upper = unsigned(d.word(0))
    if isinstance(count, int) and count <= 1 << 16:
        return torch.bitwise_right_shift(upper * count, 32) + low
    lower = unsigned(d.word(1))
    top, rest = count >> 32, count & LOW32
    middle = upper * rest + upper_half(lower * rest)
    chosen = upper_half(middle)
    if not isinstance(count, int) or top:
        chosen = upper * top + chosen + upper_half(lower * top + (middle & LOW32))
    return chosen + low


def upper_half(x: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of 64, as an unsigned number."""
    return torch.bitwise_right_shift(x, 32) & LOW32


# ---------------------------------------------------------------------------------------------- one function an op


def rand(d: Draw, a: Arguments) -> torch.Tensor:
    return below_one(d, d.dtype) if d.dtype in MANTISSA else below_one(d, d.wide).to(d.dtype)


def randn(d: Draw, a: Arguments) -> torch.Tensor:
    if d.dtype.is_complex:  # of variance 1, half of it in each part
        parts = [standard_normal(d, d.wide, first) * math.sqrt(0.5) for first in (0, 3)]
        return torch.complex(*parts).to(d.dtype)
    return standard_normal(d, d.wide).to(d.dtype)


def normal(d: Draw, a: Arguments) -> torch.Tensor:
    """Mean and deviation are numbers or tensors; `self` is a mean only where there's no other."""
    mean = a["mean"] if "mean" in a else a["self"]
    return scaled(standard_normal(d, d.wide), a["std"], mean).to(d.dtype)


def log_normal(d: Draw, a: Arguments) -> torch.Tensor:
    return scaled(standard_normal(d, d.wide), a["std"], a["mean"]).exp().to(d.dtype)


def uniform(d: Draw, a: Arguments) -> torch.Tensor:
    """On [from, to): what rounding brings to the upper end goes to the lower."""
    low, high = a["from"], a["to"]
    u = rand(d, a)
    if (low, high) == (0, 1):
        return u
    u = scaled(u, high - low, low)
    return torch.where(u < high, u, low)


def bernoulli(d: Draw, a: Arguments) -> torch.Tensor:
    p = a.get("p", a["self"])
    if isinstance(p, torch.Tensor):
        exact = torch.float64 if p.dtype is torch.float64 else torch.float32
        return (below_one(d, exact) < p).to(d.dtype)
    threshold = round(p * 2**32) - 2**31  # exact to 2^-33
    if threshold >= 2**31:
        return torch.ones_like(d.like)
    return (d.word(0) < threshold).to(d.dtype)


def exponential(d: Draw, a: Arguments) -> torch.Tensor:
    return scaled(standard_exponential(d, d.wide), 1 / a["lambd"], 0).to(d.dtype)


def geometric(d: Draw, a: Arguments) -> torch.Tensor:
    """Trials until the first success."""
    u, _ = above_zero(d, torch.float64 if d.dtype is torch.float64 else torch.float32)
    return (u.log() / math.log1p(-a["p"]) if a["p"] < 1 else u).ceil().clamp(min=1).to(d.dtype)


def cauchy(d: Draw, a: Arguments) -> torch.Tensor:
    u, word = above_zero(d, d.wide)
    far = (u * (math.pi / 2)).tan().reciprocal()
    return scaled(torch.where(word < 0, -far, far), a["sigma"], a["median"]).to(d.dtype)


def randint(d: Draw, a: Arguments) -> torch.Tensor:
    return integers(d, a.get("low", 0), a["high"]).to(d.dtype)


def random(d: Draw, a: Arguments) -> torch.Tensor:
    """`random_`: without bounds, all integers that the type holds exactly, from 0."""
    low, high = a.get("from", 0), a.get("to")
    if high is None:
        digits = MANTISSA.get(d.dtype)
        top = 1 if d.dtype is torch.bool else 1 << digits if digits else torch.iinfo(d.dtype).max
        if low < 0:  # all of them
            return word64(d)
        high = top + 1
    return integers(d, low, high).to(d.dtype)


def randperm(d: Draw, a: Arguments) -> torch.Tensor:
    return word64(d).argsort().to(d.dtype)


def multinomial(d: Draw, a: Arguments) -> torch.Tensor:
    """Without replacement: the first to arrive in a race of exponentials. With it: the inverse of the cumulative sum."""
    p, count = a["self"], a["num_samples"]
    if count == 1 or not a["replacement"]:
        exact = torch.float64 if p.dtype is torch.float64 else torch.float32
        speed = p.to(exact) / standard_exponential(d, exact, p.shape)
        return speed.argmax(-1, keepdim=True) if count == 1 else speed.topk(count, -1).indices
    sums = p.to(torch.float64).cumsum(-1)
    total = sums[..., -1:]
    u = below_one(d, torch.float64, d.like.shape) * total
    u = torch.minimum(u, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, u, right=True)


def rrelu(d: Draw, a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """A random slope for what isn't positive; the noise says which."""
    x = a["self"]
    slope = uniform(d, {"from": a["lower"], "to": a["upper"]})
    noise = torch.where(x <= 0, slope, 1.0)
    return x * noise, noise


DRAWS: dict[str, Callable[[Draw, Arguments], Any]] = {
    "rand": rand,
    "randn": randn,
    "normal": normal,
    "normal_functional": normal,
    "log_normal": log_normal,
    "uniform": uniform,
    "bernoulli": bernoulli,
    "exponential": exponential,
    "geometric": geometric,
    "cauchy": cauchy,
    "randint": randint,
    "randint_like": randint,
    "random": random,
    "randperm": randperm,
    "multinomial": multinomial,
    "rrelu_with_noise_functional": rrelu,
}
