"""Products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.vocabulary import dim, op


@op(rank=(2, 4))
def similarity(x: Tensor) -> Tensor:
    """Every row against every other."""
    flat = F.normalize(x.flatten(1), dim=1)
    return flat @ flat.T


@op(rank=(2, 4))
def gram(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    return flat.T @ flat / x.shape[0]


@op(rank=(2, 4))
def attend_rows(x: Tensor) -> Tensor:
    """Attention over the first dim."""
    flat = x.flatten(1)
    return ((flat @ flat.T / flat.shape[1]).softmax(1) @ flat).reshape(x.shape)


@op(rank=(2, 4))
def masked_similarity(x: Tensor) -> Tensor:
    """Without the diagonal."""
    flat = x.flatten(1).tanh()
    scores = flat @ flat.T / flat.shape[1]
    return scores.masked_fill(torch.eye(x.shape[0], dtype=torch.bool), -2.0).logsumexp(1)


@op(rank=(2, 4))
def causal_rows(x: Tensor) -> Tensor:
    flat = x.flatten(1).tanh()
    scores = flat @ flat.T / flat.shape[1]
    mask = torch.ones(x.shape[0], x.shape[0]).tril().bool()
    return scores.masked_fill(~mask, float("-inf")).softmax(1) @ flat


@op(rank=(3, 5))
def self_products(x: Tensor) -> Tensor:
    return x @ x.transpose(-1, -2) / x.shape[-1]


@op(rank=(3, 4))
def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.sin(), x.cos())


@op(rank=(3, 3))
def causal_attention(x: Tensor) -> Tensor:
    q = x.unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q.tanh(), is_causal=True).squeeze(1)


@op(arity=2, rank=(1, 4))
def matmul(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).tanh()


@op(arity=2, rank=(2, 4), same=True)
def cross_similarity(x: Tensor, y: Tensor) -> Tensor:
    return (x.flatten(1) @ y.flatten(1).T).tanh()


@op(arity=2, rank=(2, 2))
def einsum_outer(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("ij,kj->ikj", x, y).tanh()


@op(arity=2, rank=(2, 2), same=True)
def einsum_diagonal(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("ij,ik->jk", x, y) / x.shape[0]


@op(arity=2, rank=(3, 3), same=True)
def einsum_batched(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bij,bkj->bik", x, y).tanh()


@op(arity=2, rank=(2, 4), same=True)
def tensordot(x: Tensor, y: Tensor) -> Tensor:
    return torch.tensordot(x, y, dims=([0], [0])).tanh()


@op(arity=2, rank=(1, 1), same=True)
def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).tanh()


@op(arity=2, rank=(1, 1))
def outer(x: Tensor, y: Tensor) -> Tensor:
    return torch.outer(x, y)


@op(arity=2, rank=(2, 5), same=True, dim=dim)
def cosine(x: Tensor, y: Tensor, dim: int) -> Tensor:
    return F.cosine_similarity(x, y.sin() + 0.1, dim=dim)


@op(rank=(2, 3))
def distances(x: Tensor) -> Tensor:
    """All pairs along the last but one dim, away from the kink at zero."""
    return torch.cdist(x, x.flip(-1) + 3.0) * 0.2


@op(rank=(2, 4))
def solved(x: Tensor) -> Tensor:
    square = x.tanh() @ x.tanh().transpose(-1, -2) + 2 * torch.eye(x.shape[-2])
    return torch.linalg.solve(square, x)


@op(rank=(2, 4))
def cholesky(x: Tensor) -> Tensor:
    square = x.tanh() @ x.tanh().transpose(-1, -2) + 2 * torch.eye(x.shape[-2])
    return torch.linalg.cholesky(square)


@op(rank=(2, 4))
def inverse(x: Tensor) -> Tensor:
    square = x.tanh() @ x.tanh().transpose(-1, -2) + 2 * torch.eye(x.shape[-2])
    return torch.linalg.inv(square)


@op(rank=(2, 4))
def logdet(x: Tensor) -> Tensor:
    square = x.tanh() @ x.tanh().transpose(-1, -2) + 2 * torch.eye(x.shape[-2])
    return torch.linalg.slogdet(square).logabsdet * 0.3
