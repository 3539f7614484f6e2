"""Layouts: what they mean, their canonical names, and the way of a shard through a reshape."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd.sharding.layout import (
    Partial,
    R,
    RankInt,
    Sharded,
    bounds,
    join,
    local_shape,
    padded_shape,
    shard,
    state_shard,
    take,
)
from spmd.sharding.rule import ViewRule

WORLDS = st.integers(1, 5)
FACTORS = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3))


@given(FACTORS, WORLDS, st.integers(0, 2))
def test_join_inverts_take(factors: tuple[int, int, int], world: int, dim: int) -> None:
    layout = Sharded(dim, *factors)
    shape = [2, 2, 2]
    shape[dim] = layout.size
    whole = torch.randn(shape)
    parts = [take(whole, layout, world, r) for r in range(world)]
    assert torch.equal(join(parts, layout), whole)
    for r, part in enumerate(parts):
        assert tuple(part.shape) == local_shape(shape, layout, world, r)
        assert all(a <= b for a, b in zip(part.shape, padded_shape(shape, layout, world), strict=True))


@given(FACTORS, WORLDS)
def test_canonical_names_the_same_parts(factors: tuple[int, int, int], world: int) -> None:
    layout = Sharded(0, *factors)
    whole = torch.arange(layout.size)
    for r in range(world):
        assert torch.equal(take(whole, layout, world, r), take(whole, layout.canonical(world), world, r))


@given(FACTORS, FACTORS, WORLDS)
def test_equal_parts_have_equal_names(a: tuple[int, int, int], b: tuple[int, int, int], world: int) -> None:
    one, two = Sharded(0, *a), Sharded(0, *b)
    if one.size != two.size or one.outer != two.outer:
        return
    whole = torch.arange(one.size)
    same = all(torch.equal(take(whole, one, world, r), take(whole, two, world, r)) for r in range(world))
    if same and world > 1 and one.n > 1 and two.n > 1 and bounds(one.n, world, 1)[1] > bounds(one.n, world, 1)[0]:
        assert one.canonical(world) == two.canonical(world)


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3), st.data(), st.integers(2, 4))
def test_reshape_moves_the_shard_it_says(source: list[int], data: st.DataObject, world: int) -> None:
    """Reshaping each part by the local shape gives the parts of the reshaped whole; where a rule exists, none is missed by brute force."""
    total = math.prod(source)
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    first = data.draw(st.sampled_from(divisors))
    second = data.draw(st.sampled_from([n for n in divisors if (total // first) % n == 0]))
    result = [first, second, total // first // second]
    dim = data.draw(st.integers(0, len(source) - 1))
    layout = shard(dim, source[dim])
    rule = ViewRule((tuple(range(len(source))),), ((0, 1, 2),), source=tuple(source), result=tuple(result))
    found = rule.transfer(0, layout, world)
    whole = torch.arange(total).reshape(source)
    parts = [take(whole, layout, world, r) for r in range(world)]
    if found is None:
        assert not any(describes(parts, candidate, whole.reshape(result), world) for candidate in every_shard(result))
        return
    (out,) = found[1]
    assert isinstance(out, Sharded)
    assert describes(parts, out, whole.reshape(result), world)


def describes(parts: list[torch.Tensor], layout: Sharded, whole: torch.Tensor, world: int) -> bool:
    return all(torch.equal(parts[r].reshape(-1), take(whole, layout, world, r).reshape(-1)) for r in range(world))


def every_shard(shape: list[int]) -> list[Sharded]:
    found = []
    for d, size in enumerate(shape):
        for outer, n in itertools.product(range(1, size + 1), repeat=2):
            if size % (outer * n) == 0:
                found.append(Sharded(d, outer, n, size // outer // n))
    return found


def test_state_lies_on_the_first_dim_with_a_row_for_each_rank() -> None:
    assert state_shard((8, 3), 4) == shard(0, 8)
    assert state_shard((3, 8), 4) == shard(1, 8)
    assert state_shard((3, 3), 4) == R
    assert state_shard((), 4) == R
    assert state_shard((0, 8), 4) == R


def test_a_partial_is_counted_once() -> None:
    whole = torch.randn(3)
    for op in ("sum", "max", "min"):
        assert torch.equal(join([take(whole, Partial(op), 3, r) for r in range(3)], Partial(op)), whole)


def test_rank_dependent_sizes_read_the_same_everywhere() -> None:
    sizes = [local_shape((7,), shard(0, 7), 3, r)[0] for r in range(3)]
    assert sizes == [3, 3, 1]
    assert {s.formula for s in sizes if isinstance(s, RankInt)} == {"chunk(7)"}
