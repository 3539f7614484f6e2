"""Losses, norms, draws and statistics: values and gradients as eager's, at two batch sizes from one trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.replay import check, labelled, mlp


def target(a: Tensor) -> Tensor:
    return torch.linspace(0.1, 0.9, 5, dtype=a.dtype).expand_as(a)


def classes(a: Tensor) -> Tensor:
    return torch.arange(a.shape[0]) % a.shape[1]


def signs(a: Tensor) -> Tensor:
    return torch.where(torch.arange(a.shape[0]) % 2 == 0, 1.0, -1.0).to(a.dtype)


def listed(a: Tensor) -> Tensor:
    """Several classes a sample, the list ended by -1; a later one doesn't count."""
    first = classes(a)
    return torch.stack([first, (first + 1) % 5, -torch.ones_like(first), first, first], 1)


def frames(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Seven frames a sample, and three labels."""
    n = torch.ones_like(classes(a))
    return a.log_softmax(1).expand(7, -1, -1), (torch.arange(3) + 1) * n[:, None], 7 * n, 3 * n


weight = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)

# Each takes `reduction` too.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "l1": lambda a, **r: F.l1_loss(a, target(a), **r),
    "mse": lambda a, **r: F.mse_loss(a, target(a), **r),
    "mse weighted": lambda a, **r: F.mse_loss(a, target(a), weight=target(a), **r),
    "smooth l1": lambda a, **r: F.smooth_l1_loss(a, target(a), beta=0.5, **r),
    "huber": lambda a, **r: F.huber_loss(a, target(a), delta=0.7, **r),
    "bce": lambda a, **r: F.binary_cross_entropy(a.sigmoid(), target(a), weight=target(a), **r),
    "bce logits": lambda a, **r: F.binary_cross_entropy_with_logits(a, target(a), pos_weight=weight, **r),
    "cross entropy": lambda a, **r: F.cross_entropy(a, classes(a), weight=weight, label_smoothing=0.1, ignore_index=2, **r),
    "cross entropy soft": lambda a, **r: F.cross_entropy(a, target(a).softmax(1), weight=weight, label_smoothing=0.1, **r),
    "cross entropy 2d": lambda a, **r: F.cross_entropy(a[:, :, None].expand(-1, -1, 3), classes(a)[:, None].expand(-1, 3), ignore_index=1, **r),
    "nll": lambda a, **r: F.nll_loss(a.log_softmax(1), classes(a), weight=weight, **r),
    "nll 3d": lambda a, **r: F.nll_loss(a.log_softmax(1)[:, :, None, None].expand(-1, -1, 3, 2), classes(a)[:, None, None].expand(-1, 3, 2), **r),
    "kl": lambda a, **r: F.kl_div(a.log_softmax(1), target(a).log_softmax(1), log_target=True, **r),
    "poisson": lambda a, **r: F.poisson_nll_loss(a, 3 * target(a), full=True, **r),
    "poisson rate": lambda a, **r: F.poisson_nll_loss(a.exp(), 3 * target(a), log_input=False, **r),
    "gaussian": lambda a, **r: F.gaussian_nll_loss(a, target(a), a.square() + 0.1, full=True, **r),
    "gaussian one variance": lambda a, **r: F.gaussian_nll_loss(a, target(a), a[:, :1].square() + 0.1, **r),
    "gaussian number": lambda a, **r: F.gaussian_nll_loss(a, target(a), 0.5, **r),
    "hinge embedding": lambda a, **r: F.hinge_embedding_loss(a, signs(a)[:, None].expand_as(a), **r),
    "margin ranking": lambda a, **r: F.margin_ranking_loss(a[:, 0], a[:, 1], signs(a), margin=0.1, **r),
    "soft margin": lambda a, **r: F.soft_margin_loss(a, signs(a)[:, None].expand_as(a), **r),
    "multilabel soft margin": lambda a, **r: F.multilabel_soft_margin_loss(a, (target(a) > 0.5).to(a.dtype), **r),
    "multi margin": lambda a, **r: F.multi_margin_loss(a, classes(a), weight=weight, margin=0.8, **r),
    "multi margin squared": lambda a, **r: F.multi_margin_loss(a, classes(a), p=2, **r),
    "multilabel margin": lambda a, **r: F.multilabel_margin_loss(a, listed(a), **r),
    "cosine embedding": lambda a, **r: F.cosine_embedding_loss(a, target(a), signs(a), **r),
    "triplet": lambda a, **r: F.triplet_margin_loss(a, target(a), target(a).flip(1), swap=True, **r),
    "triplet distance": lambda a, **r: F.triplet_margin_with_distance_loss(a, target(a), target(a).flip(1), **r),
    "ctc": lambda a, **r: F.ctc_loss(*frames(a), **r),
    "ctc joined": lambda a, **r: F.ctc_loss(frames(a)[0], frames(a)[1].flatten(), *frames(a)[2:], zero_infinity=True, **r),
}  # fmt: skip

OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "moments": lambda a: a.std() + a.var(0).sum() + torch.std_mean(a, 1)[0].sum() + torch.var_mean(a, correction=0)[0],
    "norms": lambda a: a.norm(3) + a.norm(dim=1).sum() + torch.linalg.vector_norm(a, float("inf")) + a.norm(1),
    "like": lambda a: (torch.rand_like(a) * a + torch.randn_like(a.t()).t() * a).sum(),
    "draws": lambda a: (torch.empty_like(a.t()).uniform_() * a.t()).sum() + (torch.empty_like(a.t()).normal_() * a.t()).sum(),
    "gumbel": lambda a: F.gumbel_softmax(a).square().sum(),
    "alpha_dropout": lambda a: F.alpha_dropout(a, 0.3).sum() + F.dropout(a.t(), 0.4).sum() + F.dropout(a.t() * 1, 0.4, inplace=True).sum(),
    "layer_norms": lambda a: F.layer_norm(a, (5,)).square().sum() + F.rms_norm(a, (5,)).pow(3).sum(),
    "sizes": lambda a: a.squeeze().view(-1).sum() + sum(z.square().sum() for z in a.split(2, 1)) + a[:, None].squeeze(1).sum(),
    "logsumexp": lambda a: torch.logsumexp(a, 0).sum(),
    "default generator": lambda a: (torch.rand(5, generator=torch.default_generator, dtype=a.dtype) * a).sum(),
}  # fmt: skip


def train_with(loss: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A step that weighs the elements of what `loss` gives differently."""

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        value = loss(model(x))
        (value * torch.linspace(1, 2, value.numel(), dtype=value.dtype).view_as(value)).sum().backward()
        optim.step()
        optim.zero_grad()
        return value.detach()

    return step


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    """All reductions in one graph, each with a value and a gradient of its own."""

    def step(model: nn.Module, optim: None, x: Tensor, y: Tensor) -> list[Tensor]:
        found = []
        for reduction in ("mean", "sum", "none"):
            out = model(x)
            value = LOSSES[name](out, reduction=reduction)
            found += [value.detach(), torch.autograd.grad(value.square().sum(), out)[0]]
        return found

    captured = check(step, mlp(), None, labelled(), tolerance=1e-10, sizes=(6, 4))
    assert captured.step.batch is not None


@pytest.mark.parametrize("name", OTHERS)
def test_decompositions(name: str) -> None:
    model = mlp()
    optim = torch.optim.SGD(model.parameters(), 0.1)
    captured = check(train_with(OTHERS[name]), model, optim, labelled(), tolerance=1e-10)
    assert captured.step.batch is not None


def test_batch_norm_that_averages_over_all_batches() -> None:
    """momentum=None: the weight of a batch is one over their number, which is a buffer."""
    model = nn.Sequential(mlp(), nn.BatchNorm1d(5, momentum=None).double())
    check(train_with(torch.square), model, torch.optim.SGD(model.parameters(), 0.1), labelled())


def test_a_negative_variance_is_told() -> None:
    def step(model: nn.Module, optim: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(model(x), model(x), model(x))

    with pytest.raises(RuntimeError, match="negative entry"):
        check(step, mlp(), None, labelled())
