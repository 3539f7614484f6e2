"""ParallelMode: the policy that decides how a step's tensors lie on the mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod

from spmd.graph.step import StepGraph
from spmd.sharding.constraints import Constraints


class ParallelMode(ABC):
    """What a mode decides. The sharding engine does the rest, and stays exact whatever a mode says.

    input_batch_dim: dim of the user's tensors that carries the batch.
    replicated_inputs: argument paths (such as "batch.mask") of tensors that don't carry the batch: every rank passes the same one.
    """

    input_batch_dim: int = 0
    replicated_inputs: tuple[str, ...] = ()

    @abstractmethod
    def constraints(self, step: StepGraph, world: int) -> Constraints:
        """Layouts of the inputs, outputs and gradients of `step` (at a concrete batch) on a mesh axis of `world` ranks."""
