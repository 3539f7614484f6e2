"""The compiled step with all its ranks in this process: captured once for all of them, called with the global batch.

It costs a fraction of what processes cost that trace each for themselves, and tries all but the runtime: storage, agreement, gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn, optim
from torch.utils import _pytree as pytree

from spmd.modes import DataParallelMode
from tests.fuzz.ranks import Ranks
from tests.oracle import oracle
from tests.oracle.case import Case
from tests.oracle.cases import CASES


def check(name: str, style: str, W: int) -> float:
    """`oracle.check` on W ranks in this process."""
    case = CASES[name]
    whole = replace(case, samples=tuple(W * n for n in case.samples))  # to one caller, who passes the global batch
    try:
        return oracle.check_case(whole, style, 1, lambda step, case, style: Together(step, case, style, W))
    finally:
        torch.set_default_dtype(torch.float32)


class Together:
    """Called as the plain step is; what it trains lies in the user's objects after each call."""

    def __init__(self, step: Callable[..., Any], case: Case, style: str, W: int) -> None:
        self.step, self.case, self.W = step, case, W
        self.mode = DataParallelMode(style, input_batch_dim=case.dim, replicated_inputs=case.replicated)
        self.ranks: Ranks | None = None
        self.calls = self.trace_count = 0

    def __call__(self, *args: Any) -> Any:
        samples = self.case.samples[self.calls % len(self.case.samples)]
        self.calls += 1
        first = self.share(args)
        if self.ranks is None or self.ranks.captured.guards.check(self.step, first, {}):
            self.trace_count += 1
            self.ranks = Ranks(self.step, first, self.mode, (self.W,), samples)
        elif self.ranks.batch != samples:
            self.ranks.batch = samples
            self.ranks.settle(self.ranks.captured)
        returned, _ = self.ranks(*args)
        self.ranks.give_back()
        return pytree.tree_unflatten(returned, self.ranks.captured.out_spec)

    def share(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first rank's arguments."""
        skip = sum(isinstance(x, nn.Module | optim.Optimizer) for x in args)
        names = oracle.argument_names(self.step, skip)
        return *args[:skip], *oracle.share(args[skip:], names, self.case, 0, self.W)
