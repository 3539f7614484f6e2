"""What capture yields: the graph, and where each of its inputs lives in the user's objects."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spmd._torch import TreeSpec
from spmd.capture.objects import qualified
from spmd.graph.step import Input, StepGraph

if TYPE_CHECKING:
    from spmd.capture.guards import Guards


@dataclass
class Slot:
    """The live object behind one input of the graph."""

    input: Input
    tensor: torch.Tensor | None = (
        None  # PARAMETER, BUFFER, STATE, GRADIENT: the user's tensor; None for a state that doesn't exist yet
    )
    container: MutableMapping[str, Any] | None = None  # HYPER: container[key] holds today's value
    key: str = ""
    leaf: int | None = None  # USER (tensor or lifted number): index into the flattened (args, kwargs)


@dataclass
class Capture:
    """One traced step and its ties to the user's objects."""

    step: StepGraph
    slots: tuple[Slot, ...]  # one for each of step.inputs
    modules: dict[str, torch.nn.Module]  # root modules by name
    optimizers: dict[str, torch.optim.Optimizer]
    guards: Guards
    out_spec: TreeSpec  # structure of the user's return value: its leaves are the USER outputs, in order
    init: StepGraph | None = (
        None  # makes the optimizer state that doesn't exist yet, from parameters and hyper-parameters
    )
    cleared: tuple[str, ...] = ()  # parameters whose .grad is None after the step, whatever it was before

    def submodules(self) -> dict[str, torch.nn.Module]:
        """Every module by each of its FQNs."""
        return {
            qualified(self.modules, root, name): sub
            for root, module in self.modules.items()
            for name, sub in module.named_modules(remove_duplicate=False)
        }
