"""Statistics of dims."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.vocabulary import dim, dims, flag, op, pick


@op(rank=(1, 5), dims=dims, keepdim=flag)
def sum_(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    return x.sum(dims, keepdim=keepdim)


@op(rank=(1, 5), dims=dims, keepdim=flag)
def mean(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    return x.mean(dims, keepdim=keepdim)


@op(rank=(1, 5), dims=dims, correction=pick(0, 1), keepdim=flag)
def var(x: Tensor, dims: tuple[int, ...], correction: int, keepdim: bool) -> Tensor:
    return x.var(dims, correction=correction, keepdim=keepdim)


@op(rank=(1, 5), dims=dims, correction=pick(0, 1))
def std(x: Tensor, dims: tuple[int, ...], correction: int) -> Tensor:
    return x.std(dims, correction=correction)


@op(rank=(1, 5), dims=dims)
def var_mean(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    v, m = torch.var_mean(x, dims, keepdim=True)
    return (x - m) / (v + 0.1).sqrt()


@op(rank=(1, 5), dim=dim)
def standardise(x: Tensor, dim: int) -> Tensor:
    return (x - x.mean(dim, keepdim=True)) / (x.std(dim, keepdim=True) + 0.1)


@op(rank=(1, 5), dims=dims, p=pick(1, 2, 3, float("inf")))
def norm(x: Tensor, dims: tuple[int, ...], p: float) -> Tensor:
    return torch.linalg.vector_norm(x, p, dims)


@op(rank=(1, 5), dim=dim)
def normalize(x: Tensor, dim: int) -> Tensor:
    return F.normalize(x, dim=dim)


@op(rank=(1, 5), dims=dims, keepdim=flag)
def logsumexp(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    return x.logsumexp(dims, keepdim=keepdim)


@op(rank=(1, 5), dims=dims, keepdim=flag)
def amax(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    return x.amax(dims, keepdim=keepdim)


@op(rank=(1, 5), dims=dims)
def amin(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.amin(dims)


@op(rank=(1, 5), dim=dim)
def max_(x: Tensor, dim: int) -> Tensor:
    return x.max(dim).values


@op(rank=(1, 5), dim=dim)
def min_with_index(x: Tensor, dim: int) -> Tensor:
    values, indices = x.min(dim)
    return values + 0.1 * indices


@op()
def max_all(x: Tensor) -> Tensor:
    return x - x.max()


@op(rank=(1, 5), dim=dim)
def argmax(x: Tensor, dim: int) -> Tensor:
    return x * 0.1 * x.argmax(dim, keepdim=True)


@op(rank=(1, 5))
def argmin_all(x: Tensor) -> Tensor:
    return x + 0.01 * x.argmin()


@op(rank=(1, 5), dim=dim, descending=flag)
def sort(x: Tensor, dim: int, descending: bool) -> Tensor:
    return x.sort(dim, descending=descending).values


@op(rank=(1, 5), dim=dim)
def argsort(x: Tensor, dim: int) -> Tensor:
    return x + 0.1 * x.argsort(dim).argsort(dim)


@op(rank=(1, 5), dim=dim, k=pick(1, 2), largest=flag)
def topk(x: Tensor, dim: int, k: int, largest: bool) -> Tensor:
    return x.topk(k, dim, largest=largest).values


@op(rank=(1, 5), dim=dim)
def kthvalue(x: Tensor, dim: int) -> Tensor:
    return x.kthvalue(2, dim).values


@op(rank=(1, 5), dim=dim)
def median(x: Tensor, dim: int) -> Tensor:
    return x.median(dim).values


@op(rank=(1, 5), dim=dim)
def median_distance(x: Tensor, dim: int) -> Tensor:
    return x - x.nanmedian(dim, keepdim=True).values


@op(rank=(1, 5), dim=dim, q=pick(0.3, 0.75))
def quantile(x: Tensor, dim: int, q: float) -> Tensor:
    return x.quantile(q, dim)


@op()
def median_all(x: Tensor) -> Tensor:
    return x - x.median()


@op(rank=(1, 5), dim=dim)
def cumsum(x: Tensor, dim: int) -> Tensor:
    return x.cumsum(dim)


@op(rank=(1, 5), dim=dim)
def cumprod(x: Tensor, dim: int) -> Tensor:
    return (1 + 0.3 * x.tanh()).cumprod(dim)


@op(rank=(1, 5), dim=dim)
def cummax(x: Tensor, dim: int) -> Tensor:
    return x.cummax(dim).values


@op(rank=(1, 5), dim=dim)
def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    return x.logcumsumexp(dim)


@op(rank=(1, 5), dim=dim)
def prod(x: Tensor, dim: int) -> Tensor:
    return (1 + 0.3 * x.tanh()).prod(dim)


@op(rank=(1, 5), dim=dim)
def softmax(x: Tensor, dim: int) -> Tensor:
    return x.softmax(dim)


@op(rank=(1, 5), dim=dim)
def log_softmax(x: Tensor, dim: int) -> Tensor:
    return x.log_softmax(dim)


@op(rank=(1, 5), dim=dim)
def softmin(x: Tensor, dim: int) -> Tensor:
    return F.softmin(x, dim)


@op(rank=(1, 5), dim=dim)
def glu(x: Tensor, dim: int) -> Tensor:
    return F.glu(x, dim)


@op(rank=(1, 5), dim=dim)
def counted(x: Tensor, dim: int) -> Tensor:
    """A mean over what is positive: the count differs by rank."""
    mask = (x > 0).to(x.dtype)
    return (x * mask).sum(dim) / mask.sum(dim).clamp(min=1)


@op(rank=(1, 5), dim=dim)
def any_all(x: Tensor, dim: int) -> Tensor:
    return x * (1 + (x > 0.5).any(dim, keepdim=True) + 2 * (x > -0.5).all(dim, keepdim=True))


@op(rank=(1, 5))
def count_nonzero(x: Tensor) -> Tensor:
    return x / (1 + (x > 0).count_nonzero())


@op(rank=(1, 5))
def scaled_by_size(x: Tensor) -> Tensor:
    return x / (x.shape[0] ** 0.5) + 0.1 / x.numel()


@op(rank=(2, 2))
def cov(x: Tensor) -> Tensor:
    return x.cov()


@op(rank=(2, 2))
def corrcoef(x: Tensor) -> Tensor:
    return torch.corrcoef(x + 0.1 * torch.arange(x.shape[1]).sin())


@op(rank=(2, 4))
def outer_statistics(x: Tensor) -> Tensor:
    """Whitening by a covariance over the first dim."""
    flat = x.flatten(1)
    centred = flat - flat.mean(0)
    covariance = centred.T @ centred / (x.shape[0] - 1) + torch.eye(flat.shape[1])
    return torch.linalg.solve(covariance, centred.T).T
