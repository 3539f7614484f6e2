"""Clipping and gradient norms of every kind, over parameters that are sharded, replicated, frozen, unused, in several groups and of odd shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    parameters_to_vector,
    vector_to_parameters,
)

from spmd.errors import CaptureError
from tests.kinds import ALL, ENDS, hold, regression

Clip = Callable[[list[nn.Parameter]], Any]
INF = float("inf")
MIXED = (
    ("default", 2),
    ("zero1", 3),
)  # some parameters are split and some aren't; states are split and parameters aren't
PS = (1.0, 2.0, INF, -INF, 3.0, 0.5, 0.0)


class Mixture(nn.Module):
    """Under "default" (at least 20 elements are split) some parameters are split and some aren't; one is a number, one empty, one frozen, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale, self.row = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(1, 3))
        self.empty, self.unused = nn.Parameter(torch.randn(0, 3)), nn.Linear(3, 9)
        self.frozen = nn.Linear(5, 7).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) + self.frozen(x))
        return self.last(hidden) * self.scale + self.row + self.empty.sum()


def build(make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Any:
    torch.manual_seed(1)
    model = Mixture()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, make(trained, **{"lr": 0.05, **options})


def in_groups(make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Any:
    torch.manual_seed(1)
    model = Mixture()
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return model, make(
        [{"params": matrices, "lr": 0.1}, {"params": rest, "weight_decay": 0.1}], **{"lr": 0.05, **options}
    )


def clipping(*clips: Clip) -> Callable[..., Any]:
    """A step that clips again and again, and returns what clipping returns."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        told = [clip(list(model.parameters())) for clip in clips]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), [x for x in told if x is not None]

    return step


def grads(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None and p.grad.numel()]


def by_norm(ps: list[nn.Parameter], total: Any = None, **options: Any) -> Tensor:
    total = get_total_norm(grads(ps), **options)
    clip_grads_with_norm_(ps, 0.05, total)
    return total


def each_alone(ps: list[nn.Parameter]) -> list[Tensor]:
    return [clip_grad_norm_(p, 0.02) for p in ps if p.grad is not None and p.numel()]


def by_hand(ps: list[nn.Parameter]) -> Tensor:
    """As people write it: the norm of the norms."""
    total = torch.stack([g.norm(2) for g in grads(ps)]).norm(2)
    for g in grads(ps):
        g.mul_(torch.clamp(0.05 / (total + 1e-6), max=1.0))
    return total


def flat(ps: list[nn.Parameter]) -> Tensor:
    vector = torch.cat([g.flatten() for g in grads(ps)])
    return vector.norm()


def adaptive(ps: list[nn.Parameter]) -> None:
    """AGC: each row by the norm of the row of the parameter."""
    for p in ps:
        if p.grad is not None and p.dim() > 1 and p.numel():
            limit = p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
            size = p.grad.norm(dim=1, keepdim=True)
            p.grad.copy_(torch.where(size > limit, p.grad * (limit / size.clamp(min=1e-6)), p.grad))


def nan_of(ps: list[nn.Parameter]) -> Tensor:
    return torch.stack([g.isfinite().all() for g in grads(ps)]).all()


CLIPS: dict[str, tuple[Clip, ...]] = {
    **{
        f"norm of {p} foreach {foreach}": (
            # a power of a gradient that is 0 is infinite or ill-conditioned below 1: such norms go without the empty parameter
            lambda ps, p=p, foreach=foreach: clip_grad_norm_([q for q in ps if q.numel()], 0.05, norm_type=p, foreach=foreach),
        )
        for p in PS
        for foreach in (None, True, False)
    },
    "norm over an empty one": (lambda ps: clip_grad_norm_(ps, 0.05), lambda ps: clip_grad_norm_(ps, 0.01, 1.0)),
    "norm over the inf": (lambda ps: clip_grad_norm_([p for p in ps if p.numel()], 0.01, norm_type="inf"),),
    "value": (lambda ps: clip_grad_value_(ps, 0.01, foreach=False), lambda ps: clip_grad_value_(ps, 0.005, foreach=True)),
    "total norm": (by_norm, functools.partial(by_norm, norm_type=1.0, foreach=True), functools.partial(by_norm, norm_type=INF)),
    "each alone": (each_alone,),
    "by hand": (by_hand,),
    "flat": (flat,),
    "adaptive": (adaptive,),
    "matrices, then all": (
        lambda ps: clip_grad_norm_([p for p in ps if p.dim() > 1], 0.05),
        lambda ps: clip_grad_norm_(ps, 0.02),
        lambda ps: clip_grad_value_(ps[:2], 0.001),
        lambda ps: clip_grad_norm_(ps[0], 0.001),
        lambda ps: clip_grad_norm_((p for p in ps if p.dim() == 0), 0.001, norm_type=1.0),
    ),
    "a generator": (lambda ps: clip_grad_norm_(iter(ps), 0.05),),
    "a tensor as limit": (lambda ps: clip_grad_norm_(ps, torch.tensor(0.05)),),  # type: ignore[arg-type]
    "nothing to clip": (lambda ps: clip_grad_norm_(ps, 100.0), lambda ps: clip_grad_norm_([], 1.0)),
    "finite": (nan_of,),
}  # fmt: skip


def grouped(names: list[str], parts: int) -> list[list[str]]:
    return [names[k::parts] for k in range(parts)]


@pytest.mark.parametrize("names", grouped(list(CLIPS), 4), ids=lambda names: names[0])
def test_clipping_equals_one_device(names: list[str]) -> None:
    hold(build, clipping(*(clip for name in names for clip in CLIPS[name])), layouts=MIXED, turns=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLIPS)
def test_each_kind_alone_in_every_style(kind: str) -> None:
    hold(in_groups, clipping(*CLIPS[kind]), layouts=ALL)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {}),
}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_loop_over_parameters_and_foreach_are_one(kind: str) -> None:
    make, options = OPTIMIZERS[kind]
    for foreach in (True, False):
        step = clipping(lambda ps: clip_grad_norm_(ps, 0.05, foreach=foreach))  # noqa: B023  used within the turn
        hold(functools.partial(in_groups, make, foreach=foreach, **options), step, layouts=MIXED[:1])


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_in_every_style(kind: str, foreach: bool | None) -> None:
    make, options = OPTIMIZERS[kind]
    step = clipping(lambda ps: clip_grad_norm_(ps, 0.05, foreach=foreach))
    hold(functools.partial(in_groups, make, foreach=foreach, **options), step, layouts=ALL)


def test_norms_that_arent_finite_come_out_as_on_one_device() -> None:
    """error_if_nonfinite=False: everything becomes NaN or 0, as eager has it."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def batch(turn: int) -> tuple[Tensor, Tensor]:
        x, y = regression(turn)
        x[4, 2] = INF if turn else torch.nan  # on the last rank alone
        return x, y

    hold(build, step, batch, layouts=ENDS, turns=2)


def test_raising_for_norms_that_arent_finite_is_refused_with_its_line() -> None:
    step = clipping(lambda ps: clip_grad_norm_(ps, 0.05, error_if_nonfinite=True))
    with pytest.raises(CaptureError, match=r"(?s)test_clip_kinds.py.*error_if_nonfinite.*fix:"):
        hold(build, step)


def test_gradients_by_one_vector() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, [model.first.weight, model.last.bias])
        total = get_total_norm(gradients)
        with torch.no_grad():
            some = [model.first.weight, model.last.bias]
            vector = parameters_to_vector(some) - 0.1 * torch.cat([g.flatten() for g in gradients]) / total
            vector_to_parameters(vector, some)
        return total

    hold(build, step, layouts=ENDS)
