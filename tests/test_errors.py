"""Bad input: one clear error on every rank before anything runs, all offenders in it, everything untouched and usable after."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler

from tests.oracle import models, tools
from tests.oracle.world import World

Step = Callable[..., Any]


def _finish(loss: Tensor, optimizer: Optimizer) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# ---- steps that can't be compiled, and what the error must say


def item_in_a_branch(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    if loss.item() > 0.5:  # here
        loss = loss * 2
    return _finish(loss, optimizer)


def tensor_in_a_branch(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    if not torch.isfinite(loss):  # here
        return loss.detach()
    return _finish(loss, optimizer)


def boolean_index(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    loss = output[y > 0].square().sum()  # here
    return _finish(loss, optimizer)


def nonzero(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.nonzero(y[:, 0] > 0)  # here
    return _finish(model(x)[rows[:, 0]].sum(), optimizer)


def numpy_of_a_loss(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.detach().numpy()  # here
    return _finish(loss, optimizer)


def talks_itself(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    dist.all_reduce(loss.detach())  # here
    return _finish(loss, optimizer)


def counts_the_ranks(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y) / dist.get_world_size()  # here
    return _finish(loss, optimizer)


@pytest.mark.parametrize(
    ("step", "name", "remedy"),
    [
        (item_in_a_branch, "item", "torch.where"),
        (tensor_in_a_branch, "is_nonzero|bool|branch|condition", "torch.where"),
        (boolean_index, "index|nonzero", ""),
        (nonzero, "nonzero", ""),
        (numpy_of_a_loss, "numpy", ""),
        (talks_itself, "all_reduce", ""),
        (counts_the_ranks, "get_world_size", ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_graph_can_hold_is_named_with_its_line(world: World, step: Step, name: str, remedy: str) -> None:
    for message in world.run(_refused, 2, step):
        assert tools.line(step, "# here") in message
        assert any(part in message for part in name.split("|"))
        assert "fix:" in message and remedy in message


def _refused(step: Step) -> str:
    model, optimizer = tools.setup()
    message = tools.refusal(step, model, optimizer, *tools.batch())
    assert torch.isfinite(tools.compile(tools.train)(model, optimizer, *tools.batch()))
    return message


# ---- optimizers


def test_lbfgs_is_refused_by_name(world: World) -> None:
    for message in world.run(_lbfgs, 2):
        assert "LBFGS" in message and "fix:" in message


def _lbfgs() -> str:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()  # type: ignore[arg-type, union-attr]

    model, _ = tools.setup()
    return tools.refusal(step, model, optim.LBFGS(model.parameters()), *tools.batch())


def test_an_optimizer_over_other_tensors_is_refused_naming_each(world: World) -> None:
    for message in world.run(_foreign_optimizer, 2):
        assert "optimizer" in message and "param_groups[0]" in message
        assert all(f"{shape}" in message for shape in ("[7, 5]", "[7]", "[3, 7]", "[3]"))  # all four at once
        assert "fix:" in message


def _foreign_optimizer() -> str:
    model, _ = tools.setup()
    stranger = optim.AdamW(copy.deepcopy(model).parameters())
    return (
        tools.refusal(tools.train, model, stranger, *tools.batch())
        .replace("(", "[")
        .replace(")", "]")
        .replace(",]", "]")
    )


def test_an_optimizer_partly_over_other_tensors_is_refused(world: World) -> None:
    for message in world.run(_half_foreign, 2):
        assert "[4, 4]" in message.replace("(", "[").replace(")", "]") and "param_groups[1]" in message


def _half_foreign() -> str:
    model, optimizer = tools.setup()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 4))]})
    return tools.refusal(tools.train, model, optimizer, *tools.batch())


# ---- Python side effects


class Counting(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls, self.history = models.mlp(), 0, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) / self.calls


class Recording(Counting):
    """Its output depends on all calls before."""

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(0.5)
        return super().forward(x) * sum(self.history)


@pytest.mark.parametrize(("build", "names"), [(Counting, ("calls",)), (Recording, ("calls", "history"))])
def test_counters_in_a_module_are_refused_all_at_once(
    world: World, build: type[Counting], names: tuple[str, ...]
) -> None:
    for message in world.run(_counting, 2, build):
        assert all(name in message for name in names) and "fix:" in message


def _counting(build: type[Counting]) -> str:
    model, optimizer = tools.setup(build=build)
    message = tools.refusal(tools.train, model, optimizer, *tools.batch())
    assert model.calls == 0 and model.history == [1.0]
    return message


def test_a_scheduler_in_the_step_is_refused(world: World) -> None:
    for message in world.run(_scheduler, 2):
        assert "StepLR" in message or "scheduler" in message
        assert "after" in message or "outside" in message  # the remedy: step it outside


def _scheduler() -> str:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = _finish(F.mse_loss(model(x), y), optimizer)
        scheduler.step()
        return loss

    model, optimizer = tools.setup()
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = scheduler.state_dict()
    message = tools.refusal(step, model, optimizer, *tools.batch())
    assert scheduler.state_dict() == before and optimizer.param_groups[0]["lr"] == 0.01
    return message


@pytest.mark.parametrize(("kind", "name"), [("random", "random"), ("numpy", "numpy")])
def test_random_numbers_of_python_are_refused(world: World, kind: str, name: str) -> None:
    for message in world.run(_python_random, 2, kind):
        assert name in message and "fix:" in message


def _python_random(kind: str) -> str:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        scale = random.random() if kind == "random" else float(np.random.rand())
        return _finish(scale * F.mse_loss(model(x), y), optimizer)

    model, optimizer = tools.setup()
    random.seed(1)
    np.random.seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist())
    message = tools.refusal(step, model, optimizer, *tools.batch())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    return message


# ---- buffers


class Remembering(nn.Module):
    """Keeps the last batch in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.mlp()
        self.register_buffer("last_input", torch.zeros(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.last_input = x.detach().clone()
        return self.body(x)


def test_a_buffer_of_the_batchs_size_is_refused_by_name(world: World) -> None:
    for message in world.run(_remembering, 2):
        assert "last_input" in message and "fix:" in message


def _remembering() -> str:
    model, optimizer = tools.setup(build=Remembering)
    message = tools.refusal(tools.train, model, optimizer, *tools.batch())
    assert model.last_input.shape == (0, 5)
    return message


class Overlapping(nn.Module):
    """One buffer is a view of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.mlp()
        self.register_buffer("whole", torch.zeros(5))
        self.register_buffer("first", self.whole[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.whole += 1
        return self.body(x + self.first.sum())


def test_buffers_that_alias_each_other_are_refused_or_right(world: World) -> None:
    for message in world.run(_overlapping, 2):
        assert message == "right" or "whole" in message and "first" in message


def _overlapping() -> str:
    from spmd.errors import SpmdError

    expected = tools.continue_alone(*tools.setup(build=Overlapping), tools.train, range(2), W=2)
    model, optimizer = tools.setup(build=Overlapping)
    step = tools.compile(tools.train)
    try:
        for seed in range(2):
            step(model, optimizer, *tools.batch(seed=seed))
    except SpmdError as error:
        return str(error)
    tools.assert_equal(expected, tools.state_of(model, optimizer))
    return "right"


# ---- arguments


def test_inputs_that_disagree_about_the_batch_are_listed(world: World) -> None:
    for message in world.run(_disagreeing, 2):
        assert all(word in message for word in ("x", "y.first", "y.second", "2", "3", "4"))
        assert "replicated_inputs" in message  # the remedy for one that doesn't carry the batch


def _disagreeing() -> str:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: dict[str, Tensor]) -> Tensor:
        return _finish(model(x).sum() + y["first"].sum() + y["second"].sum(), optimizer)

    model, optimizer = tools.setup()
    y = {"first": torch.zeros(3, 3), "second": torch.zeros(4, 3)}
    return tools.refusal(step, model, optimizer, torch.zeros(2, 5), y)


def test_an_input_without_the_batch_dim_is_refused(world: World) -> None:
    for message in world.run(_too_flat, 2):
        assert "y has shape (3,)" in message and "dim 1" in message and "fix:" in message


def _too_flat() -> str:
    model, optimizer = tools.setup()
    return tools.refusal(tools.train, model, optimizer, torch.zeros(2, 3, 5), torch.zeros(3), input_batch_dim=1)


def test_replicated_inputs_that_dont_exist_are_refused(world: World) -> None:
    for message in world.run(_misnamed, 2):
        assert "mask" in message and "x" in message and "y" in message  # what was asked for and what there is


def _misnamed() -> str:
    model, optimizer = tools.setup()
    return tools.refusal(tools.train, model, optimizer, *tools.batch(), replicated_inputs=("mask",))


def test_a_model_on_another_device_is_refused(world: World) -> None:
    for message in world.run(_on_meta, 2):
        assert "weight" in message and "to_empty" in message


def _on_meta() -> str:
    from spmd.errors import SpmdError

    model, _ = tools.setup()
    model.to("meta")
    try:
        tools.compile(tools.train)(model, optim.SGD(model.parameters(), lr=0.1), *tools.batch())
    except SpmdError as error:
        return str(error)
    raise AssertionError("it ran")


def test_an_input_that_the_step_changes_is_changed_or_refused(world: World) -> None:
    for message in world.run(_changes_input, 2):
        assert message == "changed" or "x" in message and "fix:" in message


def _changes_input() -> str:
    from spmd.errors import SpmdError

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return _finish(F.mse_loss(model(x), y), optimizer)

    model, optimizer = tools.setup()
    x, y = tools.batch()
    before = x.clone()
    try:
        tools.compile(step)(model, optimizer, x, y)
    except SpmdError as error:
        assert torch.equal(x, before)
        return str(error)
    assert torch.equal(x, 2 * before)
    return "changed"


def test_an_unknown_style_is_refused_with_the_known_ones() -> None:
    from spmd.errors import SpmdError
    from spmd.modes import DataParallelMode

    with pytest.raises(SpmdError, match="fully_shard"):
        DataParallelMode("fully_sharded")


def test_every_exception_is_an_spmd_error() -> None:
    from spmd import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    assert len(kinds) > 1 and all(issubclass(kind, errors.SpmdError) for kind in kinds)
