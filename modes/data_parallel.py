"""Data parallel: every rank takes its share of the batch; parameters and states are replicated or sharded at rest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
import torch.fx as fx

from spmd.errors import PlacementError
from spmd.graph.step import Input, Output, Role, StepGraph
from spmd.modes.base import ParallelMode
from spmd.sharding.constraints import Constraints
from spmd.sharding.layout import Layout, R, shard, state_shard


class DataParallelStyle(StrEnum):
    """Where parameters and optimizer states lie between steps."""

    REPLICATE = "replicate"  # whole on every rank: gradients are all-reduced (DDP)
    ZERO1 = "zero1"  # states split: gradients are all-reduced, each rank updates its part, and parameters are gathered after
    ZERO2 = "zero2"  # the same, and gradients are reduce-scattered
    FULLY_SHARD = "fully_shard"  # split over the ranks, gathered for use: gradients are reduce-scattered (FSDP, ZeRO-3)


SPLIT: dict[DataParallelStyle, tuple[Role, ...]] = {  # what lies in parts at rest
    DataParallelStyle.REPLICATE: (),
    DataParallelStyle.ZERO1: (Role.STATE,),
    DataParallelStyle.ZERO2: (Role.STATE,),
    DataParallelStyle.FULLY_SHARD: (Role.PARAMETER, Role.GRADIENT, Role.STATE),
}


@dataclass(frozen=True)
class DataParallelMode(ParallelMode):
    """Split the batch over the ranks.

    parallel_style: "replicate", "zero1", "zero2" or "fully_shard", see DataParallelStyle.
    input_batch_dim, replicated_inputs: see ParallelMode.
    buffers: "global": batch norm takes the statistics of the whole batch, as on one device. "local": each rank normalizes its share by its own
        statistics, and the running ones are averaged over the ranks; faster, and no longer what one device computes.

    Example:
        @spmd.compile(parallel_mode=DataParallelMode("fully_shard"))
        def train_step(model, optim, x, y): ...
    """

    parallel_style: DataParallelStyle | str = DataParallelStyle.FULLY_SHARD
    input_batch_dim: int = 0
    replicated_inputs: tuple[str, ...] = ()
    buffers: Literal["global", "local"] = "global"

    def __post_init__(self) -> None:
        styles = [s.value for s in DataParallelStyle]
        if self.parallel_style not in styles:
            raise PlacementError(f"parallel_style={self.parallel_style!r} is unknown; it's one of {styles}")
        if self.buffers not in ("global", "local"):
            raise PlacementError(f"buffers={self.buffers!r} is unknown; it's 'global' or 'local'")
        object.__setattr__(self, "parallel_style", DataParallelStyle(self.parallel_style))
        object.__setattr__(self, "replicated_inputs", tuple(self.replicated_inputs))

    def constraints(self, step: StepGraph, world: int) -> Constraints:
        values = [ph.meta["val"] for ph in step.placeholders]
        inputs = tuple(self.place(spec, val, world) for spec, val in zip(step.inputs, values, strict=True))
        parameters = {x.name: p for x, p in zip(step.inputs, inputs, strict=True) if x.role is Role.PARAMETER}
        scattered = self.parallel_style in (DataParallelStyle.ZERO2, DataParallelStyle.FULLY_SHARD)
        gradients = {
            x.name: state_shard(val.shape, world) if scattered else R
            for x, val in zip(step.inputs, values, strict=True)
            if x.role is Role.PARAMETER
        }
        outputs = tuple(
            self.result(out, x, inputs, parameters, world) for out, x in zip(step.outputs, step.results, strict=True)
        )
        return Constraints(inputs, outputs, gradients=gradients, buffers=self.buffers)

    def place(self, spec: Input, val: object, world: int) -> Layout | None:
        if not isinstance(val, torch.Tensor):
            return None
        if spec.role is Role.USER:
            return R if spec.batch_dim is None else shard(spec.batch_dim, val.shape[spec.batch_dim])
        return self.at_rest(spec.role, val, world)

    def at_rest(self, role: Role, val: torch.Tensor, world: int) -> Layout:
        """Split on the first dim that has a row for each rank. A gradient that lives on lies as its parameter does."""
        return state_shard(val.shape, world) if role in SPLIT[DataParallelStyle(self.parallel_style)] else R

    def result(
        self,
        out: Output,
        x: object,
        inputs: tuple[Layout | None, ...],
        parameters: dict[str, Layout | None],
        world: int,
    ) -> Layout | None:
        if out.updates is not None:
            return inputs[out.updates]
        if out.role is Role.GRADIENT or out.grad_of:
            return parameters[out.grad_of or out.name.removesuffix(".grad")]
        if out.role is Role.STATE and isinstance(x, fx.Node):  # made by this very step
            return self.at_rest(Role.STATE, x.meta["val"], world)
        return None
