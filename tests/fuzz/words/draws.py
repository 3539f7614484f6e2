"""Random numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.vocabulary import dim, op, pick


@op(p=pick(0.2, 0.5))
def dropout(x: Tensor, p: float) -> Tensor:
    return F.dropout(x, p)


@op(rank=(3, 4))
def dropout_channels(x: Tensor) -> Tensor:
    return F.dropout2d(x, 0.3) if x.dim() == 4 else F.dropout1d(x, 0.3)


@op()
def noise(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(x.shape)


@op(rank=(1, 5))
def mixup(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(x.shape[0])]


@op(rank=(1, 5))
def bernoulli(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full(x.shape, 0.6))


@op(rank=(1, 5), dim=dim)
def gumbel(x: Tensor, dim: int) -> Tensor:
    return F.gumbel_softmax(x, dim=dim)
