"""The oracle can fail: it passes right stand-ins for the compiler and catches wrong ones by the tensor's name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.oracle import oracle, standins
from tests.oracle.cases import CASES, REPRESENTATIVE
from tests.oracle.world import RanksFailed, World

# Means over the batch without accumulation, so that averages of gradients are exact.
MEAN = (
    "optim_adamw_fused",
    "params_odd",
    "params_partly",
    "params_tied",
    "clip_inf",
    "zero_first_odd",
    "lr_step",
    "lstm",
)


def test_a_case_repeats_itself_and_rounding_stays_far_below_the_tolerance(world: World) -> None:
    (ratios,) = world.run(_self_ratios, 1)
    exact = {name for name, (again, _) in ratios.items() if again == 0.0}
    assert exact >= ratios.keys() - {"linear_algebra"}, ratios  # LAPACK's sums depend on how memory is aligned
    assert all(again < 1e-5 and rounded < 0.1 for again, rounded in ratios.values()), ratios


def _self_ratios() -> dict[str, tuple[float, float]]:
    names = [name for name, case in CASES.items() if case.needs is None]
    return {
        name: tuple(oracle.check(name, "replicate", 1, None, s) for s in (standins.identity, standins.rounding))
        for name in names
    }  # type: ignore[misc]


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_shares_and_outputs_are_specified_right(world: World, name: str) -> None:
    """Gathering the batch and running all of it on every rank is right for everything."""
    assert max(world.run(oracle.check, 3, name, "replicate", 3, None, standins.gathering)) < 0.1


@pytest.mark.parametrize("name", MEAN)
def test_averaged_gradients_are_right_for_means(world: World, name: str) -> None:
    assert max(world.run(oracle.check, 2, name, "replicate", 2, None, standins.ddp)) < 0.1


@pytest.mark.parametrize("name", ["loss_sum", "loss_ignore_index", "loss_masked_mean", "dropout_mlp", "cnn_batch_norm"])
def test_averages_of_averages_are_caught(world: World, name: str) -> None:
    with pytest.raises(RanksFailed, match=r"parameter .* times the tolerance"):
        world.run(oracle.check, 2, name, "replicate", 2, None, standins.ddp)


@pytest.mark.parametrize(
    ("standin", "names"),
    [
        (standins.identity, "state 0 0.weight exp_avg"),
        (standins.without_gradient_reduction, "state 0 0.weight exp_avg"),
        (standins.without_loss_reduction, "step 0 output 0"),
    ],
)
def test_a_forgotten_reduction_is_caught(world: World, standin: Any, names: str) -> None:
    with pytest.raises(RanksFailed, match=f"{names}: .* times the tolerance"):
        world.run(oracle.check, 2, "optim_adamw", "replicate", 2, None, standin)


def test_a_forgotten_update_is_caught(world: World) -> None:
    with pytest.raises(RanksFailed, match=r"parameter 0.weight: .* times the tolerance"):
        world.run(oracle.check, 1, "optim_adamw", "replicate", 1, None, standins.without_second_step)


def _record(**state: Any) -> oracle.Record:
    return oracle.Record(state=state, lr=0.1)


def _compare(expected: oracle.Record, found: oracle.Record) -> float:
    return oracle.compare(expected, found, replace(CASES["gpt"], outputs=()), W=1)


def test_the_metric_is_relative_to_the_largest_value_or_the_rate() -> None:
    small, large = torch.full((3,), 1e-12, dtype=torch.float64), torch.full((3,), 1e3, dtype=torch.float64)
    assert _compare(_record(a=small), _record(a=-small)) == pytest.approx(0.02)
    assert _compare(_record(a=large), _record(a=large + 0.5e-6)) == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(AssertionError, match="a: 2 times"):
        _compare(_record(a=large), _record(a=large + 2e-6))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "a: missing"),
        ({"a": torch.ones(2), "b": 1}, "b: unexpected"),
        ({"a": torch.ones(1)}, r"expected torch.float32 \[2\]"),
        ({"a": torch.ones(2).double()}, r"expected torch.float32 \[2\]"),
        ({"a": None}, r"a: None, expected"),
        ({"a": torch.tensor([1.0, torch.nan])}, "a: inf times"),
        ({"a": torch.tensor([1.0, torch.inf])}, "a: inf times"),
    ],
)
def test_what_isnt_a_number_is_compared_too(found: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _compare(_record(a=torch.ones(2)), _record(**found))


def test_integers_and_flags_must_be_equal() -> None:
    _compare(_record(a=torch.tensor([1, 2]), b=0.1), _record(a=torch.tensor([1, 2]), b=0.1 + 1e-17))
    with pytest.raises(AssertionError, match="a: inf"):
        _compare(_record(a=torch.tensor([1, 2])), _record(a=torch.tensor([1, 3])))
    with pytest.raises(AssertionError, match="a: 2, expected 1"):
        _compare(_record(a=1), _record(a=2))


def test_shares_join_to_the_global_batch() -> None:
    case = CASES["nested"]
    batch = oracle.global_batch(case, 3, 0)
    shares = [oracle.share(batch, ["batch", "scale"], case, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([own["x"] for own, _ in shares]), batch[0]["x"])
    assert all(torch.equal(own["mask"], batch[0]["mask"]) and torch.equal(scale, batch[1]) for own, scale in shares)


def test_batches_differ_by_step_and_repeat() -> None:
    case = CASES["gpt"]
    first, again, second = (oracle.global_batch(case, 2, index)[0] for index in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_every_case_moves_parameters_and_stays_finite(world: World) -> None:
    (still,) = world.run(_still, 1)
    assert still == ["forward_only", "gradients_only"]


def _still() -> list[str]:
    torch.set_default_dtype(torch.float64)
    still = []
    for name, case in CASES.items():
        if case.needs is None:
            before = oracle.snapshot(case.build(oracle.SEED))
            after = oracle.run(case, 1, None)
            assert all(
                torch.isfinite(value).all() for value in after.state.values() if isinstance(value, torch.Tensor)
            ), name
            moved = [
                oracle.distance(before[key], after.state[key], 1.0) for key in before if key.startswith("parameter")
            ]
            if max(moved) < 1e-6:
                still.append(name)
    return still


def test_cases_use_what_their_names_say() -> None:
    for W in (1, 2, 3, 4):
        assert {oracle.global_batch(CASES["argument_flag"], W, index)[3] for index in range(6)} == {True, False}
    assert CASES["loss_ignore_index"].batch(8)[1].eq(-100).sum(1).unique().numel() > 1
