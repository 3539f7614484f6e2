"""Losses of the programs: functions of the last value, two targets and two labels a sample. The last value may have any shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows(v: Tensor, n: int) -> Tensor:
    """One row of scores a sample where the first dim says so, else the same row for all."""
    v = v.tanh() if v.dim() else v.tanh().reshape(1)
    if v.shape[0] == n and v.dim() > 1:
        return v.flatten(1)
    return v.flatten()[:7].expand(n, -1) if v.shape[0] != n else torch.stack([v, v.sin(), v.cos()], 1)


def of_rows(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Loss:
    return lambda v, y, k: loss(rows(v, y.shape[0]), y, k[:, 0])


def classes(v: Tensor, k: Tensor) -> Tensor:
    return k % v.shape[1]


def masked(v: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """A mean over the samples with positive targets: their number differs by rank."""
    mask = (y[:, 0] > 0).to(v.dtype)
    return ((v.mean(1) - y[:, 1]).square() * mask).sum() / mask.sum().clamp(min=1)


def ignored(v: Tensor, k: Tensor) -> Tensor:
    return torch.where(k % 3 == 0, -100, k % v.shape[1])


def contrastive(v: Tensor, y: Tensor, k: Tensor) -> Tensor:
    v = F.normalize(torch.cat([v, y], 1), dim=1)
    return F.cross_entropy(v @ v.roll(1, 1).T / 0.5, torch.arange(v.shape[0]))


def supervised(v: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """Pairs of one class are pulled together."""
    same = (k[:, None] % 3 == k[None, :] % 3).to(v.dtype)
    distance = (v[:, None] - v[None, :]).square().sum(-1)
    return (same * distance + (1 - same) * torch.exp(-distance)).sum() / same.numel()


def triplet(v: Tensor, y: Tensor, k: Tensor) -> Tensor:
    v = torch.cat([v, y], 1)
    return F.triplet_margin_loss(v, v.roll(1, 0), v.roll(2, 0), margin=5.0)


def ranked(v: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """Samples in the order of their targets."""
    return v.mean(1)[y[:, 0].argsort()].diff().sigmoid().mean()


def correlation(v: Tensor, y: Tensor, k: Tensor) -> Tensor:
    a = v.mean(1) - v.mean() + 0.1 * y[:, 1]
    b = y[:, 0] - y[:, 0].mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 0.1)


def decorrelated(v: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """Barlow Twins: a cross-correlation matrix over the batch, near the identity."""
    a = torch.cat([v, y], 1)
    a = (a - a.mean(0)) / (a.std(0) + 0.3)
    c = a.T @ a.roll(1, 0) / a.shape[0]
    return (c - torch.eye(c.shape[0])).square().sum() / c.numel()


LOSSES: dict[str, Loss] = {
    "squares": lambda v, y, k: v.square().mean(),
    "sum": lambda v, y, k: v.tanh().square().sum(),
    "logsumexp": lambda v, y, k: v.tanh().flatten().logsumexp(0),
    "norm": lambda v, y, k: (v.tanh() + 0.1).norm(),
    "spread": lambda v, y, k: v.tanh().add(y.mean()).flatten().var(0, unbiased=False) + v.mean(),
    "per_sample": lambda v, y, k: v.tanh().sin().sum() / y.shape[0],
    "largest": lambda v, y, k: v.tanh().max() + 0.1 * v.mean(),
    "median": lambda v, y, k: v.tanh().median() + 0.1 * v.mean(),
    "mse": of_rows(lambda v, y, k: F.mse_loss(v, y[:, :1].expand_as(v))),
    "smooth_l1": of_rows(lambda v, y, k: F.smooth_l1_loss(v, y[:, :1].expand_as(v), reduction="sum")),
    "huber": of_rows(lambda v, y, k: F.huber_loss(v.mean(1), y[:, 0])),
    "weighted": of_rows(lambda v, y, k: ((v - y[:, :1]).square().mean(1) * y[:, 1].exp()).sum() / y[:, 1].exp().sum()),
    "masked": of_rows(masked),
    "bce": of_rows(lambda v, y, k: F.binary_cross_entropy_with_logits(v.mean(1), (y[:, 0] > 0).to(v.dtype))),
    "bce_weighted": of_rows(
        lambda v, y, k: F.binary_cross_entropy_with_logits(
            v, (y[:, :1] > 0).to(v.dtype).expand_as(v), weight=y[:, 1:].abs(), pos_weight=torch.tensor(2.0)
        )
    ),
    "cross_entropy": of_rows(lambda v, y, k: F.cross_entropy(v, classes(v, k))),
    "cross_entropy_sum": of_rows(lambda v, y, k: F.cross_entropy(v, classes(v, k), reduction="sum")),
    "cross_entropy_ignored": of_rows(lambda v, y, k: F.cross_entropy(v, ignored(v, k))),
    "cross_entropy_weighted": of_rows(
        lambda v, y, k: F.cross_entropy(v, classes(v, k), weight=torch.linspace(0.5, 2, v.shape[1]))
    ),
    "cross_entropy_smoothed": of_rows(
        lambda v, y, k: F.cross_entropy(
            v, ignored(v, k), weight=torch.linspace(0.5, 2, v.shape[1]), label_smoothing=0.1
        )
    ),
    "cross_entropy_soft": of_rows(lambda v, y, k: F.cross_entropy(v, (v.detach() + y[:, :1]).softmax(1))),
    "nll_weighted_by_sample": of_rows(
        lambda v, y, k: (F.nll_loss(v.log_softmax(1), classes(v, k), reduction="none") * y[:, 0].abs()).mean()
    ),
    "picked": of_rows(lambda v, y, k: -v.log_softmax(1)[torch.arange(v.shape[0]), classes(v, k)].mean()),
    "kl": of_rows(lambda v, y, k: F.kl_div(v.log_softmax(1), v.detach().roll(1, 0).softmax(1), reduction="batchmean")),
    "poisson": of_rows(lambda v, y, k: F.poisson_nll_loss(v, k[:, None].expand_as(v).to(v.dtype) / 60)),
    "margin": of_rows(lambda v, y, k: F.multi_margin_loss(v, classes(v, k))),
    "contrastive": of_rows(contrastive),
    "supervised": of_rows(supervised),
    "triplet": of_rows(triplet),
    "ranked": of_rows(ranked),
    "correlation": of_rows(correlation),
    "decorrelated": of_rows(decorrelated),
}
