"""The bits that counter-based numbers are made of: their definition, their parts, and statistics that a weak mix doesn't pass.

Seeds are fixed and each statistic is a z-score: its distance from what independent fair bits give, in standard deviations of theirs. A few thousand
are looked at, so 6 is far outside of chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd._torch import make_fx
from spmd.counter import bits, keys
from spmd.debug import run_lockstep
from spmd.graph.axis import Axis
from spmd.graph.step import Input, Output, Role, StepGraph
from spmd.sharding.layout import R, Sharded, join
from spmd.sharding.partition import partition
from spmd.sharding.plan import Choice, Plan
from spmd.sharding.rule import Call
from spmd.sharding.table import TABLE

N = 1 << 20
LIMIT = 6.0


def draw(n: int = N, seed: int = 1, step: int = 0, stream: int = 0, offset: int = 0) -> Tensor:
    """The words of a stream as integers from 0 to 2^32 - 1."""
    key = torch.tensor(keys.key_of(seed, step))
    return bits.op(key, stream, [n], [1], offset).to(torch.int64) & 0xFFFFFFFF


# ---- what the op computes


def whole(size: list[int], stream: int = 3) -> Tensor:
    return bits.op(torch.tensor(keys.key_of(7, 2)), stream, size)


def defined(size: list[int], stride: list[int], offset: int) -> Tensor:
    key = keys.streamed(torch.tensor(keys.key_of(7, 2)), 3)
    return bits.elementwise(key, size, stride, offset)


PAGE = 1 << 32
PARTS: list[tuple[list[int], list[int], int]] = [
    ([3, 5, 7], [35, 7, 1], 0),
    ([], [], 0),
    ([], [], 5),
    ([0, 3], [3, 1], 0),
    ([200_000], [1], 9),
    ([70_000, 3], [5, 1], 2),  # short runs
    ([3, 70_000], [80_000, 1], 17),  # long ones
    ([6, 3, 4], [40, 4, 1], 8),
    ([2, 3, 2, 5], [600, 100, 20, 2], 1),  # nothing is consecutive
    ([5, 3], [1 << 31, 1], 7),  # beyond 2^32
    ([10], [1], PAGE - 4),
    ([200_000], [1], PAGE - 100_000),
    ([3, 2], [1, 1 << 33], 5 * PAGE),
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("threads", (1, 3))
def test_blocks_give_what_the_definition_gives(part: tuple[list[int], list[int], int], threads: int) -> None:
    """By numpy on one thread, by torch on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(bits.op(torch.tensor(keys.key_of(7, 2)), 3, *part), defined(*part))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when Inductor is imported
def test_inductor_gives_what_the_definition_gives() -> None:
    """In one kernel; also where signed products overflow, and beyond 2^32."""
    fused = torch.compile(bits.elementwise, dynamic=True)
    key = keys.streamed(torch.tensor(keys.key_of(7, 2)), 3)
    for part in (PARTS[0], PARTS[7], PARTS[10]):
        assert torch.equal(fused(key, *part), defined(*part))


def test_a_word_is_that_of_its_position() -> None:
    """Known values, so that a change of the mix, which changes every run, can't go unseen; and parts are parts of the whole."""
    assert whole([4]).tolist() == [241984515, -1310411193, 1421984035, 346523014]
    x = whole([6, 10, 4])
    assert torch.equal(bits.op(torch.tensor(keys.key_of(7, 2)), 3, [6, 3, 4], [40, 4, 1], 8), x[:, 2:5])
    assert torch.equal(whole([240]), x.flatten())


@st.composite
def shards(choose: st.DrawFn) -> tuple[list[int], list[int] | None, int, Sharded, int]:
    """Size, stride and offset of what is drawn, which may be another axis's part of something; its layout, the ranks."""
    outer, n, inner = (choose(st.integers(1, high)) for high in (3, 7, 3))
    size = choose(st.lists(st.integers(1, 4), max_size=3))
    dim = choose(st.integers(0, len(size)))
    size.insert(dim, outer * n * inner)
    stride = choose(st.none() | st.lists(st.integers(1, 50), min_size=len(size), max_size=len(size)))
    return size, stride, choose(st.integers(0, 20)), Sharded(dim, outer, n, inner), choose(st.integers(2, 5))


@given(shards())
@settings(max_examples=60, deadline=None)
def test_ranks_draw_their_parts_of_any_layout(case: tuple[list[int], list[int] | None, int, Sharded, int]) -> None:
    """Also uneven, empty and strided ones; the program is the same on every rank."""
    size, stride, offset, layout, world = case
    key = torch.tensor(keys.key_of(7, 2))
    module = make_fx(lambda k: bits.op(k, 3, size, stride, offset), tracing_mode="fake")(key)
    module.graph.output_node().args = (tuple(module.graph.output_node().args),)
    step = StepGraph(module, (Input(Role.RANDOM, "key"),), (Output(Role.USER, "y"),))
    (placeholder,), (node,) = step.placeholders, step.results
    call = Call(node)
    plan = Plan(world, 1, {placeholder: R, node: layout}, outputs=[layout])
    plan.choices[node] = Choice(call, TABLE["spmd::random_bits"](call), [None], [layout])
    graphs = [partition(step, plan, Axis(world, r, "0")) for r in range(world)]
    parts = [out[0] for out in run_lockstep(graphs, [[key]] * world)]
    assert torch.equal(join(parts, layout), bits.op(key, 3, size, stride, offset))


# ---- statistics


def score(found: Tensor | float, mean: float, deviation: float) -> float:
    return float(((torch.as_tensor(found, dtype=torch.float64) - mean) / deviation).abs().max())


def flips(a: Tensor, b: Tensor) -> Tensor:
    """How often each of the 32 bits differs."""
    both = (a ^ b).numpy().astype("<u4")
    return torch.from_numpy(np.unpackbits(both.view(np.uint8)).reshape(len(both), 32).sum(0, dtype=np.int64))


def differ(a: Tensor, b: Tensor) -> float:
    """Independent words differ in half of their bits, each of them."""
    return score(flips(a, b), len(a) / 2, math.sqrt(len(a)) / 2)


def uniform(cells: Tensor, count: int) -> float:
    """Chi-square over `count` cells."""
    expected = len(cells) / count
    chi = ((torch.bincount(cells, minlength=count) - expected) ** 2 / expected).sum()
    return score(chi, count - 1, math.sqrt(2 * (count - 1)))


def correlation(a: Tensor, b: Tensor) -> float:
    x, y = (v.to(torch.float64) / 2**32 - 0.5 for v in (a, b))
    return score((x * y).mean() * 12, 0, 1 / math.sqrt(len(a)))


Battery = Callable[[], Iterator[float]]


def one_stream() -> Iterator[float]:
    """Moments, bits and cells of a stream by itself."""
    w = draw()
    u = w.to(torch.float64) / 2**32
    yield score(u.mean(), 0.5, math.sqrt(1 / 12 / N))
    yield score(u.var(), 1 / 12, math.sqrt(1 / 180 / N))
    yield differ(w, torch.zeros_like(w))
    for shift in (0, 8, 16, 24):
        yield uniform(w >> shift & 255, 256)


def neighbours() -> Iterator[float]:
    """Elements beside each other, a row apart, or a block apart."""
    w = draw()
    for lag in (1, 2, 3, 64, 4096, 1 << 16):
        a, b = w[:-lag], w[lag:]
        yield correlation(a, b)
        yield differ(a, b)
        yield uniform((a >> 26 << 6) | b >> 26, 1 << 12)
        yield uniform(((a & 63) << 6) | b & 63, 1 << 12)
    yield uniform(((w[:-2] >> 28 << 8) | (w[1:-1] >> 28 << 4) | w[2:] >> 28), 1 << 12)


def avalanche() -> Iterator[float]:
    """One bit of the position, of the seed, the step or the stream, and all bits of the result are new."""
    n = 1 << 16
    place = torch.arange(n)
    for bit in range(16):
        w = draw(n)
        yield differ(w, w[place ^ (1 << bit)])
    for bit in range(16, 40):
        yield differ(draw(n), draw(n, offset=1 << bit))
    for bit in range(0, 60, 3):
        yield differ(draw(n, seed=1), draw(n, seed=1 ^ (1 << bit)))
        yield differ(draw(n, step=1), draw(n, step=1 ^ (1 << bit)))
    for bit in range(20):
        yield differ(draw(n, stream=1), draw(n, stream=1 ^ (1 << bit)))


def streams() -> Iterator[float]:
    """The same element in successive streams, steps and seeds."""
    n = 1 << 16
    for first in (
        [draw(n, stream=s) for s in range(8)],
        [draw(n, step=s) for s in range(8)],
        [draw(n, seed=s) for s in range(8)],
    ):
        for i, a in enumerate(first):
            for b in first[:i]:
                yield correlation(a, b)
                yield differ(a, b)
    across = torch.stack([draw(16, stream=s) for s in range(1 << 12)]).flatten()  # few elements, many streams
    yield differ(across, torch.zeros_like(across))
    yield uniform(across >> 24, 256)


def aligned() -> Iterator[float]:
    """Streams whose first keys bring their positions together: only the second round sets them apart."""
    n = 1 << 16
    place = torch.arange(n)
    for other in range(1, 9):
        one, two = (keys.words(keys.streamed(keys.key_of(1, 0), s)) for s in (0, other))
        a, b = place.to(torch.int32), (place ^ one[0] ^ two[0]).to(torch.int32)
        bits.scramble(a, one)
        bits.scramble(b, two)
        yield differ(a.long() & 0xFFFFFFFF, b.long() & 0xFFFFFFFF)
        yield correlation(a.long() & 0xFFFFFFFF, b.long() & 0xFFFFFFFF)


def birthdays() -> Iterator[float]:
    """Elements that agree in 24 bits, and in 32 of a pair of words: as many as chance has."""
    n = 1 << 16
    for stream in range(8):
        for value in (draw(n, stream=stream) >> 8, (draw(n, stream=stream) ^ draw(n, stream=99)) & 0xFFFFFF):
            expected = n * n / 2**25
            yield score(float(n - len(value.unique())), expected, math.sqrt(expected))


BATTERIES: list[Battery] = [one_stream, neighbours, avalanche, streams, aligned, birthdays]


@pytest.mark.parametrize("battery", BATTERIES)
def test_words_are_like_independent_fair_bits(battery: Battery) -> None:
    assert max(battery()) < LIMIT


(A, M, B, K, C), (D, P, E, Q, F) = bits.ROUNDS
WEAK = {
    "one multiplication": (((A, M, B, 1, C), (D, 1, E, 1, F)), neighbours),
    "two multiplications": (((A, M, B, 1, C), (D, P, E, 1, F)), neighbours),
    "three multiplications": (((A, M, B, K, C), (D, P, E, 1, F)), aligned),
    "no second round": (((A, M, B, K, C), (31, 1, 31, 1, 31)), aligned),
}


@pytest.mark.parametrize("name", WEAK)
def test_a_weaker_mix_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, battery = WEAK[name]
    monkeypatch.setattr(bits, "ROUNDS", rounds)
    assert max(battery()) > 2 * LIMIT
