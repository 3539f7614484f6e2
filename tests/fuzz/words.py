"""The vocabulary: functions of one, two or three values. None of them knows which dim carries the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.vocabulary import Op, dim, dims, flag, op, order, pick, word

Unary = Callable[[Tensor], Tensor]
Binary = Callable[[Tensor, Tensor], Tensor]

# ---- elementwise

POINTWISE: Mapping[str, Unary] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, -0.3),
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "erf": torch.erf,
    "sinc": torch.sinc,
    "exp": lambda x: torch.exp(-x.square()),
    "expm1": lambda x: torch.expm1(torch.tanh(x)),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log": lambda x: torch.log(x.square() + 0.5),
    "sqrt": lambda x: torch.sqrt(x.square() + 0.1),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 0.3),
    "reciprocal": lambda x: 1 / (1 + x.square()),
    "square": lambda x: torch.tanh(x).square(),
    "pow": lambda x: torch.tanh(x) ** 3,
    "pow_number": lambda x: 2.0 ** torch.tanh(x),
    "abs": torch.abs,
    "neg": torch.neg,
    "clamp": lambda x: x.clamp(-0.7, 0.9),
    "nan_to_num": lambda x: torch.nan_to_num(x),
    "masked_fill": lambda x: x.masked_fill(x > 0.4, 0.25),
    "where": lambda x: torch.where(x > 0, x.sin(), 0.5 * x),
    "straight_through": lambda x: x + (x.round() - x).detach(),
    "sign": lambda x: x + x.sign().detach(),
    "floor": lambda x: x - torch.floor(x),
    "logit": lambda x: torch.logit(x.sigmoid(), eps=1e-4),
    "xlogy": lambda x: torch.xlogy(x.sigmoid(), x.sigmoid()),
    "to_and_fro": lambda x: x.double().contiguous().clone() * x.new_full((), 0.5),
    "added_number": lambda x: 0.3 - 2 * x,
    "in_place": lambda x: x.clone().mul_(0.5).add_(0.1).sin_(),
    "in_place_rows": lambda x: _write_first(x),
}


def _write_first(x: Tensor) -> Tensor:
    y = x.clone()
    if y.dim():
        y[..., 0] = y[..., 0] * 2
        y[0] += 0.5
    return y


for _name, _unary in POINTWISE.items():
    word(Op(_name, _unary))

PAIRS: Mapping[str, Binary] = {
    "add": torch.add,
    "sub": lambda x, y: torch.sub(x, y, alpha=0.5),
    "mul": torch.mul,
    "div": lambda x, y: x / (1 + y.square()),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "logaddexp": torch.logaddexp,
    "atan2": lambda x, y: torch.atan2(x, y.square() + 0.5),
    "hypot": lambda x, y: torch.hypot(x, y.square() + 0.5),
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.2),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, 1 + y.square()),
    "where_of_two": lambda x, y: torch.where(x > y, x, y.sin()),
    "copysign": lambda x, y: torch.copysign(x, y.detach()),
    "gate": lambda x, y: x * y.sigmoid(),
}
for _name, _binary in PAIRS.items():
    word(Op(_name, _binary, arity=2))

# ---- dims moved, split, merged


@op(rank=(2, 5), first=dim)
def flatten(x: Tensor, first: int) -> Tensor:
    """Two neighbours become one dim."""
    first = min(first, x.dim() - 2)
    return x.flatten(first, first + 1)


@op(rank=(2, 5))
def flatten_all(x: Tensor) -> Tensor:
    return x.reshape(-1)


@op(rank=(2, 5))
def flatten_rest(x: Tensor) -> Tensor:
    return x.flatten(1)


@op(rank=(1, 4), dim=dim, parts=pick(2, 3), outer=flag)
def unflatten(x: Tensor, dim: int, parts: int, outer: bool) -> Tensor:
    """One dim becomes two; needs a size that divides."""
    return x.unflatten(dim, (parts, -1) if outer else (-1, parts))


@op(rank=(2, 5), order=order)
def permute(x: Tensor, order: tuple[int, ...]) -> Tensor:
    return x.permute(order)


@op(rank=(2, 5), a=dim, b=dim)
def transpose(x: Tensor, a: int, b: int) -> Tensor:
    return x.transpose(a, b)


@op(rank=(1, 4), dim=dim)
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    return x.unsqueeze(dim)


@op(rank=(1, 5))
def squeeze(x: Tensor) -> Tensor:
    return x.squeeze() if 1 in x.shape else x[..., 0]


@op(rank=(1, 4), dim=dim, times=pick(2, 3))
def expand(x: Tensor, dim: int, times: int) -> Tensor:
    return x.unsqueeze(dim).expand(*x.shape[:dim], times, *x.shape[dim:])


@op(rank=(1, 4), dim=dim, times=pick(2, 3))
def repeat(x: Tensor, dim: int, times: int) -> Tensor:
    return x.repeat([times if d == dim else 1 for d in range(x.dim())])


@op(rank=(1, 4), dim=dim)
def repeat_interleave(x: Tensor, dim: int) -> Tensor:
    return x.repeat_interleave(2, dim)


@op(rank=(1, 5), dims=dims)
def flip(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.flip(dims)


@op(rank=(1, 5), dim=dim, shift=pick(1, -1, 3))
def roll(x: Tensor, dim: int, shift: int) -> Tensor:
    return x.roll(shift, dim)


@op(rank=(1, 4), shift=pick(1, 2))
def roll_flat(x: Tensor, shift: int) -> Tensor:
    return x.roll(shift)


@op(rank=(1, 5), dim=dim, before=pick(0, 1), after=pick(0, 1, 2))
def pad(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [before, after], value=0.2)


@op(rank=(2, 3), mode=pick("reflect", "replicate", "circular"))
def pad_mode(x: Tensor, mode: str) -> Tensor:
    return F.pad(x, [1, 1], mode=mode)


@op(rank=(1, 5), dim=dim, start=pick(0, 1), stop=pick(None, -1), step=pick(1, 2))
def cut(x: Tensor, dim: int, start: int, stop: int | None, step: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


@op(rank=(1, 5), dim=dim, length=pick(1, 2, 3))
def narrow(x: Tensor, dim: int, length: int) -> Tensor:
    return x.narrow(dim, 0, length)


@op(rank=(1, 5), dim=dim, at=pick(0, -1, 1))
def select(x: Tensor, dim: int, at: int) -> Tensor:
    return x.select(dim, at)


@op(rank=(1, 5), dim=dim, parts=pick(2, 3))
def chunk_swap(x: Tensor, dim: int, parts: int) -> Tensor:
    return torch.cat([*reversed(x.chunk(parts, dim))], dim)


@op(rank=(1, 5), dim=dim)
def chunk_first(x: Tensor, dim: int) -> Tensor:
    return x.chunk(2, dim)[0]


@op(rank=(1, 5), dim=dim)
def split_sizes(x: Tensor, dim: int) -> Tensor:
    n = x.shape[dim]
    first, second = x.split([n // 3, n - n // 3], dim)
    return torch.cat([second, first.sin()], dim)


@op(rank=(1, 5), dim=dim)
def halves_product(x: Tensor, dim: int) -> Tensor:
    half = x.shape[dim] // 2
    return x.narrow(dim, 0, half) * x.narrow(dim, half, half)


@op(rank=(1, 5), dim=dim)
def tensor_split(x: Tensor, dim: int) -> Tensor:
    first, second = x.tensor_split(2, dim)
    return torch.cat([first * 0.5, second], dim)


@op(rank=(1, 5), dim=dim)
def unbind_stack(x: Tensor, dim: int) -> Tensor:
    return torch.stack(x.unbind(dim)[::-1], dim)


@op(arity=2, rank=(1, 5), dim=dim)
def cat(x: Tensor, y: Tensor, dim: int) -> Tensor:
    return torch.cat([x, y], dim)


@op(arity=2, rank=(0, 4), same=True, dim=pick(0, -1))
def stack(x: Tensor, y: Tensor, dim: int) -> Tensor:
    return torch.stack([x, y], dim)


@op(rank=(1, 5), dim=dim)
def cat_self(x: Tensor, dim: int) -> Tensor:
    return torch.cat([x, x.cos(), x[(slice(None),) * dim + (slice(0, 1),)]], dim)


@op(rank=(1, 5), dim=dim)
def plus_one_row(x: Tensor, dim: int) -> Tensor:
    """Size n + 1: a zero row in front, as a class token or a shifted sequence has it."""
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, 1)), x], dim)


@op(rank=(1, 5), dim=dim)
def shifted(x: Tensor, dim: int) -> Tensor:
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim)


@op(rank=(1, 4), dim=dim, step=pick(1, 2))
def unfold(x: Tensor, dim: int, step: int) -> Tensor:
    return x.unfold(dim, 2, step)


@op(rank=(2, 4), lower=flag, offset=pick(0, 1, -1))
def triangle(x: Tensor, lower: bool, offset: int) -> Tensor:
    return x.tril(offset) if lower else x.triu(offset)


@op(rank=(2, 4), a=dim, b=dim)
def diagonal(x: Tensor, a: int, b: int) -> Tensor:
    return x.diagonal(0, a, b if a != b else (a + 1) % x.dim())


@op(rank=(1, 3))
def diag_embed(x: Tensor) -> Tensor:
    return torch.diag_embed(x)


@op(rank=(2, 4), a=dim, b=dim)
def rot90(x: Tensor, a: int, b: int) -> Tensor:
    return x.rot90(1, (a, b if a != b else (a + 1) % x.dim()))


@op(rank=(4, 4), up=flag)
def pixels(x: Tensor, up: bool) -> Tensor:
    return F.pixel_shuffle(x, 2) if up else F.pixel_unshuffle(x, 2)


@op(rank=(1, 4), dim=dim)
def diff(x: Tensor, dim: int) -> Tensor:
    return x.diff(dim=dim)


# ---- statistics


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


# ---- products


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


# ---- positions and indices


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


# ---- random numbers


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


# ---- images and sequences


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
