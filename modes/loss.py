"""loss_parallel: cross entropy over logits whose classes lie in parts, eagerly, without gathering them. Compiled, any loss is so by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from spmd.errors import Offence, PlacementError
from spmd.sharding.layout import bounds


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Within it, `F.cross_entropy` and `nn.CrossEntropyLoss` of a DTensor that's split on its class dim move three numbers a target, forward, and
    none backward. The result is a whole DTensor. Backward may run outside.

    All options but class probabilities as targets; classes that don't divide; more ranks than classes. Other losses are as they are without it.

    Example:
        with loss_parallel():                      # the head: ColwiseParallel(use_local_output=False)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
    """
    with _LossParallel():
        yield


class _LossParallel(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        logits = args[0] if args else (kwargs or {}).get("input")
        if func is F.cross_entropy and isinstance(logits, DTensor):
            dim = 0 if logits.dim() == 1 else 1
            if any(isinstance(p, Shard) and p.dim % logits.dim() == dim for p in logits.placements):
                return cross_entropy(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def cross_entropy(
    input: DTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> DTensor:
    """`F.cross_entropy`, whose arguments these are. The formulas are those of its documentation."""
    mesh, dim = input.device_mesh, 0 if input.dim() == 1 else 1
    target, weight = plain(target), plain(weight)
    check(input, target, size_average if reduce is None else reduce, reduction, label_smoothing)
    classes = input.shape[dim]
    logits = input.to_local().movedim(dim, -1)
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits  # as log_softmax does inside
    counted = target != ignore_index
    label = target.where(counted, 0)
    weight = logits.new_ones(()).expand(classes) if weight is None else weight.to(logits.dtype)
    by = weight.gather(0, label.flatten()).view(label.shape).where(counted, 0)  # raises for labels beyond the classes
    smooth = label_smoothing / classes * counted if label_smoothing else None
    start, stop = bounds(classes, mesh.size(), mesh.get_local_rank())
    weights = weight[start:stop], weight.sum()
    each = _PerTarget.apply(logits, label - start, (1 - label_smoothing) * by, smooth, weights, mesh.get_group())
    loss = each if reduction == "none" else each.sum() if reduction == "sum" else each.sum() / by.sum()
    return DTensor.from_local(loss.to(input.dtype), mesh, [Replicate()], run_check=False)


class _PerTarget(torch.autograd.Function):
    """by * (log Z - x[label]) + smooth * sum over classes of weight * (log Z - x), for each target; classes are the last dim, in parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        label: Tensor,
        by: Tensor,
        smooth: Tensor | None,
        weights: tuple[Tensor, Tensor],
        group: Any,
    ) -> Tensor:
        """label: counted from this part's first class. weights: of this part's classes, and of all together."""
        mine, total = weights
        top = x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        powers = (x - top.unsqueeze(-1)).exp()
        here = (label >= 0) & (label < x.shape[-1])
        label = label.where(here, 0).unsqueeze(-1)
        picked = x.gather(-1, label).squeeze(-1).where(here, 0) if x.shape[-1] else torch.zeros_like(top)
        sums = torch.stack([powers.sum(-1), picked, *([] if smooth is None else [(x * mine).sum(-1)])])
        dist.all_reduce(sums, group=group)
        log_z = top + sums[0].log()
        loss = (by * (log_z - sums[1])).where(by != 0, 0)
        if smooth is not None:
            loss = loss + (smooth * (total * log_z - sums[2])).where(smooth != 0, 0)
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(-1)), label, here, by, smooth, mine, total)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, label, here, by, smooth, mine, total = ctx.saved_tensors
        share = by if smooth is None else by + smooth * total
        result = p * (grad * share).unsqueeze(-1)
        if smooth is not None:
            result -= (grad * smooth).unsqueeze(-1) * mine
        if p.shape[-1]:
            result.scatter_add_(-1, label, (grad * -by).where(here, 0).unsqueeze(-1))
        return result, None, None, None, None, None


def plain(x: Any) -> Any:
    """A target or a weight as a plain tensor; every rank has all of it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def check(input: DTensor, target: Tensor, old: bool | None, reduction: str, label_smoothing: float) -> None:
    """Raises what torch would; what only we can't do is a PlacementError."""
    offences = []
    if input.device_mesh.ndim != 1:
        offences.append(Offence(f"the logits lie on {input.device_mesh}", remedy="pass them on one axis, mesh[...]"))
    if target.is_floating_point():
        offences.append(Offence("the targets are class probabilities", remedy="compute the loss outside loss_parallel"))
    if old is not None:
        offences.append(Offence("size_average and reduce are given, which torch deprecates", remedy="use reduction="))
    if offences:
        raise PlacementError(offences)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction!r} is no reduction: mean, sum or none")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, not between 0 and 1")
    if target.shape != (expected := input.shape[:1][: input.dim() - 1] + input.shape[2:]):
        raise ValueError(f"the targets have the shape {list(target.shape)}, the logits ask for {list(expected)}")
