"""Steps that once came out wrong without a word: each is exact now, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import spmd
from spmd.errors import SpmdError
from spmd.modes import DataParallelMode
from tests.oracle import tools
from tests.oracle.world import World, rank

Step = Callable[..., Tensor]


def update(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def lent_values(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> Tensor:
    """Other values for a while, then the old ones again: evaluation with an average."""
    loss = update(model, optimizer, x, y)
    own = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.5
    halved = model(x).square().mean().detach()
    for p, value in zip(model.parameters(), own, strict=True):
        p.data = value
    return loss + halved


def centred_gradients(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.sub_(p.grad.data.mean())
        p.grad.data = p.grad.data / (p.grad.norm() + 1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def perturbed(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> Tensor:
    delta = torch.zeros_like(x, requires_grad=True)
    F.mse_loss(model(x + delta), y).backward()
    assert delta.grad is not None
    delta.data = (delta + 0.1 * delta.grad.sign()).clamp(-0.2, 0.2)
    optimizer.zero_grad()
    return update(model, optimizer, x + delta.detach(), y)


def scaled_by_attribute(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> Tensor:
    return update(model, optimizer, x * model.settings["scale"][0] * model.gain(), y)


def written_argument(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return update(model, optimizer, x, y)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.settings = {"scale": [1.0]}

    def gain(self) -> float:
        return 1.0


def change(model: Model, turn: int) -> None:
    """What a user may do between calls."""
    model.settings["scale"][0] = 1.0 + turn
    if turn == 2:
        model.gain = lambda: 3.0  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "step", [lent_values, centred_gradients, perturbed, scaled_by_attribute, written_argument], ids=lambda f: f.__name__
)
def test_equals_the_plain_step(step: Step) -> None:
    torch.manual_seed(0)
    own = Model().double()
    plain = copy.deepcopy(own)
    optimizers = [SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (own, plain)]
    compiled = spmd.compile(step)
    for turn in range(4):
        x, y = torch.randn(6, 5).double(), torch.randn(6, 3).double()
        theirs = x.clone()
        change(own, turn)
        change(plain, turn)
        got, expected = compiled(own, optimizers[0], x, y), step(plain, optimizers[1], theirs, y)
        torch.testing.assert_close((got, x), (expected, theirs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(list(own.parameters()), list(plain.parameters()), rtol=1e-12, atol=1e-12)


def seeding(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(3)
    return update(model, optimizer, x + torch.rand(5), y)


def forking(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> Tensor:
    with torch.random.fork_rng():
        noise = torch.rand(5)
    return update(model, optimizer, x + noise, y)


@pytest.mark.parametrize("step", [seeding, forking], ids=lambda f: f.__name__)
def test_refused(step: Step) -> None:
    model = Model()
    with pytest.raises(SpmdError):
        spmd.compile(step)(model, SGD(model.parameters(), lr=0.1), torch.randn(6, 5), torch.randn(6, 3))


def test_arguments_that_share_memory_with_a_written_one_are_refused() -> None:
    def step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.mul_(2)
        return update(model, optimizer, x + z, y)

    model, x = Model(), torch.randn(6, 5)
    with pytest.raises(SpmdError, match="shares memory"):
        spmd.compile(step)(model, SGD(model.parameters(), lr=0.1), x, torch.randn(6, 3), x[:, :])


def test_numbers_that_differ_between_ranks_are_refused(world: World) -> None:
    for failure in world.run(_own_rate, 2, catch=True, timeout=120):
        assert failure.is_a("AgreementError") and "lr" in failure.message


def _own_rate() -> Any:
    model, optimizer = tools.setup()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank())
    return spmd.compile(update, parallel_mode=DataParallelMode("replicate"))(model, optimizer, *tools.batch())
