"""Positions and indices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.vocabulary import dim, op


@op(rank=(1, 5), dim=dim)
def positions(x: Tensor, dim: int) -> Tensor:
    """`arange` as a position: what row i gets depends on i."""
    n = x.shape[dim]
    return x + torch.arange(n).view(-1, *[1] * (x.dim() - 1 - dim)) / n


@op(rank=(1, 5), dim=dim)
def linspace(x: Tensor, dim: int) -> Tensor:
    return x * torch.linspace(0.5, 1.5, x.shape[dim]).view(-1, *[1] * (x.dim() - 1 - dim))


@op(rank=(1, 5), dim=dim)
def first_half(x: Tensor, dim: int) -> Tensor:
    n = x.shape[dim]
    return torch.where((torch.arange(n) < n // 2).view(-1, *[1] * (x.dim() - 1 - dim)), x, x.square())


@op(rank=(2, 4))
def plus_eye(x: Tensor) -> Tensor:
    return x + torch.eye(x.shape[-2], x.shape[-1])


@op(rank=(2, 4))
def square_eye(x: Tensor) -> Tensor:
    """The identity of the first dim's size times the rows."""
    return torch.eye(x.shape[0]).mul(2.0) @ x.flatten(1)


@op(rank=(1, 5), dim=dim)
def index_select(x: Tensor, dim: int) -> Tensor:
    return x.index_select(dim, torch.arange(x.shape[dim] - 1, -1, -1))


@op(rank=(1, 5), dim=dim)
def index_neighbour(x: Tensor, dim: int) -> Tensor:
    n = x.shape[dim]
    return x[(slice(None),) * dim + ((torch.arange(n) * 2 + 1) % n,)]


@op(rank=(1, 5))
def index_list(x: Tensor) -> Tensor:
    return x[[0, -1, 0]]


@op(rank=(2, 4))
def index_pairs(x: Tensor) -> Tensor:
    """One element of each row, chosen by position."""
    rows = torch.arange(x.shape[0])
    return x[rows, rows % x.shape[1]]


@op(rank=(2, 3))
def pick_label(x: Tensor) -> Tensor:
    """One element of each row, chosen by value."""
    label = x.detach().cos().argmax(1)
    return x.gather(1, label.unsqueeze(1))


@op(rank=(1, 5), dim=dim)
def sorted_by_other(x: Tensor, dim: int) -> Tensor:
    return x.gather(dim, x.detach().sin().argsort(dim))


@op(rank=(2, 4))
def permuted_rows(x: Tensor) -> Tensor:
    """Rows in an order that the values give."""
    return x[x.detach().flatten(1).sum(1).argsort()]


@op(rank=(1, 5), dim=dim)
def take_along(x: Tensor, dim: int) -> Tensor:
    return x.take_along_dim(x.detach().argmax(dim, keepdim=True), dim)


@op(rank=(1, 5), dim=dim)
def scatter_add(x: Tensor, dim: int) -> Tensor:
    return torch.zeros_like(x).scatter_add(dim, x.detach().argsort(dim), x)


@op(rank=(1, 5), dim=dim)
def scatter(x: Tensor, dim: int) -> Tensor:
    return torch.ones_like(x).scatter(dim, x.detach().argsort(dim), x)


@op(rank=(2, 4))
def index_add(x: Tensor) -> Tensor:
    """Rows summed by a class that the values give."""
    label = x.detach().flatten(1).cos().argmax(1) % 3
    return torch.zeros(3, *x.shape[1:]).index_add(0, label, x) / x.shape[0]


@op(rank=(1, 5), dim=dim)
def index_copy(x: Tensor, dim: int) -> Tensor:
    return x.index_copy(dim, torch.tensor([0, 1]), x.narrow(dim, 0, 2).sin())


@op(rank=(1, 5), dim=dim)
def index_fill(x: Tensor, dim: int) -> Tensor:
    return x.index_fill(dim, torch.tensor([0]), 0.3)


@op(rank=(2, 4))
def index_put(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])
    return x.index_put((rows, rows % x.shape[1]), torch.tensor(0.5), accumulate=True)


@op(rank=(2, 4))
def class_means(x: Tensor) -> Tensor:
    """Prototypes: means over the rows of each class, and each row against its own."""
    label = x.detach().flatten(1).sum(1).gt(0).long()
    hot = F.one_hot(label, 2).to(x.dtype)
    means = hot.T @ x.flatten(1) / hot.sum(0).clamp(min=1).unsqueeze(1)
    return x.flatten(1) - means[label]


@op(rank=(1, 5))
def bucketize(x: Tensor) -> Tensor:
    return x + 0.1 * torch.bucketize(x.detach(), torch.tensor([-0.5, 0.0, 0.5]))


@op(rank=(2, 4))
def one_hot(x: Tensor) -> Tensor:
    return x * F.one_hot(x.detach().argmax(-1), x.shape[-1])


@op(rank=(1, 5))
def masked_rows(x: Tensor) -> Tensor:
    """A padding mask with a length that differs by row."""
    rows = torch.arange(x.shape[0])
    mask = rows % 3 != 0
    return x * mask.view(-1, *[1] * (x.dim() - 1)) / mask.sum()
