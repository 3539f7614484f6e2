"""How many collectives a step needs, by tag, without any pass: one reduction a parameter, one gather, whatever the step looks like."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spmd.api import local_graph
from spmd.capture import Capture, capture
from spmd.graph.local import LocalGraph
from spmd.modes import DataParallelMode
from tests import programs
from tests.oracle import oracle, tools
from tests.oracle import world as ranks
from tests.oracle.case import Case, Parts
from tests.oracle.cases import CASES


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Each a way to use parameters more than once, or not at all.
NAMES = (
    "optim_adamw_fused", "params_odd", "params_partly", "params_tied", "params_twice", "clip_2", "accumulate_stacked", "accumulate_chunks",
    "accumulate_valid", "zero_first", "gpt", "dropout_checkpoint", "sequence_first", "cnn", "autocast",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_one_reduction_and_one_gather_a_parameter(name: str) -> None:
    W = 4
    for style in oracle.STYLES:
        program, parts = program_of(CASES[name], style, W)
        used = {fqn: p for fqn, p in parts.models[0].named_parameters() if "unused" not in fqn and p.numel()}
        trained = [fqn for fqn, p in used.items() if p.requires_grad]
        sharded = [fqn for fqn, p in used.items() if p.dim() and max(p.shape) >= W] if style == "fully_shard" else []
        assert fqns(program, "grad_reduce", used) == Counter(trained)
        assert fqns(program, "param_gather", used) == Counter(sharded)


def fqns(program: LocalGraph, role: str, among: Iterable[str]) -> Counter[str]:
    """Parameters of the collectives with one role. Empty ones have nothing to move, so either is fine."""
    return Counter(c.fqn for c in program.collectives if c.role == role and c.fqn in among)


@functools.cache
def captured(name: str, W: int) -> tuple[Capture, Parts]:
    case = CASES[name]
    parts = case.build(1)
    names = oracle.argument_names(case.step, len(parts.models) + len(parts.optims))
    share = oracle.share(oracle.global_batch(case, W, 0), names, case, 0, W)
    found = capture(
        case.step,
        (*parts.models, *parts.optims, *share),
        batch_dim=case.dim,
        replicated=case.replicated,
        global_batch=lambda samples: samples * W,
    )
    return found, parts


def program_of(case: Case, style: str, W: int) -> tuple[LocalGraph, Parts]:
    """What rank 0 of W would run without passes, and for what objects. Takes one process."""
    found, parts = captured(case.name, W)
    mode = DataParallelMode(style, input_batch_dim=case.dim, replicated_inputs=case.replicated)
    return local_graph(found.step, found, W * case.samples[0], mode, programs.ranks(W)[0]), parts


def test_one_rank_needs_no_collective() -> None:
    assert not program_of(CASES["gpt"], "fully_shard", 1)[0].collectives


@pytest.mark.parametrize("style", oracle.STYLES)
def test_activations_stay_where_they_are(style: str) -> None:
    """The only value that moves is the loss."""
    program, _ = program_of(CASES["optim_sgd"], style, 3)
    assert Counter(c.role for c in program.collectives)["value"] == 1


@pytest.mark.parametrize("name", ["optim_muon", "optim_torch_muon", "optim_shampoo", "optim_adafactor"])
def test_an_optimizer_of_whole_matrices_gathers_each_once(name: str) -> None:
    program, parts = program_of(CASES[name], "fully_shard", 4)
    gathered = [c.nbytes for c in program.collectives if c.role == "value" and c.op == "all_gather"]
    tensors = [p.numel() * p.element_size() for p in parts.models[0].parameters()]
    assert sum(gathered) <= sum(tensors)
    assert max(Counter(gathered).values()) == 1


# Of the losses that mix samples: those for which sums, maxima or positions do.
SUMS = (
    "var", "norm", "normalized", "logsumexp", "softmax", "max", "covariance", "varying_dims", "places", "two_views",
)  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_statistics_of_the_batch_move_sums(name: str) -> None:
    """No activation is gathered where sums, maxima or positions will do."""
    program, _ = program_of(CASES[f"mixing_{name}"], "fully_shard", 4)
    gathered = [c for c in program.collectives if c.role == "value" and c.before.startswith("S")]
    assert sum(c.nbytes for c in gathered) <= (8 * 8 if name == "varying_dims" else 0), gathered
    assert not program.fallbacks


@pytest.mark.parametrize("style", oracle.STYLES)
def test_a_collective_says_what_it_is_for(style: str) -> None:
    reduction = {"replicate": "all_reduce", "fully_shard": "reduce_scatter"}[style]
    collectives = program_of(CASES["optim_sgd"], style, 3)[0].collectives
    assert {c.op for c in collectives if c.role == "grad_reduce"} == {reduction}
    assert {c.op for c in collectives if c.role == "param_gather"} <= {"all_gather"}
    for c in collectives:
        assert "steps.py" in str(c.source) or "models.py" in str(c.source)
        assert c.reason and c.nbytes > 0


def test_parameters_are_gathered_when_used_and_gradients_reduced_when_made() -> None:
    text = str(program_of(CASES["optim_sgd"], "fully_shard", 2)[0])
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


def test_explaining_runs_nothing(world: ranks.World) -> None:
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
