"""Optimizers in the captured step: state made from one trace, numbers read at each call, equal to eager step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spmd.capture import capture
from spmd.errors import CaptureError, SideEffectError, StateError
from spmd.graph.step import Role
from tests.replay import adamw, check, labelled, mlp, refused, train

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True, weight_decay=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw_fused_amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, fused=True, amsgrad=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adam_maximize": lambda p: torch.optim.Adam(p, 1e-2, maximize=True),
    "adam_capturable": lambda p: torch.optim.Adam(p, 1e-2, capturable=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """State is made by the optimizer's own code, from one trace; the learning rate is read at each call."""

    def decay(optim: Any) -> None:
        optim.param_groups[0]["lr"] *= 0.7

    model = mlp()
    check(train, model, OPTIMIZERS[name](model.parameters()), labelled(), between=decay, sizes=(6, 6, 4, 6, 6, 6, 6))


def test_a_first_step_graph_where_state_comes_from_gradients() -> None:
    model = mlp()
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)
    args = (model, optim, *labelled()(6))
    first = capture(train, args)
    assert first.init is None
    made = [o for o in first.step.outputs if o.role is Role.STATE]
    assert [o.updates for o in made] == [None] * 4
    train(*args)
    changed = first.guards.check(train, args, {})
    assert changed and changed.name == "optim.state"
    check(train, model, optim, labelled())


def test_resumed_state_is_taken_as_it_is() -> None:
    model = mlp()
    check(train, model, adamw(model), labelled(), before=3)


def test_refuses_lbfgs() -> None:
    model = mlp()
    refused(CaptureError, train, "LBFGS", model=model, optim=torch.optim.LBFGS(model.parameters()))


def test_refuses_an_optimizer_over_other_tensors() -> None:
    refused(StateError, train, "optim.param_groups[0]['params'][0]", optim=torch.optim.SGD(mlp().parameters(), 0.1))


def test_refuses_a_scheduler_inside() -> None:
    model = mlp()
    optim = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)

    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        train(model, optim, x, y)
        scheduler.step()

    refused(SideEffectError, step, "StepLR", "scheduler.step()", model=model, optim=optim)
    assert scheduler.last_epoch == 0 and optim.param_groups[0]["lr"] == 0.1
