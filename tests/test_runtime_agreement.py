"""Votes, comparisons, digests and random states on real ranks."""

import os
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd.errors import AgreementError
from spmd.runtime.agreement import Agreement
from spmd.runtime.digest import prefix_digests, tensor_digest, text_digest
from spmd.runtime.random import Draws
from spmd.runtime.world import World as Ranks
from tests.oracle.world import World


def _error(use: Any) -> str:
    with pytest.raises(AgreementError) as caught:
        use()
    return str(caught.value)


# ---- digests


def test_a_digest_sees_every_bit_shape_and_type() -> None:
    base = torch.arange(11, dtype=torch.float32).reshape(1, 11)
    same = [base.clone(), torch.stack([base, base], -1)[..., 0], torch.cat([base, base])[1:]]
    assert {tensor_digest(x) for x in same} == {tensor_digest(base)}
    other = [
        base.T,
        base.to(torch.int32),
        base.flip(1),
        torch.zeros(1, 11),
        torch.full((1, 11), -0.0),
        base[:, :10],
        torch.empty(0),
        torch.tensor(0.0),
    ]
    for place in range(11):
        changed = base.clone()
        changed.view(torch.int32)[0, place] ^= 1 << (3 * place % 31)
        other.append(changed)
    assert len({tensor_digest(x) for x in (base, *other)}) == len(other) + 1
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        x = torch.ones(3, 3).to(dtype)
        assert tensor_digest(x[1:]) == tensor_digest(x[1:].clone())  # an offset that isn't a whole word
    assert abs(tensor_digest(base)) < 2**62


def test_text_digests_of_prefixes() -> None:
    lines = ["a", "bc", ""]
    assert list(prefix_digests(lines)) == [text_digest(lines[: i + 1]) for i in range(3)]
    assert text_digest(["ab", "c"]) != text_digest(["a", "bc"])


# ---- votes and programs


def _votes() -> None:
    ranks = Ranks.of()
    pending = Agreement(ranks).begin([ranks.rank, 5, -ranks.rank, 2**61])
    votes = pending.wait()
    assert votes == pending.wait()
    assert votes.low == (0, 5, 1 - ranks.size, 2**61) and votes.high == (ranks.size - 1, 5, 0, 2**61)
    assert votes.agreed(1, 2) and votes.agreed(3) and votes.agreed() == (ranks.size == 1)
    assert Agreement(ranks).objects(ranks.rank) == list(range(ranks.size))
    assert ranks.mesh is None or Ranks.of() is ranks


@pytest.mark.parametrize("W", [1, 3])
def test_a_vote_gives_lowest_and_highest(world: World, W: int) -> None:
    world.run(_votes, W)


def _programs(case: str) -> str:
    agreement = Agreement(Ranks.of())
    lines = [f"node_{i} = op({i})" for i in range(40)]
    agreement.same_program(lines)
    if agreement.world.rank == 1:
        lines = {
            "first": ["other", *lines[1:]],
            "middle": [*lines[:23], "node_23 = other(7)", *lines[24:30]],
            "shorter": lines[:39],
            "empty": [],
        }[case]
    return _error(lambda: agreement.same_program(lines))


@pytest.mark.parametrize(("case", "node"), [("first", 0), ("middle", 23), ("shorter", 39), ("empty", 0)])
def test_the_first_differing_node_is_named_on_every_rank(world: World, case: str, node: int) -> None:
    texts = world.run(_programs, 3, case)
    assert len(set(texts)) == 1
    assert (
        f"node {node}:" in texts[0] and f"ranks 0, 2: node_{node} = op({node})" in texts[0] and "rank 1: " in texts[0]
    )


def _resolved() -> tuple[str, str]:
    agreement = Agreement(Ranks.of())
    agreement.resolve(None, "4 samples")
    keys = _error(lambda: agreement.resolve(None, f"{4 + agreement.world.rank // 2} samples"))
    error = ValueError("no such op") if agreement.world.rank == 1 else None
    try:
        agreement.resolve(error, "")
    except (ValueError, AgreementError) as caught:
        return keys, f"{type(caught).__name__} {caught}"
    raise AssertionError("it went on")


def test_one_ranks_error_stops_all_and_keys_are_listed_by_rank(world: World) -> None:
    results = world.run(_resolved, 3)
    assert all("ranks 0, 1: 4 samples" in keys and "rank 2: 5 samples" in keys for keys, _ in results)
    assert results[1][1] == "ValueError no such op"
    assert all(
        results[r][1].startswith("AgreementError") and "rank 1: ValueError: no such op" in results[r][1] for r in (0, 2)
    )


def _leaves() -> str:
    agreement = Agreement(Ranks.of())
    agreement.begin([1]).wait()
    if agreement.world.rank == 1:
        os._exit(0)
    return _error(lambda: agreement.begin([1]).wait())


def test_a_rank_that_has_gone_is_an_error_within_seconds(world: World) -> None:
    started = time.monotonic()
    results = world.run(_leaves, 3, catch=True, timeout=60)
    assert "got no answer" in results[0] and "got no answer" in results[2]
    assert time.monotonic() - started < 45


# ---- state


def _state() -> list[str]:
    agreement = Agreement(Ranks.of())
    rank = agreement.world.rank
    named: list[tuple[str, Tensor]] = [("same", torch.ones(3))]
    for dtype in (torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        named.append((f"differs {dtype}", (torch.arange(6).reshape(2, 3) * (rank + 1) % 4).to(dtype).t()))
    first = torch.arange(6).reshape(2, 3) % 4
    addresses = [x.data_ptr() for _, x in named]
    _error(lambda: agreement.same_state(named, "error"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert agreement.same_state(named) == [n for n, _ in named[1:]]
        assert agreement.same_state(named) == []
    assert all(torch.equal(x, first.to(x.dtype).t()) for _, x in named[1:]) and addresses == [
        x.data_ptr() for _, x in named
    ]
    assert "mask" in _error(lambda: agreement.same_inputs([("x", torch.ones(2)), ("mask", torch.tensor(float(rank)))]))
    agreement.same_inputs([("x", torch.ones(2))])
    return [str(w.message) for w in caught]


def test_states_that_differ_become_the_first_ranks(world: World) -> None:
    first, *others = world.run(_state, 3)
    assert others == [[], []] and len(first) == 1 and "differs torch.float64" in first[0] and "4 more" in first[0]


# ---- random states


def _step(draws: Draws, agreement: Agreement, fail: bool = False) -> Tensor:
    pending = agreement.begin(draws.ballot())
    with draws.around():
        draws.settle(pending.wait())
        numbers = torch.rand(3)
        if fail:
            raise KeyError
    return numbers


def _draws() -> tuple[list[Tensor], list[Tensor]]:
    """Numbers drawn in steps, and by the user between them."""
    agreement = Agreement(Ranks.of())
    draws, rank = Draws(agreement), agreement.world.rank
    inside, outside = [], []
    torch.manual_seed(7)
    inside += [_step(draws, agreement), _step(draws, agreement)]  # in one state: nothing to do
    outside.append(torch.rand(2))
    torch.manual_seed(100 + rank)
    for _ in range(2):  # the others' own numbers aren't touched
        inside.append(_step(draws, agreement))
        outside.append(torch.rand(2))
    with pytest.raises(KeyError):
        _step(draws, agreement, fail=True)
    torch.manual_seed(9)
    inside.append(_step(draws, agreement))
    outside.append(torch.rand(2))
    return inside, outside


def test_steps_draw_the_first_ranks_numbers(world: World) -> None:
    results = world.run(_draws, 3)
    for rank, (inside, outside) in enumerate(results):
        torch.manual_seed(7)
        expected = [torch.rand(3), torch.rand(3)]
        alone = [torch.rand(2)]
        torch.manual_seed(100)
        for _ in range(2):
            expected.append(torch.rand(3))
            if rank == 0:
                alone.append(torch.rand(2))
            else:
                torch.rand(2)
        if rank > 0:
            torch.manual_seed(100 + rank)
            alone += [torch.rand(2), torch.rand(2)]
        torch.manual_seed(9)
        expected.append(torch.rand(3))
        alone.append(torch.rand(2))
        assert all(map(torch.equal, inside, expected)), rank
        assert all(map(torch.equal, outside, alone)), rank


def _seeded() -> list[Tensor]:
    agreement = Agreement(Ranks.of())
    draws = Draws(agreement, seed=3)
    torch.manual_seed(agreement.world.rank)
    state = torch.get_rng_state()
    numbers = [_step(draws, agreement)]
    with pytest.raises(KeyError):
        _step(draws, agreement, fail=True)
    numbers.append(_step(draws, agreement))
    assert torch.equal(state, torch.get_rng_state())
    return numbers


@pytest.mark.parametrize("W", [1, 2])
def test_a_seed_gives_a_stream_of_its_own(world: World, W: int) -> None:
    generator = torch.Generator().manual_seed(3)
    expected = [torch.rand(3, generator=generator) for _ in range(2)]
    for numbers in world.run(_seeded, W):
        assert all(map(torch.equal, numbers, expected))
