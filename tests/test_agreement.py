"""The ranks run the same program from the same state on the same batch, or all of them get the error, within seconds."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.oracle import models, tools
from tests.oracle import world as ranks
from tests.oracle.world import World

# `catch=True` gives the other ranks 5 seconds after the first failure; later they'd be lost, not an SpmdError.


def _all_refused(world: World, W: int, job: Any, *args: Any, kind: str = "SpmdError") -> list[str]:
    """Every rank's message, where every rank must fail with an error of spmd."""
    failures = world.run(job, W, *args, catch=True, timeout=120)
    assert all(getattr(failure, "is_a", lambda _: False)(kind) for failure in failures), failures
    return [failure.message for failure in failures]


class TwoLayers(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, which: bool) -> Tensor:
        return (self.a if which else self.b)(x)


def branching(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, which: bool) -> Tensor:
    loss = F.mse_loss(model(x, which), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(
    ("first", "W"),
    [(True, 3), (False, 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((True, 2), (False, 3)))],
)
def test_a_rank_that_runs_another_branch(world: World, W: int, first: bool) -> None:
    for message in _all_refused(world, W, _another_branch, first):
        assert re.search(r"\b[ab]\.(weight|bias)\b", message)  # the first node that differs
        assert "rank" in message


def _another_branch(first: bool) -> None:
    model, optimizer = tools.setup(build=TwoLayers)
    step = tools.compile(branching)
    if not first:
        step(model, optimizer, *tools.batch(), True)
    step(model, optimizer, *tools.batch(), ranks.rank() != 1)


def test_programs_that_differ_name_the_first_differing_node(world: World) -> None:
    for message in _all_refused(world, 3, _another_constant):
        assert "mul" in message and "test_agreement.py" in message and "rank 2" in message


def _another_constant() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) * factor
        loss.backward()
        optimizer.step()
        return loss.detach()

    factor = 2.0 if ranks.rank() < 2 else 3.0
    tools.compile(step)(*tools.setup(), *tools.batch())


# ---- initial state


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_states_that_differ_are_rank_0s_with_a_warning(world: World, style: str) -> None:
    warned = world.run(_different_start, 3, style)
    assert any("0.weight" in text and "rank" in text for text in warned[0])


def _different_start(style: str) -> list[str]:
    expected = tools.continue_alone(*_started(0), tools.train, range(1, 4), W=3)
    model, optimizer = _started(ranks.rank())
    step = tools.compile(tools.train, style)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(1, 4):
            step(model, optimizer, *tools.batch(seed=seed))
    tools.assert_equal(expected, tools.state_of(model, optimizer))
    return [str(warning.message) for warning in caught]


def _started(seed: int) -> tuple[nn.Module, Optimizer]:
    """A model and optimizer after one eager step, so that there are states too, different for different seeds."""
    model, optimizer = tools.setup(seed, models.Counting)
    tools.train(model, optimizer, *tools.global_batch(4, seed))
    return model, optimizer


def test_equal_states_warn_of_nothing(world: World) -> None:
    assert world.run(_same_start, 2) == [[], []]


def _same_start() -> list[str]:
    model, optimizer = _started(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tools.compile(tools.train)(model, optimizer, *tools.batch())
    return [str(warning.message) for warning in caught if "rank" in str(warning.message)]


def test_states_that_differ_are_refused_if_asked(world: World) -> None:
    for message in world.run(_refused_start, 3):
        assert "2.bias" in message and "rank" in message


def _refused_start() -> str:
    model, optimizer = tools.setup()
    if ranks.rank() == 1:
        with torch.no_grad():
            model.get_parameter("2.bias").add_(1)
    return tools.refusal(tools.train, model, optimizer, *tools.batch(), sync="error")


def test_a_parameter_that_one_rank_freezes(world: World) -> None:
    for message in _all_refused(world, 2, _one_freezes):
        assert "0.bias" in message


def _one_freezes() -> None:
    model, optimizer = tools.setup()
    model.get_parameter("0.bias").requires_grad_(ranks.rank() == 0)
    tools.compile(tools.train)(model, optimizer, *tools.batch())


def test_a_rank_that_cant_make_its_optimizer_states(world: World) -> None:
    other, own = world.run(_no_states, 2, catch=True, timeout=120)
    assert other.is_a("AgreementError") and "rank 1: MemoryError: no room for exp_avg" in other.message
    assert own.is_a("MemoryError")


def _no_states() -> None:
    from spmd.runtime import programs

    class Full(programs.Executor):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if self.out_spec is None and ranks.rank() == 1:
                raise MemoryError("no room for exp_avg")
            return super().__call__(*args, **kwargs)

    programs.Executor, executor = Full, programs.Executor  # type: ignore[misc]
    try:
        model, _ = tools.setup()
        tools.compile(tools.train)(model, optim.Adam(model.parameters()), *tools.batch())
    finally:
        programs.Executor = executor  # type: ignore[misc]


# ---- the batch


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_batches_of_different_sizes(world: World, first: bool) -> None:
    for message in world.run(_different_batches, 3, first, timeout=120):
        assert "batch" in message and "2" in message and "3" in message


def _different_batches(first: bool) -> str:
    """The error on this rank; the step works again after it."""
    from spmd.errors import SpmdError

    model, optimizer = tools.setup()
    step = tools.compile(tools.train)
    if not first:
        step(model, optimizer, *tools.batch())
    before = tools.state_of(model, optimizer)
    try:
        step(model, optimizer, *tools.batch(3 if ranks.rank() == 1 else 2))
    except SpmdError as error:
        tools.assert_equal(before, tools.state_of(model, optimizer), tolerance=0)
        step(model, optimizer, *tools.batch())
        return str(error)
    raise AssertionError("it ran")


@pytest.mark.parametrize("kind", ["disagree", "item", "eval"])
def test_what_goes_wrong_on_one_rank_stops_all(world: World, kind: str) -> None:
    _all_refused(world, 3, _one_differs, kind)


def _one_differs(kind: str) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        if branch and loss.item() > 0:
            loss = 2 * loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, optimizer = tools.setup(build=lambda: models.mlp(dropout=0.5))
    branch = False
    compiled = tools.compile(step)
    compiled(model, optimizer, *tools.batch())
    x, y = tools.batch()
    if ranks.rank() == 1:
        branch = kind == "item"
        model.train(kind != "eval")
        y = torch.zeros(3, 3) if kind == "disagree" else y
    compiled(model, optimizer, x, y)


@pytest.mark.parametrize("W", [2, 3])
def test_a_rank_that_fails_before_it_communicates(world: World, W: int) -> None:
    """Its share holds an index that no embedding row has: forward raises, and the step works again after it."""
    kinds, messages = zip(*world.run(_bad_index, W, timeout=60), strict=True)
    assert kinds[1] == "IndexError" and "out of range" in messages[1]
    for rank in {*range(W)} - {1}:
        assert kinds[rank] == "AgreementError" and "rank 1: IndexError: index out of range" in messages[rank]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.word(x))


def _bad_index() -> tuple[str, str]:
    model, optimizer = tools.setup(build=Words)
    step = tools.compile(tools.train, "replicate")
    words, y = torch.tensor([1, 6]), torch.zeros(2, 3)
    step(model, optimizer, words, y)
    before = tools.state_of(model, optimizer)
    try:
        step(model, optimizer, words + (ranks.rank() == 1), y)
    except Exception as error:
        tools.assert_equal(before, tools.state_of(model, optimizer), tolerance=0)
        step(model, optimizer, words, y)
        return type(error).__name__, str(error)
    raise AssertionError("it ran")


def test_a_rank_whose_gradient_lies_elsewhere(world: World) -> None:
    """Redistributing it is a collective, which all take part in or none."""
    for message in _all_refused(world, 2, _elsewhere, (1,)):
        assert re.search(r"rank 1: .*; 0.weight.grad comes as \(Replicate\(\),\)", message)
    world.run(_elsewhere, 2, (0, 1))


def _elsewhere(where: tuple[int, ...]) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:  # accumulates
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    expected = tools.continue_alone(*tools.setup(), step, range(3), W=2)
    model, optimizer = tools.setup()
    compiled = tools.compile(step)
    for seed in range(3):
        compiled(model, optimizer, *tools.batch(seed=seed))
        weight = model.get_parameter("0.weight")
        whole = weight.grad.full_tensor()
        if ranks.rank() in where:
            weight.grad = DTensor.from_local(whole, weight.device_mesh, [Replicate()], run_check=False)
    tools.assert_equal(expected, tools.state_of(model, optimizer))


def test_an_argument_that_cannot_be_read_on_one_rank(world: World) -> None:
    _all_refused(world, 2, _unreadable)


def _unreadable() -> None:
    model, optimizer = tools.setup()
    step = tools.compile(tools.train)
    step(model, optimizer, *tools.batch())
    step(model, optimizer, *tools.batch()[: 1 if ranks.rank() else 2])


def test_replicated_inputs_must_be_equal(world: World) -> None:
    assert world.run(_replicated, 2, True) == ["", ""]
    for message in _all_refused(world, 2, _replicated, False):
        assert "batch.mask" in message


def _replicated(equal: bool) -> str:
    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        loss = (model(batch["x"]) * batch["mask"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, optimizer = tools.setup()
    mask = torch.ones(1, 3) if equal else torch.full((1, 3), float(ranks.rank()))
    tools.compile(step, replicated_inputs=("batch.mask",))(model, optimizer, {"x": tools.batch()[0], "mask": mask})
    return ""


# ---- random numbers


def _train_with_dropout(model: nn.Module, optimizer: Optimizer, step: Any, batch: Any) -> None:
    for seed in range(3):
        step(model, optimizer, *batch(seed))


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_dropout_follows_rank_0s_generator(world: World, style: str) -> None:
    world.run(_follows_rank_0, 3, style)


def _dropped() -> tuple[nn.Module, Optimizer]:
    return tools.setup(build=lambda: models.mlp(dropout=0.5))


def _follows_rank_0(style: str) -> None:
    alone, own = _dropped(), _dropped()
    torch.manual_seed(42)
    _train_with_dropout(*alone, tools.train, lambda seed: tools.global_batch(6, seed))
    torch.manual_seed(42 + ranks.rank())
    _train_with_dropout(*own, tools.compile(tools.train, style), lambda seed: tools.batch(seed=seed))
    tools.assert_equal(tools.state_of(*alone), tools.state_of(*own))


def test_a_seed_makes_runs_equal_whatever_the_generators_hold(world: World) -> None:
    world.run(_seeded, 2)


def _seeded() -> None:
    runs = []
    for start, seed in ((1, 5), (2 + ranks.rank(), 5), (1, 6)):
        parts = _dropped()
        torch.manual_seed(start)
        _train_with_dropout(*parts, tools.compile(tools.train, seed=seed), lambda seed: tools.batch(seed=seed))
        runs.append(tools.state_of(*parts))
    tools.assert_equal(runs[0], runs[1])
    with_another = runs[2].state["parameter 0.weight"]
    assert not torch.allclose(runs[0].state["parameter 0.weight"], with_another)


def test_every_rank_ends_with_the_same_values(world: World) -> None:
    first, *others = world.run(_whole_values, 3)
    assert all(torch.equal(first, other) for other in others)


def _whole_values() -> Tensor:
    model, _ = tools.setup(ranks.rank())
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = tools.compile(tools.train, "replicate")
    loss = torch.stack([step(model, optimizer, *tools.batch(seed=seed)) for seed in range(3)])
    return torch.cat([loss, *(p.detach().full_tensor().flatten() for p in model.parameters())])  # type: ignore[operator]
