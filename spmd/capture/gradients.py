"""Follows `.grad` of every parameter through the step: what touches it first, and what is there at the end.

If the first touch is a reset (`zero_grad` with set_to_none, `p.grad = None`, an assignment), it doesn't matter whether a gradient was
there when the step began, so that is neither an input nor guarded, and `zero_grad` first or last gives one program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.optim import Optimizer

READ, RESET, ACCUMULATE = "read", "reset", "accumulate"


class GradientWatch:
    """`names`: id of the traced parameter -> name."""

    def __init__(self, node_of: Callable[[torch.Tensor], fx.Node | None]) -> None:
        self.names: dict[int, str] = {}
        self.first: dict[str, str] = {}  # parameter -> what touched its gradient first
        self.node_of = node_of
        self._accumulated: dict[str, fx.Node] = {}
        self._muted = 0

    @contextmanager
    def muted(self) -> Iterator[None]:
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def read(self, parameter: torch.Tensor) -> None:
        self._touch(parameter, READ)

    def written(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        name = self._touch(parameter, RESET)
        if name is not None:
            self._accumulated.pop(name, None)

    def reset(self, parameters: Any, call: Callable[[], None]) -> None:
        """Runs a `zero_grad(set_to_none=True)`."""
        with self.muted():
            call()
        for p in parameters:
            self.written(p, None)

    def accumulated(self, parameter: torch.Tensor) -> None:
        """After autograd wrote `parameter.grad`: marks the node that is the gradient so far."""
        name = self._touch(parameter, ACCUMULATE)
        with self.muted():
            grad = parameter.grad
        node = self.node_of(grad) if grad is not None else None
        if name is None or node is None:
            return
        before = self._accumulated.get(name)
        if before is not None and before.meta.get("grad_of") == name:
            del before.meta["grad_of"]  # a sum so far, not the whole gradient
        node.meta.setdefault("grad_of", name)
        self._accumulated[name] = node

    def matters(self, name: str) -> bool:
        """Whether a gradient's presence at the start decides what the step does."""
        return self.first.get(name) in (READ, ACCUMULATE)

    def _touch(self, parameter: torch.Tensor, how: str) -> str | None:
        name = self.names.get(id(parameter))
        if name is not None and not self._muted:
            self.first.setdefault(name, how)
        return name

    @contextmanager
    def patched_zero_grad(self) -> Iterator[None]:
        """`zero_grad()` of optimizers and modules counts as a reset, not as reading `.grad`."""
        optimizer, module = Optimizer.zero_grad, nn.Module.zero_grad

        def of_optimizer(this: Optimizer, set_to_none: bool = True) -> None:
            if not set_to_none:
                return optimizer(this, set_to_none)
            return self.reset([p for g in this.param_groups for p in g["params"]], lambda: optimizer(this, True))

        def of_module(this: nn.Module, set_to_none: bool = True) -> None:
            if not set_to_none:
                return module(this, set_to_none)
            return self.reset(list(this.parameters()), lambda: module(this, True))

        Optimizer.zero_grad, nn.Module.zero_grad = of_optimizer, of_module  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            Optimizer.zero_grad, nn.Module.zero_grad = optimizer, module  # type: ignore[method-assign]
