"""Torch functions that look at values on their way, written so that they don't. `Substitution` calls these instead."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd._torch import assert_async, is_all_true

aten = torch.ops.aten


def all_true(valid: Tensor) -> bool:
    """Goes on as if it were, and complains at run time."""
    assert_async(valid.all(), "a value lies outside what torch.distributions allows")
    return True


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Eager raises a ValueError for a negative variance; here the same complaint comes from an assertion in the graph."""
    if isinstance(var, Tensor):
        assert_async((var >= 0).all(), "var has negative entry/entries")
        if var.shape != input.shape and input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        var = var.clone()
        with torch.no_grad():
            var.clamp_(min=eps)
    elif var < 0:
        raise ValueError("var has negative entry/entries")
    else:
        var = torch.full_like(input, max(var, eps))
    loss = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    return _reduced(loss, reduction)


def multilabel_margin_loss(input: Tensor, target: Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> Tensor:
    """torch's own decomposition counts targets after the first -1."""
    x, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    listed = (labels >= 0).to(x.dtype).cumprod(1)
    index = labels.clamp_min(0)
    other = (torch.zeros_like(x).scatter_add(1, index, listed) == 0).to(x.dtype)
    margins = torch.relu(1 - x.gather(1, index).unsqueeze(2) + x.unsqueeze(1))
    loss = (margins * listed.unsqueeze(2) * other.unsqueeze(1)).sum((1, 2)) / x.shape[1]
    return _reduced(loss if input.dim() == 2 else loss.squeeze(0), reduction)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Also with a tensor as momentum: `momentum=None` averages over as many batches as a buffer has counted."""
    if not isinstance(momentum, Tensor):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    assert running_mean is not None and running_var is not None
    new = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    out = F.batch_norm(input, *new, weight, bias, training, 1.0, eps)
    for running, now in zip((running_mean, running_var), new, strict=True):
        running.copy_(momentum * now + (1 - momentum) * running)
    return out


@contextmanager
def counted_batches() -> Iterator[None]:
    """`1.0 / float(self.num_batches_tracked)` in torch's batch norm stays a tensor."""
    module: Any = sys.modules["torch.nn.modules.batchnorm"]
    module.float = lambda x: x.double() if isinstance(x, Tensor) else float(x)
    try:
        yield
    finally:
        del module.float


@torch.library.custom_op("spmd::ctc_loss", mutates_args=())
def _ctc_loss(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero: bool) -> Tensor:
    """The loss of each sample, without the op's table of alphas, whose size is that of the longest target."""
    return aten._ctc_loss.Tensor(log_probs, targets, inputs, lengths, blank, zero)[0]


@_ctc_loss.register_fake
def _(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero: bool) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1] if log_probs.dim() == 3 else [])


@torch.library.custom_op("spmd::ctc_loss_backward", mutates_args=())
def _ctc_loss_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero: bool
) -> Tensor:
    loss, alphas = aten._ctc_loss.Tensor(log_probs, targets, inputs, lengths, blank, zero)
    return aten._ctc_loss_backward.Tensor(grad, log_probs, targets, inputs, lengths, loss, alphas, blank, zero)


@_ctc_loss_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero), *[None] * 5


_ctc_loss.register_autograd(_backward, setup_context=_save)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """F.ctc_loss, and torch.ctc_loss, whose `reduction` is a number."""
    inputs, lengths = (torch.as_tensor(n, dtype=torch.int64) for n in (input_lengths, target_lengths))
    loss = _ctc_loss(log_probs, targets, inputs, lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros_like(loss), loss)
    if reduction in ("mean", 1):
        return (loss / lengths.clamp_min(1).to(loss.dtype)).mean()
    return loss.sum() if reduction in ("sum", 2) else loss


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


REPLACED: dict[Any, Callable[..., Any]] = {
    is_all_true: all_true,
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
    F.batch_norm: batch_norm,
    F.ctc_loss: ctc_loss,
    torch.ctc_loss: ctc_loss,
}
