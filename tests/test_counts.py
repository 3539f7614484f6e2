"""How many collectives a step needs, by tag, without any pass: one reduction a parameter, one gather, whatever the step looks like."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.oracle import oracle, tools
from tests.oracle import world as ranks
from tests.oracle.cases import CASES
from tests.oracle.world import World

# Each a way to use parameters more than once, or not at all.
NAMES = (
    "optim_adamw_fused", "params_odd", "params_partly", "params_tied", "params_twice", "clip_2", "accumulate_stacked", "accumulate_chunks",
    "accumulate_valid", "zero_first", "gpt", "dropout_checkpoint", "sequence_first", "cnn",
)  # fmt: skip


@pytest.mark.parametrize(("style", "W"), [("replicate", 3), ("fully_shard", 4)])
@pytest.mark.parametrize("name", NAMES)
def test_one_reduction_and_one_gather_a_parameter(world: World, name: str, style: str, W: int) -> None:
    for reduced, gathered, trained, sharded in world.run(_tags, W, name, style):
        assert reduced == Counter(trained)
        assert gathered == Counter(sharded if style == "fully_shard" else ())


def _tags(name: str, style: str) -> tuple[Counter[str], Counter[str], list[str], list[str]]:
    """FQNs of the `grad_reduce`s and the `param_gather`s, of the trained parameters, and of those that are sharded and used."""
    explanation, parts = _explain(name, style)
    used = {fqn: p for fqn, p in parts.models[0].named_parameters() if "unused" not in fqn}
    trained = [fqn for fqn, p in used.items() if p.requires_grad]
    sharded = [fqn for fqn, p in used.items() if p.dim() and max(p.shape) >= ranks.size() and p.numel()]
    by_role = {
        role: Counter(c.fqn for c in explanation.collectives if c.role == role)
        for role in ("grad_reduce", "param_gather")
    }
    empty = [fqn for fqn, p in used.items() if p.numel() == 0]  # nothing to move, so either is fine
    for counter in by_role.values():
        for fqn in empty:
            counter.pop(fqn, None)
    return by_role["grad_reduce"], by_role["param_gather"], [fqn for fqn in trained if fqn not in empty], sharded


def _explain(name: str, style: str) -> tuple[Any, Any]:
    import spmd
    from spmd.modes import DataParallelMode

    torch.set_default_dtype(torch.float64)
    case = CASES[name]
    parts = case.build(1)
    step = spmd.compile(case.step, parallel_mode=DataParallelMode(style, input_batch_dim=case.dim), passes="none")
    names = oracle.argument_names(case.step, len(parts.models) + len(parts.optims))
    batch = oracle.share(oracle.global_batch(case, ranks.size(), 0), names, case, ranks.rank(), ranks.size())
    return step.explain(*parts.models, *parts.optims, *batch), parts


def test_one_rank_needs_no_collective(world: World) -> None:
    assert world.run(_roles, 1, "gpt", "fully_shard") == [Counter()]


def _roles(name: str, style: str) -> Counter[str]:
    return Counter(c.role for c in _explain(name, style)[0].collectives)


@pytest.mark.parametrize("style", oracle.STYLES)
def test_activations_stay_where_they_are(world: World, style: str) -> None:
    """The only value that moves is the loss."""
    for roles in world.run(_roles, 3, "optim_sgd", style):
        assert roles["value"] == 1


@pytest.mark.parametrize("style", oracle.STYLES)
def test_a_collective_says_what_it_is_for(world: World, style: str) -> None:
    reduction = {"replicate": "all_reduce", "fully_shard": "reduce_scatter"}[style]
    for records in world.run(_records, 3, style):
        assert {op for role, op, *_ in records if role == "grad_reduce"} == {reduction}
        assert {op for role, op, *_ in records if role == "param_gather"} <= {"all_gather"}
        for _, _, source, reason, nbytes in records:
            assert "steps.py" in source or "models.py" in source
            assert reason and nbytes > 0


def _records(style: str) -> list[tuple[str, str, str, str, int]]:
    collectives = _explain("optim_sgd", style)[0].collectives
    return [(c.role, c.op, str(c.source), c.reason, c.nbytes) for c in collectives]


def test_parameters_are_gathered_when_used_and_gradients_reduced_when_made(world: World) -> None:
    for text in world.run(_program, 2):
        order = (
            "param_gather 0.weight",
            "aten.tanh.",
            "param_gather 2.weight",
            "grad_reduce 2.weight",
            "aten.tanh_backward",
            "grad_reduce 0.weight",
        )
        places = [text.index(words) for words in order]
        assert places == sorted(places)


def _program() -> str:
    return str(tools.compile(tools.train, passes="none").program(*tools.setup(), *tools.batch()))


def test_explaining_runs_nothing(world: World) -> None:
    world.run(_explains, 2)


def _explains() -> None:
    model, optimizer = tools.setup()
    before, random = tools.state_of(model, optimizer), torch.get_rng_state()
    step = tools.compile(tools.train)
    text = str(step.explain(model, optimizer, *tools.batch()))
    assert "0.weight" in text and "grad_reduce" in text
    assert all(type(p) is nn.Parameter and not isinstance(p.data, DTensor) for p in model.parameters())
    assert not optimizer.state and torch.equal(random, torch.get_rng_state())
    tools.assert_equal(before, tools.state_of(model, optimizer), tolerance=0)
    expected = tools.continue_alone(*tools.setup(), tools.train, range(2), W=2)
    for seed in range(2):
        step(model, optimizer, *tools.batch(seed=seed))
    tools.assert_equal(expected, tools.state_of(model, optimizer))
    assert "0.weight" in str(step.program())
