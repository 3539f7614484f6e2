"""Puts the traced tensors in the place of the user's: in modules and optimizers, and wherever else the step reaches them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from spmd._torch import (
    BackwardCFunction,
    FakeTensor,
    FunctionalTensor,
    function_modes,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
    without_top_function_mode,
)
from spmd.capture.functions import REPLACED
from spmd.capture.gradients import GradientWatch
from spmd.capture.objects import Objects, successor
from spmd.capture.patches import replaced
from spmd.errors import CaptureError, Offence


@contextmanager
def swapped_modules(objects: Objects, traced: dict[int, torch.Tensor]) -> Iterator[None]:
    """Modules hold `traced[id(tensor)]` instead of each tensor inside; ties survive because it goes by identity."""
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for _, module in objects.submodules():
        for held in (module._parameters, module._buffers):
            undo.append((held, dict(held)))
            held.update({k: traced.get(id(t), t) for k, t in held.items() if t is not None})  # type: ignore[misc]
        if isinstance(module, nn.RNNBase):  # keeps a second, flat list of its weights
            undo.append((vars(module), {"_flat_weights": module._flat_weights}))
            module._flat_weights = [traced.get(id(w), w) if w is not None else None for w in module._flat_weights]
    try:
        yield
    finally:
        for held, before in reversed(undo):
            if "_flat_weights" not in before:
                held.clear()
            held.update(before)


class Substitution(TorchFunctionMode):
    """Sees every torch call of the step that Python makes.

    Replaces real tensors, which the swap couldn't reach, by traced ones; turns `p.data = x` into a copy; tells `watch` of reads and
    writes of `.grad`. It's off while autograd runs, whose Python internals aren't the user's calls, but on again in hooks and in the
    backward of custom functions.
    """

    def __init__(self, lookup: Callable[[torch.Tensor], torch.Tensor], watch: GradientWatch) -> None:
        super().__init__()
        self.lookup, self.watch = lookup, watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(_has_real, args)) or any(map(_has_real, kwargs.values())):
            args = tuple(self._replace(a) for a in args)
            kwargs = {k: self._replace(v) for k, v in kwargs.items()}
        if func in REPLACED:
            return REPLACED[func](*args, **kwargs)
        if kwargs.get("generator") is not None:
            _check_generator(kwargs["generator"])
            kwargs["generator"] = None
        owner = getattr(func, "__self__", None)
        if owner is torch.Tensor.grad:
            return self._grad(func, args)
        if owner is torch.Tensor.data:
            return _assign_data(*args) if func.__name__ == "__set__" else args[0].detach()
        if func in (torch.as_tensor, torch.tensor) and args and isinstance(args[0], (torch.SymFloat, torch.SymInt)):
            return _from_number(*args, **kwargs)
        if func is torch.Tensor.register_hook:
            args = (args[0], self.inside(args[1]), *args[2:])
        return func(*args, **kwargs)

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with this mode on."""

        @functools.wraps(function, updated=())
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return wrapped

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """The mode is on in the step's own Python code."""
        engine, custom = torch.autograd._engine_run_backward, BackwardCFunction.apply

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if not function_modes():
                return engine(*args, **kwargs)
            with without_top_function_mode():
                return engine(*args, **kwargs)

        with (
            replaced(torch.autograd, _engine_run_backward=run_backward),
            replaced(BackwardCFunction, apply=self.inside(custom)),
            self,
        ):
            yield

    def _replace(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.lookup(value) if _is_real(value) else value
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            items = [self._replace(v) for v in value]
            return type(value)(items) if type(value) in (list, tuple) else items
        return value

    def _grad(self, func: Any, args: tuple[Any, ...]) -> Any:
        result = func(*args)
        if func.__name__ == "__get__":
            self.watch.read(args[0])
        else:
            self.watch.written(args[0], args[1] if len(args) > 1 else None)
        return result


def _is_real(t: torch.Tensor) -> bool:
    """Whether it's the user's own, not what stands for one while tracing."""
    known = isinstance(t, (FunctionalTensor, FakeTensor)) or is_functorch_wrapped_tensor(t)
    return not known and not is_functional_tensor(t)


def _has_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return _is_real(value)
    return isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) and _is_real(v) for v in value)


def _check_generator(generator: torch.Generator) -> None:
    """torch's default generator is what is meant without one."""
    if generator is not torch.default_generator:
        raise CaptureError(
            Offence(
                "the step draws from a torch.Generator of its own, whose state a graph doesn't carry",
                remedy="draw from the default generator (spmd.compile(seed=...) gives the step one), or draw outside and pass the numbers in",
            )
        )


def _from_number(number: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """`torch.tensor(number)`, which would make a constant of a symbolic number."""
    natural = torch.get_default_dtype() if isinstance(number, torch.SymFloat) else torch.int64
    return torch.scalar_tensor(number, dtype=dtype or natural, device=device)


def _assign_data(target: torch.Tensor, value: torch.Tensor) -> None:
    if (target.shape, target.dtype, target.device) != (value.shape, value.dtype, value.device):
        what = f"`.data` is assigned a tensor of shape {tuple(value.shape)} and {value.dtype}, over {tuple(target.shape)} and {target.dtype}"
        raise CaptureError(Offence(what, remedy="assign a tensor of the same shape, dtype and device"))
    if (
        isinstance(target, FunctionalTensor)
        and isinstance(value, FunctionalTensor)
        and target.stride() == value.stride()
    ):
        target.elem = value.elem  # as in eager: the same memory as `value` from now on; older aliases keep the old one
        return
    with torch.no_grad():
        target.copy_(value)


def lookup_in(
    traced: dict[int, torch.Tensor], lift: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Real tensor -> traced tensor; one that isn't known yet is lifted to an input."""

    def find(tensor: torch.Tensor) -> torch.Tensor:
        known = traced.get(id(tensor))
        if known is None:
            current = successor(tensor)
            known = traced.get(id(current))
            known = traced[id(tensor)] = lift(current) if known is None else known
        return known

    return find
