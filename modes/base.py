"""ParallelMode: the policy that decides how a step's tensors lie on the mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from spmd.errors import PlacementError
from spmd.graph.axis import Axis, Mesh
from spmd.graph.local import Layouts, LocalGraph
from spmd.graph.step import StepGraph
from spmd.modes.override import Override
from spmd.passes import PassPipeline
from spmd.sharding.constraints import Constraints, pin
from spmd.sharding.partition import divide, partition
from spmd.sharding.plan import Plan
from spmd.sharding.propagate import propagate


class ParallelMode(ABC):
    """What a mode decides, on one mesh axis. The sharding engine does the rest, and stays exact whatever a mode says.

    input_batch_dim: dim of the user's tensors that carries the batch.
    replicated_inputs: argument paths (such as "batch.mask") of tensors that don't carry the batch: every rank passes the same one.
    splits_batch: whether each rank along the axis takes its share of the batch; else they all pass the same one.
    overrides: what stands in for submodules while the step is traced.
    """

    input_batch_dim: int = 0
    replicated_inputs: tuple[str, ...] = ()
    splits_batch: bool = True
    overrides: tuple[Override, ...] = ()

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

    def expand(self, step: StepGraph, mesh: Mesh, placed: Mapping[str, Layouts]) -> LocalGraph:
        """This rank's program: `step`, at a concrete batch, cut along one mesh axis after the other, the last first.

        placed: layouts that stored tensors have already, by input name; they stay.
        """
        modes, part = self.over(mesh.shape, mesh.names), step
        plans: list[Plan] = []
        reasons: dict[str, str] = {}
        for axis, mode in reversed(list(zip(mesh.axes([m.splits_batch for m in modes]), modes, strict=True))):
            lies = {name: layouts[axis.index] for name, layouts in placed.items()}
            constraints = pin(mode.constraints(part, axis), part, lies)
            reasons.update(constraints.reasons)
            plans.insert(0, propagate(part, constraints, axis.world))
            if axis.index:
                part = divide(part, plans[0], axis)
        local = partition(part, plans[0], axis, agree=mesh.size > 1)
        outputs = [None if None in places else places for places in zip(*(plan.outputs for plan in plans), strict=True)]
        fallbacks = [node for plan in reversed(plans) for node in plan.fallbacks]
        return replace(
            local,
            step=step,
            outputs=tuple(outputs),
            mesh_shape=mesh.shape,
            coordinate=mesh.coordinate,
            fallbacks=fallbacks,
            reasons=reasons,
        )

    def passes(self) -> PassPipeline:
        """The optimizations that "default" stands for."""
        return PassPipeline.parse("default")

    def of(self, modules: Mapping[str, nn.Module]) -> ParallelMode:
        """The mode for a step over these modules, by FQN. A mode that speaks of modules finds them here; others are as they are."""
        return self


def called(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
