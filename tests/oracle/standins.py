"""Hand-made stand-ins for the compiler, right and wrong, that try the oracle itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from tests.oracle import world
from tests.oracle.case import Case, argument_path

Step = Callable[..., Any]


def identity(step: Step, case: Case, style: str) -> Step:
    """The step itself: right on one rank, wrong on more."""
    return step


def ddp(step: Step, case: Case, style: str, average_gradients: bool = True, average_loss: bool = True) -> Step:
    """All-reduced gradients and loss: right for mean losses without accumulation."""
    hooked: set[int] = set()

    def mean_(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        tensor.div_(world.size())

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        mean_(parameter.grad)

    def wrapped(*args: Any) -> Any:
        for module in (arg for arg in args if isinstance(arg, nn.Module)):
            for parameter in module.parameters():
                if average_gradients and parameter.requires_grad and id(parameter) not in hooked:
                    hooked.add(id(parameter))
                    parameter.register_post_accumulate_grad_hook(hook)
        out = step(*args)
        if average_loss:
            for leaf in pytree.tree_leaves(out):
                mean_(leaf)
        return out

    return wrapped


def without_gradient_reduction(step: Step, case: Case, style: str) -> Step:
    return ddp(step, case, style, average_gradients=False)


def without_loss_reduction(step: Step, case: Case, style: str) -> Step:
    return ddp(step, case, style, average_loss=False)


def without_second_step(step: Step, case: Case, style: str) -> Step:
    """Forgets every update after the first."""
    calls = 0

    def wrapped(model: nn.Module, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        before = {key: value.clone() for key, value in model.state_dict().items()}
        out = step(model, *args)
        if calls > 1:
            model.load_state_dict(before)
        return out

    return wrapped


def rounding(step: Step, case: Case, style: str) -> Step:
    """The step with gradients off by about a rounding error: what any other order of summation does."""
    generator = torch.Generator().manual_seed(3)
    hooked: set[int] = set()

    def hook(grad: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(grad.shape, generator=generator, dtype=torch.float64)
        return grad + (1e-16 * (grad.abs() + 0.01) * noise).to(grad.dtype)

    def wrapped(*args: Any) -> Any:
        for module in (arg for arg in args if isinstance(arg, nn.Module)):
            for parameter in module.parameters():
                if parameter.requires_grad and id(parameter) not in hooked:
                    hooked.add(id(parameter))
                    parameter.register_hook(hook)
        return step(*args)

    return wrapped


def gathering(step: Step, case: Case, style: str) -> Step:
    """Every rank gathers the batch and runs the whole step: right for everything, and of no use."""

    def wrapped(*args: Any) -> Any:
        names = list(inspect.signature(step).parameters)

        def whole(path: tuple[Any, ...], leaf: Any) -> Any:
            label = argument_path(names, path)
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or label in case.replicated:
                return leaf
            parts = [torch.empty_like(leaf) for _ in range(world.size())]
            if world.size() > 1:
                dist.all_gather(parts, leaf.contiguous())
            return torch.cat(parts if world.size() > 1 else [leaf], case.dim)

        leaves, spec = pytree.tree_flatten(step(*pytree.tree_map_with_path(whole, args)))
        dims = (*case.outputs, *(None for _ in leaves))
        own = [
            leaf if dim is None else leaf.chunk(world.size(), dim)[world.rank()]
            for leaf, dim in zip(leaves, dims, strict=False)
        ]
        return pytree.tree_unflatten(own, spec)

    return wrapped
