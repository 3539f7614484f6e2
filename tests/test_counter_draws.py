"""Distributions made of bits: each has the law of the op it stands for. Seeds are fixed; scores are in standard deviations of chance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd.counter.draws import DRAWS, Draw, above_zero
from spmd.counter.keys import key_of

N = 1 << 18
LIMIT = 5.0
REALS = (torch.float64, torch.float32)
Law = Callable[[Tensor], Tensor]


def draw(name: str, dtype: torch.dtype = torch.float32, size: tuple[int, ...] = (N,), number: int = 0, **a: Any) -> Any:
    key = torch.tensor(key_of(11, 4))
    return DRAWS[name](Draw(key, number, torch.empty(size, dtype=dtype)), {"self": None, **a})


def distance(x: Tensor, law: Law) -> float:
    """Kolmogorov and Smirnov: sqrt(N) times the largest distance from the distribution function. Above 2.5 once in 100,000 times."""
    at = law(x.to(torch.float64).sort().values)
    n = len(at)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((at - steps[:-1]).max(), (steps[1:] - at).max()) * math.sqrt(n))


def counts(x: Tensor, expected: Tensor) -> float:
    """Chi-square of integers from 0 against the probability of each, as a score."""
    mean = expected.to(torch.float64) * x.numel()
    found = torch.bincount(x.flatten().to(torch.int64), minlength=len(mean))
    assert len(found) == len(mean)
    return float((((found - mean) ** 2 / mean).sum() - (len(mean) - 1)) / math.sqrt(2 * (len(mean) - 1)))


def normal(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


LAWS: dict[str, tuple[dict[str, Any], Law]] = {
    "rand": ({}, lambda x: x),
    "uniform": ({"from": -2.0, "to": 3.0}, lambda x: (x + 2) / 5),
    "randn": ({}, normal),
    "normal": ({"mean": 1.0, "std": 3.0}, lambda x: normal((x - 1) / 3)),
    "normal_functional": ({"mean": 0.0, "std": 1.0}, normal),
    "log_normal": ({"mean": 1.0, "std": 0.5}, lambda x: normal((x.log() - 1) / 0.5)),
    "exponential": ({"lambd": 2.0}, lambda x: 1 - (-2 * x).exp()),
    "cauchy": ({"median": 1.0, "sigma": 2.0}, lambda x: ((x - 1) / 2).atan() / math.pi + 0.5),
}


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("name", LAWS)
def test_reals_have_their_law(name: str, dtype: torch.dtype) -> None:
    arguments, law = LAWS[name]
    x = draw(name, dtype, **arguments)
    assert x.dtype == dtype and bool(x.isfinite().all())
    assert distance(x, law) < 2.5
    u = law(x.double()) - 0.5
    assert abs(float((u[1:] * u[:-1]).mean())) * 12 * math.sqrt(N) < LIMIT  # neighbours are independent


@pytest.mark.parametrize("name", ("rand", "randn", "exponential"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_halves_too(name: str, dtype: torch.dtype) -> None:
    """To their precision: the mean is that of exact numbers rounded."""
    x = draw(name, dtype, **LAWS[name][0])
    assert x.dtype == dtype and bool(x.isfinite().all())
    mean, deviation = {"rand": (0.5, 12**-0.5), "randn": (0, 1), "exponential": (0.5, 0.5)}[name]
    bias = 2.0**-8 if name == "rand" else 0.0  # below_one rounds down
    assert abs(float(x.double().mean()) - mean) < LIMIT * deviation / math.sqrt(N) + bias
    assert name != "rand" or float(x.max()) < 1


def test_uniform_numbers_stay_below_the_upper_end() -> None:
    """In every type: the largest word gives the largest number below 1; scaling rounds no number up to `to`."""
    for dtype, digits in ((torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)):
        top = DRAWS["rand"](AllOnes(torch.tensor(0), 0, torch.empty(3, dtype=dtype)), {})
        assert top.dtype == dtype and (top.double() == 1 - 2.0**-digits).all()
    x = DRAWS["uniform"](AllOnes(torch.tensor(0), 0, torch.empty(3)), {"from": 1000.0, "to": 1000.001})
    assert (x < 1000.001).all() and (x >= 1000).all()


class AllOnes(Draw):
    def word(self, i: int, size: Any = None) -> Tensor:
        return torch.full(list(self.like.shape), -1, dtype=torch.int32)


class Zeros(Draw):
    def word(self, i: int, size: Any = None) -> Tensor:
        return torch.zeros(list(self.like.shape), dtype=torch.int32)


def test_tails_reach_far() -> None:
    """The word 0 is the rarest number: 2^-32 or 2^-54. The word of all ones is as far on the other side, and finite."""
    for dtype, least in ((torch.float32, 2.0**-32), (torch.float64, 2.0**-54)):
        d = Zeros(torch.tensor(0), 0, torch.empty(1, dtype=dtype))
        assert float(above_zero(d, dtype)[0]) == least
        assert float(DRAWS["randn"](d, {})) == pytest.approx(math.sqrt(-2 * math.log(least)), rel=1e-6)
        far = AllOnes(torch.tensor(0), 0, torch.empty(1, dtype=dtype))
        for name, arguments in (
            ("exponential", {"lambd": 1.0}),
            ("geometric", {"p": 0.5}),
            ("log_normal", {"mean": 0.0, "std": 1.0}),
        ):
            x = DRAWS[name](far, arguments)
            assert bool(x.isfinite().all()) and float(x) > 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64))
def test_bernoulli(dtype: torch.dtype) -> None:
    for p in (0.0, 0.1, 0.5, 1 - 1e-6, 1.0):
        for arguments in ({"p": p}, {"p": torch.full((N,), p, dtype=torch.float64)}):
            x = draw("bernoulli", dtype, **arguments)
            assert x.dtype == dtype
            assert abs(float(x.double().mean()) - p) <= LIMIT * math.sqrt(p * (1 - p) / N)
    chances = torch.rand(N, generator=torch.Generator().manual_seed(0))
    x = draw("bernoulli", dtype, self=chances).double()
    assert abs(float((x - chances).mean())) < LIMIT * math.sqrt(1 / 6 / N)


def test_geometric() -> None:
    p, most = 0.3, 20
    x = draw("geometric", p=p).clamp(max=most)
    each = p * (1 - p) ** torch.arange(most - 1, dtype=torch.float64)
    assert abs(counts(x - 1, torch.cat([each, 1 - each.sum(0, keepdim=True)]))) < LIMIT
    assert (draw("geometric", p=1.0) == 1).all()


@pytest.mark.parametrize("low, high", ((0, 2), (-3, 4), (0, 768), (5, 6), (0, 768 << 8), (10, 10 + 3 * (1 << 29))))
def test_integers_are_even(low: int, high: int) -> None:
    x = draw("randint", torch.int64, low=low, high=high)
    assert low <= int(x.min()) and int(x.max()) < high
    cells = min(high - low, 768)
    if cells > 1:
        assert abs(counts((x - low) * cells // (high - low), torch.full((cells,), 1 / cells))) < LIMIT


def test_integers_of_any_range() -> None:
    for low, high in ((0, 1 << 40), (-(1 << 62), 1 << 61), (0, 1 << 63)):
        x = draw("randint", torch.int64, low=low, high=high)
        u = (x.double() - low) / (high - low)
        assert float(u.min()) >= 0 and float(u.max()) <= 1 and distance(u, lambda v: v) < 2.5
    with pytest.raises(ValueError, match="no integers"):
        draw("randint", torch.int64, low=3, high=3)
    for dtype, top in (
        (torch.float32, 1 << 24),
        (torch.int16, (1 << 15) - 1),
        (torch.bool, 1),
        (torch.int64, (1 << 63) - 1),
    ):
        x = draw("random", dtype).double() / top
        assert float(x.min()) >= 0 and float(x.max()) <= 1 and abs(float(x.mean()) - 0.5) < LIMIT * 0.5 / math.sqrt(N)
    assert 0.49 < float((draw("random", torch.int64, **{"from": -(1 << 63), "to": None}) < 0).double().mean()) < 0.51


def test_permutations() -> None:
    """Permutations, in which each element comes everywhere."""
    assert draw("randperm", torch.int64, (1000,)).sort().values.equal(torch.arange(1000))
    many = torch.stack([draw("randperm", torch.int64, (4,), number=i) for i in range(1024)])
    index = (many * torch.tensor([64, 16, 4, 1])).sum(1)
    _, found = index.unique(return_counts=True)
    assert len(found) == 24
    assert abs(float(((found - 1024 / 24) ** 2 / (1024 / 24)).sum() - 23) / math.sqrt(46)) < LIMIT


@pytest.mark.parametrize("dtype", REALS)
def test_multinomial(dtype: torch.dtype) -> None:
    p = torch.tensor([1.0, 0.0, 2.0, 5.0], dtype=dtype)
    law = torch.tensor([1 / 8, 2 / 8, 5 / 8])
    rows = p.expand(1 << 16, 4)
    pick = torch.tensor([0, -1, 1, 2])  # 1 never comes
    for replacement, count in ((False, 1), (True, 1), (True, 3), (False, 2)):
        x = draw("multinomial", torch.int64, (1 << 16, count), self=rows, num_samples=count, replacement=replacement)
        assert x.shape == (1 << 16, count) and x.dtype == torch.int64
        assert not (x == 1).any()
        assert abs(counts(pick[x[:, 0]], law)) < LIMIT
        if replacement and count > 1:
            assert abs(counts(pick[x[:, 1]] * 3 + pick[x[:, 2]], (law[:, None] * law).flatten())) < LIMIT
    first, second = pick[x].unbind(1)  # without replacement
    chance = law[:, None] * law / (1 - law[:, None])
    assert (first != second).all()
    off = ~torch.eye(3, dtype=torch.bool)
    places = torch.zeros(9, dtype=torch.int64)
    places[off.flatten()] = torch.arange(6)
    assert abs(counts(places[first * 3 + second], chance[off])) < LIMIT


def test_normals_of_tensors_and_complex_ones() -> None:
    mean, std = torch.arange(N) % 7, torch.arange(N) % 3 + 1.0
    x = draw("normal", mean=mean.float(), std=std)
    assert distance((x - mean) / std, normal) < 2.5
    x = draw("normal", self=mean.float(), std=2.0)  # normal.Tensor_float calls its mean so
    assert distance((x - mean) / 2, normal) < 2.5
    z = draw("randn", torch.complex64)
    for part in (z.real, z.imag):
        assert distance(part * math.sqrt(2), normal) < 2.5
    assert abs(float((z.real * z.imag).mean())) * 2 * math.sqrt(N) < LIMIT


def test_rrelu() -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    y, noise = draw("rrelu_with_noise_functional", self=x, lower=0.1, upper=0.4)
    below = x <= 0
    assert (y == x * noise).all() and (noise[~below] == 1).all()
    assert distance(noise[below], lambda v: (v - 0.1) / 0.3) < 2.5


def test_draws_of_one_step_are_independent() -> None:
    """The same op twice, two words of one, and ops of successive numbers."""
    draws = [draw("randn", number=i) for i in range(4)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(float((a * b).mean())) * math.sqrt(N) < LIMIT
            assert abs(float((a.abs() * b.abs()).mean()) - 2 / math.pi) * math.sqrt(N) < LIMIT
