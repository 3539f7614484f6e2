"""What a case is: a train step, what it trains, and the batches it sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

Share = int | None  # the dim of an output that carries the batch; None: it comes back whole


@dataclass
class Parts:
    """The live objects of one run: models and optimizers in the order in which the step takes them."""

    models: tuple[nn.Module, ...]
    optims: tuple[Optimizer, ...]
    scheduler: Any = None


@dataclass(frozen=True)
class Case:
    """One train step and everything needed to run it, on one device or many.

    Attributes:
        model: builds the module, or a tuple of them; called after seeding, in float64.
        step: called as `step(*models, *optims, *batch)`; with `closure`, `step(*models, *optims)` returns the
            function that takes the batch.
        batch: makes the tuple of global arguments for B samples from torch's default generator.
        optim: builds the optimizer, or a tuple of them, from the models.
        samples: samples a rank and step, cycled over the steps.
        dim, replicated: `input_batch_dim` and `replicated_inputs`.
        outputs: for each leaf of the output the dim that carries the batch; leaves beyond it come back whole.
        scheduler: builds a learning-rate scheduler from the optimizers; stepped after each step.
        between: called after each step with the parts and the step's index.
        traces: the most `trace_count` may be after the run; not checked if None.
        tolerance: per tensor, relative to max(max|reference|, lr). Above 1e-9 only where the step itself
            computes in a narrower type.
        needs: an optional package that the case imports.
        plan: how tensor parallelism splits the models; none: it leaves all whole.
    """

    name: str
    model: Callable[[], Any]
    step: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    optim: Callable[..., Any] | None = None
    closure: bool = False
    samples: tuple[int, ...] = (2,)
    steps: int = 3
    dim: int = 0
    replicated: tuple[str, ...] = ()
    outputs: tuple[Share, ...] = ()
    scheduler: Callable[..., Any] | None = None
    between: Callable[[Parts, int], None] | None = None
    traces: int | None = None
    tolerance: float = 1e-9
    needs: str | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> Parts:
        """Fresh models and optimizers; equal for equal seeds."""
        import torch

        torch.manual_seed(seed)
        models = _tuple(self.model())
        optims = _tuple(self.optim(*models)) if self.optim else ()
        return Parts(models, optims, self.scheduler(*optims) if self.scheduler else None)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def argument_path(names: list[str], path: tuple[Any, ...]) -> str:
    """What `replicated_inputs` calls a leaf of the arguments: "batch.mask"."""
    return ".".join([names[path[0].idx], *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:])])
