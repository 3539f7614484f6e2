"""Every way to draw random numbers in a step gives those of one device, at any number of ranks, in every style."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import init
from torch.utils.checkpoint import checkpoint

from spmd.capture import capture
from spmd.errors import CaptureError, StateError
from tests.kinds import ALL, hold, regression

ONE = (("fully_shard", 2), ("default", 3))
Draw = Callable[[Tensor], Tensor]  # of [B, 6] to what is broadcast over it

# On activations: positive numbers where the op needs them.
DRAWS: dict[str, Draw] = {
    "dropout": lambda h: F.dropout(h, 0.4),
    "dropout in place": lambda h: F.dropout(h * 1, 0.4, inplace=True),
    "dropout of all": lambda h: h + F.dropout(h, 1.0),
    "dropout1d": lambda h: F.dropout1d(h.view(-1, 3, 2), 0.4).flatten(1),
    "dropout2d": lambda h: F.dropout2d(h.view(-1, 3, 2, 1), 0.4).flatten(1),
    "dropout3d": lambda h: F.dropout3d(h.view(-1, 3, 2, 1, 1), 0.4).flatten(1),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.4, training=True),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h.view(-1, 3, 2), 0.4, training=True).flatten(1),
    "dropout in a checkpoint": lambda h: checkpoint(lambda x: F.dropout(x.sin(), 0.4), h, use_reentrant=False),
    "attention dropout": lambda h: F.scaled_dot_product_attention(*[h.view(-1, 1, 3, 2)] * 3, dropout_p=0.3).flatten(1),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel softmax": lambda h: F.gumbel_softmax(h, tau=0.7),
    "gumbel softmax, hard": lambda h: F.gumbel_softmax(h, hard=True) + h,
    "rand like": lambda h: h + torch.rand_like(h),
    "randn like": lambda h: h * torch.randn_like(h),
    "randn like, turned": lambda h: h * torch.randn_like(h.t()).t(),
    "randint like": lambda h: h + torch.randint_like(h, 5),
    "rand": lambda h: h * torch.rand(h.shape),
    "rand for a column": lambda h: h * torch.rand(len(h), 1),
    "rand for a row": lambda h: h * torch.rand(6),
    "randn": lambda h: h + torch.randn(h.shape[0], 6),
    "randint": lambda h: h * torch.randint(0, 3, (len(h), 6)),
    "rows picked": lambda h: h[torch.randint(0, len(h), (len(h),))],
    "permuted": lambda h: h[torch.randperm(len(h))] + h[:, torch.randperm(6)],
    "normal_": lambda h: h + torch.empty_like(h).normal_(0.5, 2),
    "normal_, turned": lambda h: h + torch.empty(6, len(h)).t().normal_(),
    "uniform_": lambda h: h + torch.zeros_like(h).uniform_(-1, 1),
    "exponential_": lambda h: h * torch.empty_like(h).exponential_(2.0),
    "cauchy_": lambda h: h + torch.empty_like(h).cauchy_().clamp(-3, 3),
    "log_normal_": lambda h: h * torch.empty_like(h).log_normal_().clamp(max=3),
    "geometric_": lambda h: h * torch.empty_like(h).geometric_(0.5).clamp(max=4),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.3),
    "random_": lambda h: h + torch.zeros(len(h), 6, dtype=torch.int64).random_(0, 4),
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "bernoulli of probabilities, in place": lambda h: h * torch.empty_like(h).bernoulli_(h.detach().sigmoid()),
    "normal of means": lambda h: h + torch.normal(h.detach(), h.detach().abs() + 0.1),
    "normal of a mean": lambda h: h + torch.normal(0.0, 1.0, (len(h), 6)),
    "normal of numbers": lambda h: h + torch.normal(1.0, h.detach().abs() + 0.1),
    "multinomial": lambda h: h.gather(1, torch.multinomial(h.detach().softmax(1), 6)),
    "multinomial again": lambda h: h.gather(1, torch.multinomial(h.detach().softmax(1), 6, replacement=True)),
    "multinomial over the batch": lambda h: h[torch.multinomial(h.detach().mean(1).softmax(0), len(h), replacement=True)],
    "poisson": lambda h: h * torch.poisson(h.detach().abs()),
    "binomial": lambda h: h * torch.binomial(torch.full_like(h, 5.0), h.detach().sigmoid()),
    "a distribution": lambda h: torch.distributions.Normal(h, 1.0).rsample(),
    "a category": lambda h: h * torch.distributions.Categorical(logits=h.detach()).sample()[:, None],
    "beta": lambda h: h * torch.distributions.Beta(0.4, 0.4).sample() + h * torch.distributions.Beta(2.0, 3.0).sample((len(h), 1)),
    "dirichlet": lambda h: h * torch.distributions.Dirichlet(h.detach().abs() + 0.2).sample(),
    "gamma": lambda h: h * torch.distributions.Gamma(2.0, h.detach().abs() + 1).rsample(),
    "mixup": lambda h: mixed(h),
    "none where evaluated": lambda h: F.dropout(h, 0.4, training=False) + F.rrelu(h, training=False),
}  # fmt: skip


def mixed(h: Tensor) -> Tensor:
    weight, order = torch.rand(len(h), 1), torch.randperm(len(h))
    return weight * h + (1 - weight) * h[order]


class Branches(nn.Module):
    """A branch for each kind."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(5, 6), nn.Linear(6, 3)
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.below(x)
        return self.above(torch.stack([draw(hidden) + hidden * 0 for draw in self.draws]).mean(0))


def build(draws: Sequence[Draw], make: Any = torch.optim.SGD) -> Any:
    torch.manual_seed(1)
    model = Branches(draws)
    return model, make(model.parameters(), lr=0.05)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    loss = F.mse_loss(out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), out.detach(), torch.rand(2)


@pytest.mark.parametrize("part", range(4))
def test_draws_are_those_of_one_device(part: int) -> None:
    hold(functools.partial(build, list(DRAWS.values())[part::4]), update, layouts=[ONE[part % 2]], turns=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWS)
def test_each_alone_in_every_style(kind: str) -> None:
    hold(functools.partial(build, [DRAWS[kind]]), update, layouts=ALL, turns=2)


# ---------------------------------------------------------------------------------------------------- parameters and states

Fill = Callable[[nn.Module], Any]
FILLS: dict[str, Fill] = {
    "reset_parameters": lambda m: m.below.reset_parameters(),
    "normal_": lambda m: m.below.weight.data.normal_(0, 0.1),
    "uniform_": lambda m: m.above.weight.data.uniform_(-0.1, 0.1),
    "in no_grad": lambda m: m.above.bias.normal_(),
    "xavier": lambda m: (init.xavier_uniform_(m.below.weight), init.xavier_normal_(m.above.weight)),
    "kaiming": lambda m: (init.kaiming_uniform_(m.below.weight, a=5**0.5), init.kaiming_normal_(m.above.weight)),
    "sparse": lambda m: init.sparse_(m.below.weight, 0.4),
    "orthogonal": lambda m: init.orthogonal_(m.below.weight),
    "noise": lambda m: [p.add_(0.01 * torch.randn_like(p)) for p in m.parameters()],
    "noise on some": lambda m: m.below.weight.copy_(torch.where(torch.rand(6, 1) < 0.5, torch.randn(6, 5), m.below.weight)),
    "pruned": lambda m: m.above.weight.mul_(torch.bernoulli(torch.full_like(m.above.weight, 0.6))),
    "permuted": lambda m: m.below.weight.copy_(m.below.weight[torch.randperm(6)]),
    "all of them": lambda m: m.apply(lambda sub: sub.reset_parameters() if isinstance(sub, nn.Linear) else None),
}  # fmt: skip


def refilling(fills: Sequence[Fill]) -> Any:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
        found = update(model, optimizer, x, y)
        with torch.no_grad():
            for fill in fills:
                fill(model)
        return found[0], model(x).detach()

    return step


@pytest.mark.parametrize("part", range(2))
def test_parameters_filled_in_the_step(part: int) -> None:
    fills = list(FILLS.values())[part::2]
    hold(functools.partial(build, [F.dropout]), refilling(fills), layouts=[ONE[part]], turns=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILLS)
def test_each_filling_alone_in_every_style(kind: str) -> None:
    hold(functools.partial(build, [F.dropout]), refilling([FILLS[kind]]), layouts=ALL, turns=2)


class Noisy(torch.optim.Optimizer):
    """States that begin with random numbers, and noise in every update, as in Langevin dynamics."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "direction" not in state:
                    state["direction"] = torch.randn_like(p)
                    state["mask"] = (torch.rand(p.shape) < 0.7).to(p.dtype)
                    state["basis"] = torch.empty(p.shape[0], 2, dtype=p.dtype).normal_()
                state["direction"].mul_(0.9).add_(torch.randn_like(p), alpha=0.1)
                basis = state["basis"] @ state["basis"].t()
                p.sub_(
                    group["lr"]
                    * (p.grad * state["mask"] + 0.1 * state["direction"] + 0.01 * torch.tanh(basis @ p.grad))
                )


@pytest.mark.parametrize("layouts", [ONE, pytest.param(ALL, marks=pytest.mark.slow)])
def test_an_optimizer_that_draws(layouts: Any) -> None:
    hold(functools.partial(build, [F.dropout], Noisy), update, layouts=layouts)


def test_a_draw_that_goes_on_until_it_fits_is_refused_with_its_line() -> None:
    """trunc_normal_ draws as often as the values demand."""
    with pytest.raises(CaptureError, match=r"test_random_kinds.py.*trunc_normal_"):
        hold(functools.partial(build, [F.dropout]), refilling([lambda m: init.trunc_normal_(m.below.weight, std=0.2)]))


def test_parameters_without_values_are_refused() -> None:
    """A module on meta has nothing to be filled in a step."""
    model, _ = build([F.dropout])
    model.to("meta")
    step = refilling([FILLS["reset_parameters"]])
    with pytest.raises(StateError, match=r"(?s)meta device.*below.weight.*to_empty"):
        capture(step, (model, torch.optim.SGD(model.parameters(), lr=0.1), *regression(0)))
