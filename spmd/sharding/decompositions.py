"""Decompositions of ops along a split dim: functions with the op's own signature, over whole tensors, of sums, maxima and elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def dims_of(x: torch.Tensor, dim: Any) -> list[int]:
    """A dim, a list of them, or all where there's none."""
    if dim is None or dim == []:
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]


def opmath(x: torch.Tensor) -> torch.Tensor:
    """Low precision is summed in float32, as the kernels do."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


# ---------------------------------------------------------------------------------------------- statistics


def moments(x: torch.Tensor, dims: list[int], correction: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean over `dims`, which stay as dims of size 1: two sums."""
    n = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, True) / n
    centred = x - mean
    square = (centred * centred.conj()).real if x.is_complex() else centred * centred
    return square.sum(dims, True) / (n - (1 if correction is None else correction)), mean


def var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = dims_of(x, dim)
    variance, mean = moments(opmath(x), dims, correction)
    if not keepdim:
        variance, mean = variance.squeeze(dims), mean.squeeze(dims)
    return variance.to(x.real.dtype if x.is_complex() else x.dtype), mean.to(x.dtype)


def std_mean(x: torch.Tensor, dim: Any = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    variance, mean = var_mean(opmath(x), dim, **options)
    return variance.sqrt().to(x.real.dtype if x.is_complex() else x.dtype), mean.to(x.dtype)


def var(x: torch.Tensor, dim: Any = None, **options: Any) -> torch.Tensor:
    return var_mean(x, dim, **options)[0]


def std(x: torch.Tensor, dim: Any = None, **options: Any) -> torch.Tensor:
    return std_mean(x, dim, **options)[0]


def vector_norm(
    x: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims, result = dims_of(x, dim), (dtype or x.dtype).to_real()
    a = opmath(x if dtype is None else x.to(dtype)).abs()
    if ord == math.inf:
        return a.amax(dims, keepdim).to(result)
    if ord == -math.inf:
        return a.amin(dims, keepdim).to(result)
    if ord == 0:
        return (a != 0).to(result).sum(dims, keepdim)
    powers = a if ord == 1 else a * a if ord == 2 else a**ord
    total = powers.sum(dims, keepdim)
    return (total if ord == 1 else total.sqrt() if ord == 2 else total ** (1.0 / ord)).to(result)


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Output, mean, inverse deviation, new running mean and variance, by the statistics of `x`."""
    high, dims, shape = opmath(x), [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]
    variance, mean = moments(high, dims, 0)
    inverse = (variance + eps).rsqrt()
    out = (high - mean) * inverse
    out = out if weight is None else out * weight.to(high.dtype).view(shape)
    out = out if bias is None else out + bias.to(high.dtype).view(shape)
    n = x.numel() // x.shape[1]
    if running_mean is not None:
        running_mean = mean.squeeze(dims).to(running_mean.dtype) * momentum + running_mean * (1 - momentum)
    if running_var is not None:
        unbiased = variance.squeeze(dims) * (n / (n - 1))
        running_var = unbiased.to(running_var.dtype) * momentum + running_var * (1 - momentum)
    return out.to(x.dtype), mean.squeeze(dims), inverse.squeeze(dims), running_mean, running_var


def batch_norm_no_statistics(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


# ---------------------------------------------------------------------------------------------- softmax and its kin


def highest(x: torch.Tensor, dim: Any) -> torch.Tensor:
    """The maximum to subtract before exp: finite, so that a row of -inf gives what it gives in eager."""
    top = x.amax(dim, True)
    return torch.where(top.abs() == math.inf, torch.zeros_like(top), top)


def softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    high = opmath(x)
    e = (high - high.amax([dim], True)).exp()
    return (e / e.sum([dim], True)).to(torch.float32 if half_to_float else x.dtype)


def safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    high = opmath(x.to(dtype or x.dtype))
    masked = high.amax([dim], True) == -math.inf
    return torch.where(masked, torch.zeros_like(high), softmax(high, dim)).to(dtype or x.dtype)


def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    high = opmath(x)
    shifted = high - high.amax([dim], True)
    return (shifted - shifted.exp().sum([dim], True).log()).to(torch.float32 if half_to_float else x.dtype)


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    product = opmath(grad) * output
    return (product - output * product.sum([dim], True)).to(input_dtype)


def log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    high = opmath(grad)
    return (high - output.exp() * high.sum([dim], True)).to(input_dtype)


def logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    high = opmath(x)
    top = highest(high, dim)
    total = (high - top).exp().sum(dim, True).log() + top
    return (total if keepdim else torch.squeeze(total, dim)).to(x.dtype)


def first_at(x: torch.Tensor, best: torch.Tensor, dim: int) -> torch.Tensor:
    """Where along `dim` the value `best` (of size 1 there) stands first; a NaN counts as best."""
    n = x.shape[dim]
    place = torch.arange(n, device=x.device).view([n if d == dim % x.dim() else 1 for d in range(x.dim())])
    return torch.where((x == best) | (x != x), place, n).amin([dim], True)


def extremum_along(amax: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def function(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        best = amax(x, [dim], True)
        found = best, first_at(x, best, dim)
        return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))

    return function


def place_of(amax: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        if dim is None:
            whole = x.reshape(-1)
            place = first_at(whole, amax(whole, [0], True), 0)
            return place.view([1] * x.dim() if keepdim else [])
        place = first_at(x, amax(x, [dim], True), dim)
        return place if keepdim else place.squeeze(dim)

    return function


def triangle(keep: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
        mask = keep(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device), diagonal)
        return torch.where(mask, x, torch.zeros_like(x))

    return function


def on_diagonal(x: torch.Tensor, dim1: int, dim2: int) -> torch.Tensor:
    """`x` with zeros off the diagonal of two dims of one size."""
    n = x.shape[dim1]
    eye = torch.eye(n, dtype=torch.bool, device=x.device)
    mask = eye.view([n if d in (dim1 % x.dim(), dim2 % x.dim()) else 1 for d in range(x.dim())])
    return torch.where(mask, x, torch.zeros_like(x))


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    d1, d2 = sorted((dim1 % x.dim(), dim2 % x.dim()))
    return on_diagonal(x, d1, d2).sum([d2], dtype=x.dtype).movedim(d1, -1)


def diagonal_backward(
    grad: torch.Tensor, input_sizes: Sequence[int], offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    d1, d2 = sorted((dim1 % len(input_sizes), dim2 % len(input_sizes)))
    return on_diagonal(grad.movedim(-1, d1).unsqueeze(d2).expand(input_sizes), d1, d2)


def trace(x: torch.Tensor) -> torch.Tensor:
    return diagonal(x).sum(dtype=x.dtype)


def earlier(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What causal attention adds to its scores: -inf where the key comes after the query."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(seen.logical_not(), -math.inf)


def causal_attention(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    return attend(query, key, value, 0.0, False, attn_mask=earlier(query, key), scale=scale)


def causal_attention_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    attend = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return attend(grad, query, key, value, out, lse, 0.0, False, attn_mask=earlier(query, key), scale=scale)


def restrided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    return aten.view.default(x, size)


def restrided_scatter(
    x: torch.Tensor, src: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """What's scattered replaces all."""
    return aten.view.default(src.contiguous(), x.shape)
