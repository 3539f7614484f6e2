"""Optimizers in the captured step: state made from one trace, numbers read at each call, equal to eager step by step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spmd.capture import capture, guards_hold
from spmd.errors import CaptureError, SideEffectError, StateError
from spmd.graph.step import Role
from tests.oracle import optimizers
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


def mostly_slow(kinds: Any, *usual: Any) -> list[Any]:
    """The oracle runs all of these, each time: here a few, and the rest where all is run."""
    return [pytest.param(k, marks=() if k in usual else pytest.mark.slow) for k in kinds]


@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, "adamw", "adam_fused", "rprop"))
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


# Optimizers as users write them, and those that wrap or average: state that exists, and the first call, which has a program of its own.

CUSTOM = (
    *(optimizers.Lion, optimizers.Lars, optimizers.Lamb, optimizers.Muon, optimizers.Shampoo, optimizers.Sam),
    *(optimizers.CountingAdam, optimizers.ScheduleFree, optimizers.Decaying),
)


def climbing(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    F.cross_entropy(model(x), y).backward()
    optim.climb()
    return train(model, optim, x, y)


@pytest.mark.parametrize("kind", mostly_slow(CUSTOM, optimizers.Shampoo, optimizers.CountingAdam))
def test_custom_optimizers(kind: Any) -> None:
    step = climbing if kind is optimizers.Sam else train
    for before, sizes in ((0, (6,)), (1, (6, 4))):
        model = mlp()
        check(step, model, kind(model.parameters()), labelled(), sizes=sizes, before=before)


@pytest.mark.parametrize("kind", [optimizers.Soap, optimizers.Lookahead])
def test_a_branch_on_a_count_is_a_guard(kind: Any) -> None:
    """Every second step takes another path: a program for each, chosen by the count that is an input."""
    model = mlp()
    optim, batch = kind(model.parameters()), labelled()
    train(model, optim, *batch(6))
    programs = []
    for _ in range(2):
        captured = capture(train, (model, optim, *batch(6)))
        pairs = zip(captured.step.placeholders, captured.slots, strict=True)
        counts = {n.meta["val"].node.expr: s for n, s in pairs if isinstance(n.meta["val"], torch.SymInt)}
        for holds in (True, False):
            now = {symbol: slot.container[slot.key] for symbol, slot in counts.items() if slot.container is not None}
            assert guards_hold(captured.step, 6, now) is holds
            train(model, optim, *batch(6))
        train(model, optim, *batch(6))
        programs.append(str(captured.step))
    assert programs[0] != programs[1]


def test_groups_with_equal_rates_stay_apart() -> None:
    """Two numbers that are equal today are two inputs."""

    def halve(optim: Any) -> None:
        optim.param_groups[1]["lr"] *= 0.5

    model = mlp()
    first, *rest = model.parameters()
    check(train, model, torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1), labelled(), between=halve)


@pytest.mark.parametrize("how", ["list", "dict", "shared", "group"])
def test_refuses_state_that_is_not_a_tensor_under_a_key(how: str) -> None:
    class Nested(optimizers.Custom):
        def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
            if how == "list":
                state["sides"] = [torch.zeros_like(p)]
            elif how == "dict":
                state["adam"] = {"first": torch.zeros_like(p)}
            elif how == "shared":
                self.state["all"]["count"] = torch.zeros(())
            else:
                group["seen"].append(1)

    model = mlp()
    optim = Nested(model.parameters(), seen=[])
    refused((StateError, SideEffectError), train, "fix: keep", model=model, optim=optim)
    assert optim.param_groups[0]["seen"] == [] and not optim.state


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}])
def test_an_average_of_the_model(options: dict[str, Any]) -> None:
    def step(both: Any, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(both["model"], optim, x, y)
        both["average"].update_parameters(both["model"])
        return loss

    model = mlp()
    both = nn.ModuleDict({"model": model, "average": AveragedModel(model, **options)})
    check(step, both, adamw(model), labelled())


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(torch.optim).values() if isinstance(k, type) and "foreach" in inspect.signature(k).parameters],
)
def test_which_steps_change_gradients(kind: type[torch.optim.Optimizer]) -> None:
    """Of torch's foreach paths Nesterov momentum alone leaves other gradients behind; capture knows of it."""
    p = torch.nn.Parameter(torch.randn(4, 3))
    options = {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {}
    optim = kind([p], lr=0.1, foreach=True, **options)  # type: ignore[call-arg]
    for _ in range(2):
        p.grad = torch.randn(4, 3)
        before = p.grad.clone()
        optim.step()
        assert torch.equal(before, p.grad) == (kind is not torch.optim.SGD)
