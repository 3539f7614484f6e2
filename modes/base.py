"""ParallelMode: the policy that decides how a step's tensors lie on the mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import nn

from spmd.errors import PlacementError
from spmd.graph.axis import Axis
from spmd.graph.step import StepGraph
from spmd.sharding.constraints import Constraints


class ParallelMode(ABC):
    """What a mode decides, on one mesh axis. The sharding engine does the rest, and stays exact whatever a mode says.

    input_batch_dim: dim of the user's tensors that carries the batch.
    replicated_inputs: argument paths (such as "batch.mask") of tensors that don't carry the batch: every rank passes the same one.
    splits_batch: whether each rank along the axis takes its share of the batch; else they all pass the same one.
    """

    input_batch_dim: int = 0
    replicated_inputs: tuple[str, ...] = ()
    splits_batch: bool = True

    @abstractmethod
    def constraints(self, step: StepGraph, axis: Axis) -> Constraints:
        """Layouts of the inputs, outputs and gradients of `step` (at a concrete batch) on `axis`. Later axes of the mesh have taken their parts already."""

    def over(self, shape: Sequence[int], names: Sequence[str] = ()) -> tuple[ParallelMode, ...]:
        """One mode for each axis of a mesh of this shape, and these names if it has any.

        Raises:
            PlacementError: this mode works on another number of axes.
        """
        if len(shape) != 1:
            what = f"{type(self).__name__} works on one mesh axis, the mesh has {len(shape)}{called(names)}"
            raise PlacementError(
                f"{what}: pass mesh[...] with one axis, or spmd.modes.compose(...) with a mode for each"
            )
        return (self,)

    def of(self, modules: Mapping[str, nn.Module]) -> ParallelMode:
        """The mode for a step over these modules, by FQN. A mode that speaks of modules finds them here; others are as they are."""
        return self


def called(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
