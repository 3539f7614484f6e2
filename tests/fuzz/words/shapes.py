"""Dims moved, split, merged."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.vocabulary import dim, dims, flag, op, order, pick


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
