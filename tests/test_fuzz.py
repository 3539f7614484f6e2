"""Random train steps equal the plain ones: all ranks in this process, and some on real ranks. What fails is kept in test_regressions.py.

A longer search: `python -m tests.fuzz --examples 500 --seed 7`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from spmd.sharding import categories
from spmd.sharding.rule import Call, Rule
from spmd.sharding.table import TABLE
from tests.fuzz.check import check
from tests.fuzz.program import Do, Program, do
from tests.fuzz.strategies import SHAPES, Sketch, programs
from tests.fuzz.vocabulary import OPS
from tests.fuzz.world import check_here
from tests.oracle.world import World

LINEAR = do("linear", 0, out=4, bias=True)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns of what random programs do: statistics of one element, pools of odd sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def search(examples: int, first: int, longest: int = 7) -> None:
    """Checks random programs; all failures at once."""
    failures = []

    @seed(first)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(longest))
    def each(program: Program) -> None:
        finding = check(program)
        if finding.failed:
            failures.append(f"{program!r}\n{finding.kind}: {finding.detail}")

    each()
    assert not failures, "\n\n".join(failures)


def test_random_steps() -> None:
    search(8, first=1, longest=3)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 110))
def test_many_random_steps(first: int) -> None:
    search(50, first)


def drawn(count: int, first: int) -> list[Program]:
    found: list[Program] = []

    @seed(first)
    @settings(max_examples=4 * count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    return found[-count:]


def on_ranks(world: World, count: int, first: int) -> None:
    for program in drawn(count, first):
        if len(program.mesh) == 1 and check(program).kind == "equal":
            world.run(check_here, program.world, program)


def test_random_steps_on_ranks(world: World) -> None:
    on_ranks(world, 2, first=2)


@pytest.mark.slow
def test_many_random_steps_on_ranks(world: World) -> None:
    on_ranks(world, 60, first=3)


# ---- the fuzzer itself


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(call: Call) -> Rule | None:
        """Means of the shards' means, as if the shards were alike."""
        return categories.labelled(
            [list(range(len(call.inputs[0])))], [[]], reduce=dict.fromkeys(range(len(call.inputs[0])), "max")
        )

    program = Program((4,), (LINEAR,), loss="squares")
    assert check(program).kind == "equal"
    monkeypatch.setitem(TABLE, "mean", wrong)
    assert check(program).kind == "wrong"


def test_programs_print_as_code() -> None:
    for program in drawn(5, first=4):
        assert eval(repr(program), {"Program": Program, "do": do, "inf": float("inf")}) == program


def test_every_word_has_a_use() -> None:
    """Each word runs on a sample of some shape, or on two."""
    used: set[str] = set()

    @seed(1)
    @settings(max_examples=3, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def each(data: st.DataObject) -> None:
        for shape in (*SHAPES, ()):
            sketch = Sketch(Program(shape, ()))
            for word, entry in OPS.items():
                size = (6, *shape)
                if entry.rank[0] <= len(size) <= entry.rank[1]:
                    options = {key: option(data.draw, size) for key, option in entry.options.items()}
                    if sketch.append(Do(word, (0,) * entry.arity, options)):
                        used.add(word)

    torch.set_default_dtype(torch.float64)
    try:
        each()
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(OPS) >= 80 and used == set(OPS), sorted(set(OPS) - used)
