"""What a captured graph takes for granted, and what is read anew at each call."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmd.capture import capture, guards_hold
from spmd.errors import InputError
from tests.replay import adamw, labelled, mlp, train


def test_scalars_are_guarded_or_lifted() -> None:
    def step(
        model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, alpha: float = 1.0
    ) -> torch.Tensor:
        return train(model, optim, x * alpha, y)

    model = mlp()
    optim = adamw(model)
    data = labelled()(6)
    captured = capture(step, (model, optim, *data, 1.0))
    changed = captured.guards.check(step, (model, optim, *data, 2.0), {})
    assert changed == "alpha was 1.0, is 2.0" and changed.liftable
    lifted = capture(step, (model, optim, *data, 1.0), lifted=frozenset({changed.name}))
    assert lifted.guards.check(step, (model, optim, *data, 2.0), {}) is None
    optim.param_groups[0]["weight_decay"] = 0.2
    changed = captured.guards.check(step, (model, optim, *data, 1.0), {})
    assert changed and changed.name == "optim.param_groups[0].weight_decay" and changed.liftable
    optim.param_groups[0]["lr"] = 0.5
    optim.param_groups[0]["weight_decay"] = 1e-2
    assert captured.guards.check(step, (model, optim, *data, 1.0), {}) is None
    model.eval()
    changed = captured.guards.check(step, (model, optim, *data, 1.0), {})
    assert changed and changed.name == "training"


def test_a_specialised_scalar_is_guarded() -> None:
    import math

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return train(model, optim, x * math.erf(optim.param_groups[0]["lr"]), y)

    model = mlp()
    optim = adamw(model)
    args = (model, optim, *labelled()(6))
    captured = capture(step, args)
    assert captured.guards.check(step, args, {}) is None
    optim.param_groups[0]["lr"] = 0.5
    changed = captured.guards.check(step, args, {})
    assert changed and changed.name == "optim.param_groups[0].lr"


def test_a_branch_on_the_batch_size_is_a_guard() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() if x.shape[0] <= 20 else model(x).mean()

    captured = capture(step, (mlp(), torch.randn(8, 8, dtype=torch.float64)))
    assert captured.step.batch is not None
    assert guards_hold(captured.step, 20) and not guards_hold(captured.step, 21)


def test_a_batch_of_one_and_a_specialised_batch_are_static() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).view(6, 5).sum()

    assert capture(lambda m, x: m(x), (mlp(), torch.randn(1, 8, dtype=torch.float64))).step.size == 1
    assert capture(step, (mlp(), torch.randn(6, 8, dtype=torch.float64))).step.size == 6


def test_guards_follow_replaced_parameters() -> None:
    model = mlp()
    optim = adamw(model)
    args = (model, optim, *labelled()(6))
    captured = capture(train, args)
    mapping = {}
    for sub in model.modules():
        for name, p in list(sub._parameters.items()):
            mapping[id(p)] = sub._parameters[name] = nn.Parameter(p.detach().clone())
    optim.param_groups[0]["params"] = [mapping[id(p)] for p in optim.param_groups[0]["params"]]
    assert captured.guards.check(train, args, {}) is not None
    captured.guards.rebind(mapping)
    assert captured.guards.check(train, args, {}) is None


LEVEL = 1.0


def inner_helper(x: torch.Tensor) -> torch.Tensor:
    return x * LEVEL


def helper(x: torch.Tensor) -> torch.Tensor:
    return inner_helper(x) + 1


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 5).double()

    @property
    def scaled(self) -> torch.Tensor:
        return helper(self.a.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.scaled, self.a.bias)


def test_globals_of_helpers_of_helpers_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a module's property, through two functions, to a number and to the function itself."""
    model = Helped()
    args = (model, adamw(model), *labelled()(6))
    captured = capture(train, args)
    assert captured.guards.check(train, args, {}) is None
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "LEVEL", 2.0)
        changed = captured.guards.check(train, args, {})
        assert changed and "LEVEL" in changed and changed.liftable
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "inner_helper", lambda x: x)
        changed = captured.guards.check(train, args, {})
        assert changed and "inner_helper" in changed
    assert captured.guards.check(train, args, {}) is None


def test_an_argument_in_the_memory_of_a_parameter_is_noticed() -> None:
    model = mlp()
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = labelled()(5)
    captured = capture(train, (model, optim, x, y))
    assert captured.guards.check(train, (model, optim, x, y), {}) is None
    shared = model[0].weight.data[:5]
    changed = captured.guards.check(train, (model, optim, shared, y), {})
    assert changed and "memory" in changed
    with pytest.raises(InputError, match=r"x shares memory with 0\.weight"):
        capture(train, (model, optim, shared, y))
