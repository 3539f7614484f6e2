"""Nothing baked into a graph goes stale: what each change costs in traces. That the values are right is in the table of cases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler

from tests.oracle import models, tools
from tests.oracle import world as ranks
from tests.oracle.world import World

Change = Callable[[nn.Module, Optimizer, int], Any]


def nothing(model: nn.Module, optimizer: Optimizer, index: int) -> None:
    pass


def rate(model: nn.Module, optimizer: Optimizer, index: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 / (index + 1)


def weight_decay(model: nn.Module, optimizer: Optimizer, index: int) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1 * (index + 1)


def mode(model: nn.Module, optimizer: Optimizer, index: int) -> None:
    model.train(index % 2 == 1)


def frozen(model: nn.Module, optimizer: Optimizer, index: int) -> None:
    model.get_parameter("0.weight").requires_grad_(index % 2 == 1)


def module_hook(model: nn.Module, optimizer: Optimizer, index: int) -> None:
    if index == 0:
        model.register_forward_hook(lambda module, args, output: output * 2)


def tensor_hook(model: nn.Module, optimizer: Optimizer, index: int) -> None:
    if index == 0:
        model.get_parameter("0.weight").register_hook(lambda grad: grad * 2)


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [
        (nothing, 1, 1),
        (rate, 1, 1),
        (weight_decay, 1, 3),
        (mode, 2, 2),
        (frozen, 2, 2),
        (module_hook, 2, 2),
        (tensor_hook, 2, 2),
    ],
)
def test_traces_after_six_steps(world: World, change: Change, least: int, most: int) -> None:
    for traces in world.run(_six_steps, 2, change):
        assert least <= traces <= most


def _six_steps(change: Change) -> int:
    """The trace count after six steps with a change after each; the result equals one device's."""

    def build() -> nn.Module:
        return models.mlp(dropout=0.5)

    alone, own = tools.setup(build=build), tools.setup(build=build)
    step = tools.compile(tools.train)
    torch.manual_seed(2)
    for index in range(6):
        tools.train(*alone, *tools.global_batch(4, index))
        change(*alone, index)
    torch.manual_seed(2)
    for index in range(6):
        step(*own, *tools.batch(seed=index))
        change(*own, index)
    tools.assert_equal(tools.state_of(*alone), tools.state_of(*own))
    return step.trace_count


def test_a_scheduler_costs_no_trace(world: World) -> None:
    assert world.run(_scheduled, 2) == [1, 1]


def _scheduled() -> int:
    model, optimizer = tools.setup()
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    step = tools.compile(tools.train)
    for seed in range(5):
        step(model, optimizer, *tools.batch(seed=seed))
        scheduler.step()
    return step.trace_count


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_new_batch_size_costs_no_trace(world: World, style: str) -> None:
    assert world.run(_sizes, 3, style) == [1, 1, 1]


def _sizes(style: str) -> int:
    alone, own = tools.setup(), tools.setup()
    step = tools.compile(tools.train, style)
    for samples in (4, 2, 7, 4, 1):
        tools.train(*alone, *tools.global_batch(samples * ranks.size()))
        step(*own, *tools.batch(samples))
    tools.assert_equal(tools.state_of(*alone), tools.state_of(*own))
    return step.trace_count


def test_one_sample_in_all_is_right(world: World) -> None:
    (traces,) = world.run(_sizes, 1, "fully_shard")
    assert traces <= 2  # a global batch of one may need its own program


def test_a_branch_on_the_size_is_traced_again(world: World) -> None:
    assert all(
        2 <= traces <= 4 for traces in world.run(_size_branch, 2)
    )  # one for all sizes, and one for each that doesn't fit it


def _size_branch() -> int:
    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) if x.shape[0] <= 6 else F.l1_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    alone, own = tools.setup(), tools.setup()
    step = tools.compile(train)
    for samples in (2, 5, 3, 4):  # globally 4, 10, 6, 8
        train(*alone, *tools.global_batch(2 * samples))
        step(*own, *tools.batch(samples))
    tools.assert_equal(tools.state_of(*alone), tools.state_of(*own))
    return step.trace_count


def test_closures_and_globals_are_guarded(world: World) -> None:
    world.run(_closed_over, 2)


FACTOR = 1.0


def _closed_over() -> None:
    global FACTOR

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) * factor * FACTOR * settings["factor"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    alone, own = tools.setup(), tools.setup()
    step = tools.compile(train)
    for parts, run, batch in ((alone, train, lambda: tools.global_batch(4)), (own, step, tools.batch)):
        FACTOR, factor, settings = 1.0, 1.0, {"factor": 1.0}
        run(*parts, *batch())
        factor = 3.0
        run(*parts, *batch())
        FACTOR = 5.0
        run(*parts, *batch())
        settings["factor"] = 7.0
        run(*parts, *batch())
    tools.assert_equal(tools.state_of(*alone), tools.state_of(*own))


def test_a_number_that_keeps_changing_becomes_an_input_and_text_hits_a_cap_that_names_it(world: World) -> None:
    (message,) = world.run(_too_many, 1)
    assert "label" in message


def _too_many() -> str:
    from spmd.errors import SpmdError

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, label: str) -> Tensor:
        loss = F.mse_loss(model(x), y) * len(label)
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, optimizer = tools.setup(build=lambda: nn.Linear(5, 3))
    step = tools.compile(train)
    try:
        for index in range(40):
            step(model, optimizer, *tools.batch(), "x" * index)
    except SpmdError as error:
        return str(error)
    raise AssertionError("never capped")


def test_reset_forgets_the_programs(world: World) -> None:
    world.run(_reset, 2)


def _reset() -> None:
    expected = tools.continue_alone(*tools.setup(), tools.train, range(4), W=2)
    model, optimizer = tools.setup()
    step = tools.compile(tools.train)
    for seed in range(4):
        if seed == 2:
            step.reset()
        step(model, optimizer, *tools.batch(seed=seed))
    tools.assert_equal(expected, tools.state_of(model, optimizer))


def test_the_decorator_takes_keywords_and_keeps_the_name(world: World) -> None:
    assert world.run(_decorated, 1) == [("train_step", "What it does.")]


def _decorated() -> tuple[str, str | None]:
    import spmd
    from spmd.modes import DataParallelMode

    @spmd.compile(parallel_mode=DataParallelMode("replicate"))
    def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """What it does."""
        return tools.train(model, optimizer, x, y)

    model, optimizer = tools.setup()
    assert torch.isfinite(train_step(model, optimizer, x=tools.batch()[0], y=tools.batch()[1]))
    return train_step.__name__, train_step.__doc__
