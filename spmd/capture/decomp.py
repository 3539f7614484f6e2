"""What is decomposed at capture: only what hides a sum or a count over dims that may be sharded, or depends on run-time sizes.

Kept whole: addmm (two roundings in bfloat16 otherwise), softmax, layer norm forward, attention, embedding, convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd._torch import decomposition_table
from spmd.capture import random

aten = torch.ops.aten

# torch's own decompositions of these keep to plain ATen ops and to eager's results within rounding.
_FROM_TORCH = (
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
    aten.soft_margin_loss_backward.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten._fused_rms_norm_backward.default,
    aten.native_batch_norm_backward.default,
)


def _dims(x: torch.Tensor, dim: int | Sequence[int] | None) -> list[int]:
    if dim is None or isinstance(dim, (list, tuple)) and len(dim) == 0:
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _count(x: torch.Tensor, dims: Sequence[int]) -> Any:
    n: Any = 1
    for d in dims:
        n = n * x.size(d)
    return n


def _opmath(x: torch.Tensor) -> torch.Tensor:
    """Statistics of low precision are taken in float32, as the kernels do."""
    return x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x


def _moments(x: torch.Tensor, dims: list[int], correction: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(variance, mean) over `dims`, kept as dims of size 1, from two sums."""
    n = _count(x, dims)
    mean = x.sum(dims, keepdim=True) / n
    centred = x - mean
    square = centred * centred if not x.is_complex() else (centred * centred.conj()).real
    return square.sum(dims, keepdim=True) / (n - (1 if correction is None else correction)), mean


def _squeeze(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    return x if keepdim or not dims else aten.squeeze.dims(x, dims)


def var(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> torch.Tensor:
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = _dims(x, dim)
    variance, mean = _moments(_opmath(x), dims, correction)
    return _squeeze(variance, dims, keepdim).to(variance.dtype if x.is_complex() else x.dtype), _squeeze(
        mean, dims, keepdim
    ).to(x.dtype)


def std(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> torch.Tensor:
    return std_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std_mean(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = _dims(x, dim)
    variance, mean = _moments(_opmath(x), dims, correction)
    deviation = _squeeze(variance, dims, keepdim).sqrt()
    return deviation.to(deviation.dtype if x.is_complex() else x.dtype), _squeeze(mean, dims, keepdim).to(x.dtype)


def vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = _dims(x, dim)
    result = (dtype or x.dtype).to_real() if x.is_complex() or (dtype or x.dtype).is_complex else dtype or x.dtype
    a = _opmath(x.to(dtype) if dtype is not None else x).abs()
    if ord == float("inf"):
        out = a.amax(dims, keepdim)
    elif ord == float("-inf"):
        out = a.amin(dims, keepdim)
    elif ord == 0:
        out = (a != 0).to(a.dtype).sum(dims, keepdim)
    elif ord == 1:
        out = a.sum(dims, keepdim)
    elif ord == 2:
        out = (a * a).sum(dims, keepdim).sqrt()
    else:
        out = (a**ord).sum(dims, keepdim) ** (1.0 / ord)
    return out.to(result)


def lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    """By the pseudo-inverse: the op itself has residuals whose presence depends on the rank of `a`. Here they're NaN where `a` lacks full rank."""
    m, n = a.shape[-2:]
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    vector = b.dim() == a.dim() - 1
    right = b.unsqueeze(-1) if vector else b
    x = torch.linalg.pinv(a, rtol=rcond) @ right
    rank = torch.linalg.matrix_rank(a, rtol=rcond)
    left = (a @ x - right).abs().square().sum(-2)
    residuals = (
        left.masked_fill((rank < n).unsqueeze(-1), float("nan")) if m > n and driver != "gelsy" else left.new_empty(0)
    )
    singular = torch.linalg.svdvals(a) if driver in ("gelss", "gelsd") else left.new_empty(0)
    return x.squeeze(-1) if vector else x, residuals, rank if driver != "gels" else rank.new_empty(0), singular


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Output, saved mean and inverse deviation, new running mean and variance."""
    high = _opmath(x)
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [1, x.size(1), *[1] * (x.dim() - 2)]
    if training:
        n = _count(x, dims)
        variance, mean = _moments(high, dims, 0)
        inverse = (variance + eps).rsqrt()
        save_mean, save_inverse = _squeeze(mean, dims, False), _squeeze(inverse, dims, False)
        if running_mean is not None:
            running_mean = save_mean.to(running_mean.dtype) * momentum + running_mean * (1 - momentum)
        if running_var is not None:
            unbiased = _squeeze(variance, dims, False) * (n / (n - 1))
            running_var = unbiased.to(running_var.dtype) * momentum + running_var * (1 - momentum)
    else:
        assert running_mean is not None and running_var is not None
        mean = running_mean.to(high.dtype).view(shape)
        inverse = (running_var.to(high.dtype).view(shape) + eps).rsqrt()
        save_mean = save_inverse = high.new_zeros(0)
    out = (high - mean) * inverse
    if weight is not None:
        out = out * weight.to(high.dtype).view(shape)
    if bias is not None:
        out = out + bias.to(high.dtype).view(shape)
    return out.to(x.dtype), save_mean, save_inverse, running_mean, running_var


def native_batch_norm_functional(
    x: Any, w: Any, b: Any, rm: Any, rv: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _batch_norm(x, w, b, rm, rv, training, momentum, eps)


def native_batch_norm_no_stats(x: Any, w: Any, b: Any, training: bool, momentum: float, eps: float) -> tuple[Any, ...]:
    return _batch_norm(x, w, b, None, None, training, momentum, eps)[:3]


def native_batch_norm_no_training(
    x: Any, w: Any, b: Any, rm: Any, rv: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _batch_norm(x, w, b, rm, rv, False, momentum, eps)[:3]


def view(x: torch.Tensor, size: Sequence[Any]) -> Any:
    """-1 is spelt out."""
    free = [i for i, n in enumerate(size) if isinstance(n, int) and n == -1]
    if not free:
        return NotImplemented
    known: Any = 1
    for i, n in enumerate(size):
        known = known * (n if i != free[0] else 1)
    sizes = list(size)
    sizes[free[0]] = x.numel() // known
    return aten.view.default(x, sizes)


def expand(x: torch.Tensor, size: Sequence[Any], *, implicit: bool = False) -> Any:
    if not any(isinstance(n, int) and n == -1 for n in size):
        return NotImplemented
    new = len(size) - x.dim()
    return aten.expand.default(
        x, [x.size(i - new) if isinstance(n, int) and n == -1 else n for i, n in enumerate(size)]
    )


def squeeze(x: torch.Tensor) -> torch.Tensor:
    """Without dims it drops whatever has size 1, on a shard of one sample the batch too: the dims are spelt out."""
    return aten.squeeze.dims(x, [d for d in range(x.dim()) if x.size(d) == 1])


def squeeze_dims(x: torch.Tensor, dim: int | Sequence[int]) -> Any:
    """Dims of another size than 1 are left out: on a shard they might have size 1."""
    dims = [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]
    ones = [d for d in dims if x.dim() and x.size(d) == 1]
    return NotImplemented if not isinstance(dim, int) and ones == dims else aten.squeeze.dims(x, ones)


def split(x: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
    n = x.size(dim)
    if n == 0 or split_size == 0:
        return NotImplemented
    pieces = int((n + split_size - 1) // split_size)
    sizes = [split_size] * (pieces - 1)
    return aten.split_with_sizes.default(x, [*sizes, n - split_size * (pieces - 1)], dim)


def table() -> dict[Any, Callable[..., Any]]:
    """All decompositions of capture, by op."""
    return {
        **{op: decomposition_table[op] for op in _FROM_TORCH if op in decomposition_table},
        **random.table(),
        aten.var.correction: var,
        aten.var_mean.correction: var_mean,
        aten.std.correction: std,
        aten.std_mean.correction: std_mean,
        aten.linalg_vector_norm.default: vector_norm,
        aten.linalg_lstsq.default: lstsq,
        aten._native_batch_norm_legit_functional.default: native_batch_norm_functional,
        aten._native_batch_norm_legit.no_stats: native_batch_norm_no_stats,
        aten._native_batch_norm_legit_no_training.default: native_batch_norm_no_training,
        aten.view.default: view,
        aten.expand.default: expand,
        aten.squeeze.default: squeeze,
        aten.squeeze.dim: squeeze_dims,
        aten.squeeze.dims: squeeze_dims,
        aten.split.Tensor: split,
    }
