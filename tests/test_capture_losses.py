"""Losses, norms, draws and other ops that capture decomposes: equal to eager, gradients included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.replay import check, labelled, mlp


def _target(a: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, 5, dtype=a.dtype).expand_as(a)


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mse": lambda a: F.mse_loss(a, _target(a)),
    "l1": lambda a: F.l1_loss(a, _target(a), reduction="sum"),
    "smooth_l1": lambda a: F.smooth_l1_loss(a, _target(a)),
    "huber": lambda a: F.huber_loss(a, _target(a)),
    "bce": lambda a: F.binary_cross_entropy(a.sigmoid(), _target(a)),
    "bce_logits": lambda a: F.binary_cross_entropy_with_logits(a, _target(a), pos_weight=torch.full((5,), 2.0, dtype=a.dtype)),
    "moments": lambda a: a.std() + a.var(0).sum() + torch.std_mean(a, 1)[0].sum() + torch.var_mean(a, correction=0)[0],
    "norms": lambda a: a.norm(3) + a.norm(dim=1).sum() + torch.linalg.vector_norm(a, float("inf")) + a.norm(1),
    "like": lambda a: (torch.rand_like(a) * a + torch.randn_like(a.t()).t() * a).sum(),
    "draws": lambda a: (torch.empty_like(a.t()).uniform_() * a.t()).sum() + (torch.empty_like(a.t()).normal_() * a.t()).sum(),
    "gumbel": lambda a: F.gumbel_softmax(a).square().sum(),
    "alpha_dropout": lambda a: F.alpha_dropout(a, 0.3).sum() + F.dropout(a.t(), 0.4).sum() + F.dropout(a.t() * 1, 0.4, inplace=True).sum(),
    "layer_norms": lambda a: F.layer_norm(a, (5,)).square().sum() + F.rms_norm(a, (5,)).pow(3).sum(),
    "sizes": lambda a: a.squeeze().view(-1).sum() + sum(z.square().sum() for z in a.split(2, 1)) + a[:, None].squeeze(1).sum(),
    "logsumexp": lambda a: torch.logsumexp(a, 0).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_decompositions(name: str) -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = LOSSES[name](model(x))
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    model = mlp()
    captured = check(step, model, torch.optim.SGD(model.parameters(), 0.1), labelled(), tolerance=1e-10)
    assert captured.step.batch is not None
