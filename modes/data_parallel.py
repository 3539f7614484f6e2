"""Data parallel: every rank takes its share of the batch; parameters and states are replicated or sharded at rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import torch
import torch.fx as fx

from spmd.cost import link_of, seconds
from spmd.errors import PlacementError
from spmd.graph.axis import Axis
from spmd.graph.step import Input, Role, StepGraph
from spmd.modes.base import ParallelMode, called
from spmd.modes.override import Override
from spmd.sharding.constraints import Constraints, kept
from spmd.sharding.layout import Layout, R, Sharded, state_shard


class DataParallelStyle(StrEnum):
    """Where parameters and optimizer states lie between steps."""

    REPLICATE = "replicate"  # whole on every rank: gradients are all-reduced (DDP)
    ZERO1 = "zero1"  # states split: gradients are all-reduced, each rank updates its part, and parameters are gathered after
    ZERO2 = "zero2"  # the same, and gradients are reduce-scattered
    FULLY_SHARD = "fully_shard"  # split over the ranks, gathered for use: gradients are reduce-scattered (FSDP, ZeRO-3)
    DEFAULT = "default"  # each parameter replicated or fully sharded, by its size and what that costs on this mesh
    HYBRID_SHARD = (
        "hybrid_shard"  # on a mesh of two axes: replicated along the first, fully sharded along the second (HSDP)
    )


SPLIT: dict[DataParallelStyle, tuple[Role, ...]] = {  # what lies in parts at rest
    DataParallelStyle.REPLICATE: (),
    DataParallelStyle.ZERO1: (Role.STATE,),
    DataParallelStyle.ZERO2: (Role.STATE,),
    DataParallelStyle.FULLY_SHARD: (Role.PARAMETER, Role.GRADIENT, Role.STATE),
    DataParallelStyle.DEFAULT: (Role.PARAMETER, Role.GRADIENT, Role.STATE),  # of those that are chosen
}
SCATTERED = (DataParallelStyle.ZERO2, DataParallelStyle.FULLY_SHARD, DataParallelStyle.DEFAULT)


@dataclass(frozen=True)
class DataParallelMode(ParallelMode):
    """Split the batch over the ranks.

    parallel_style: "replicate", "zero1", "zero2", "fully_shard", "default" or "hybrid_shard", see DataParallelStyle.
    min_numel: "default" replicates parameters with fewer elements. None: those that take longer to start moving than to move.
    input_batch_dim, replicated_inputs: see ParallelMode.
    axis: name of the mesh axis, for compose(); of both for "hybrid_shard".
    buffers: "global": batch norm takes the statistics of the whole batch, as on one device. "local": each rank normalizes its share by its own
        statistics, and the running ones are averaged over the ranks; faster, and no longer what one device computes.
    overrides: see ParallelMode.

    Example:
        @spmd.compile(parallel_mode=DataParallelMode("fully_shard"))
        def train_step(model, optim, x, y): ...
    """

    parallel_style: DataParallelStyle | str = DataParallelStyle.FULLY_SHARD
    input_batch_dim: int = 0
    replicated_inputs: tuple[str, ...] = ()
    axis: str | tuple[str, ...] | None = None
    buffers: Literal["global", "local"] = "global"
    min_numel: int | None = None
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        styles = [s.value for s in DataParallelStyle]
        if self.parallel_style not in styles:
            raise PlacementError(f"parallel_style={self.parallel_style!r} is unknown; it's one of {styles}")
        if self.buffers not in ("global", "local"):
            raise PlacementError(f"buffers={self.buffers!r} is unknown; it's 'global' or 'local'")
        object.__setattr__(self, "parallel_style", DataParallelStyle(self.parallel_style))
        object.__setattr__(self, "replicated_inputs", tuple(self.replicated_inputs))

    def over(self, shape: Sequence[int], names: Sequence[str] = ()) -> tuple[ParallelMode, ...]:
        if self.parallel_style is not DataParallelStyle.HYBRID_SHARD:
            return super().over(shape, names)
        if len(shape) != 2:
            what = f"hybrid_shard replicates along one mesh axis and shards along another, the mesh has {len(shape)}{called(names)}"
            raise PlacementError(
                f'{what}: pass mesh=init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("node", "gpu"))'
            )
        along = (DataParallelStyle.REPLICATE, DataParallelStyle.FULLY_SHARD)
        return tuple(replace(self, parallel_style=style) for style in along)

    def constraints(self, step: StepGraph, axis: Axis) -> Constraints:
        nodes = dict(zip(step.inputs, step.placeholders, strict=True))
        inputs = tuple(self.place(spec, ph, axis) for spec, ph in nodes.items())
        made = (
            self.at_rest(Role.STATE, x, axis) if out.role is Role.STATE and isinstance(x, fx.Node) else None
            for out, x in zip(step.outputs, step.results, strict=True)
        )
        parameters = {spec.name: ph for spec, ph in nodes.items() if spec.role is Role.PARAMETER}
        scattered = self.parallel_style in SCATTERED
        return Constraints(
            inputs,
            kept(step, inputs, made),
            gradients={name: self.split(ph, axis) if scattered else R for name, ph in parameters.items()},
            blocks=axis.blocks,
            reasons={name: self.whole(ph, axis) for name, ph in parameters.items()},
            buffers=self.buffers,
        )

    def place(self, spec: Input, ph: fx.Node, axis: Axis) -> Layout | None:
        if not isinstance(ph.meta["val"], torch.Tensor):
            return None
        if spec.role is Role.USER:
            return R if spec.batch_dim is None else batch_share(ph.meta["val"], spec.batch_dim, axis)
        return self.at_rest(spec.role, ph, axis)

    def at_rest(self, role: Role, x: fx.Node, axis: Axis) -> Layout:
        """A gradient that lives on lies as its parameter does."""
        return self.split(x, axis) if role in SPLIT[DataParallelStyle(self.parallel_style)] else R

    def split(self, x: fx.Node, axis: Axis) -> Layout:
        """On the first dim that has a row for each rank."""
        return R if self.whole(x, axis) else by_rows(x, axis)

    def whole(self, x: fx.Node, axis: Axis) -> str:
        """Why "default" doesn't split a parameter or its states; "" if it does, and in the other styles."""
        if self.parallel_style is not DataParallelStyle.DEFAULT:
            return ""
        numel, link = x.meta["val"].numel(), link_of(axis.device)
        least = link.alpha * link.bandwidth / 4 if self.min_numel is None else self.min_numel
        if numel < least:
            more = seconds("all_gather", 4 * numel, axis.world, link) * 1e6
            return f"fewer than {least:.0f} elements: a gather would take {more:.0f} us, most of them to start"
        return f"no dim has {axis.world} rows" if by_rows(x, axis) == R else ""


def by_rows(x: fx.Node, axis: Axis) -> Layout:
    return state_shard(x.meta["val"].shape, axis.world, x.meta.get("uneven", ()))


def batch_share(val: torch.Tensor, dim: int, axis: Axis) -> Layout:
    """Each rank's share of the dim that carries the batch, in mesh order: the axes before cut it in blocks."""
    return R if axis.blocks is None else Sharded(dim, axis.blocks, val.shape[dim] // axis.blocks, 1)
