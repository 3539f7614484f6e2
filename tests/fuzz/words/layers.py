"""Images and sequences."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.vocabulary import op, pick


@op(rank=(3, 4))
def avg_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2) if x.dim() == 4 else F.avg_pool1d(x, 2)


@op(rank=(3, 4))
def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2, stride=1) if x.dim() == 4 else F.max_pool1d(x, 2)


@op(rank=(3, 4))
def adaptive_avg_pool(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 2) if x.dim() == 4 else F.adaptive_avg_pool1d(x, 2)


@op(rank=(3, 4))
def adaptive_max_pool(x: Tensor) -> Tensor:
    return F.adaptive_max_pool2d(x, 2) if x.dim() == 4 else F.adaptive_max_pool1d(x, 2)


@op(rank=(3, 4), mode=pick("nearest", "linear"))
def interpolate(x: Tensor, mode: str) -> Tensor:
    mode = {"nearest": "nearest", "linear": "bilinear" if x.dim() == 4 else "linear"}[mode]
    return F.interpolate(x, scale_factor=2, mode=mode)


@op(rank=(4, 4))
def patches(x: Tensor) -> Tensor:
    return F.unfold(x, 2, stride=2)


@op(rank=(3, 4))
def local_response(x: Tensor) -> Tensor:
    return F.local_response_norm(x, 2)
