"""A mode of somebody else's: embeddings are split over the ranks, all else is data parallel. To copy from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spmd.graph.axis import Axis
from spmd.graph.step import Role, StepGraph
from spmd.modes import ParallelMode
from spmd.sharding.constraints import Constraints
from spmd.sharding.layout import R, Sharded, shard


@dataclass(frozen=True)
class SplitTables(ParallelMode):
    """Parameters with `rows` rows or more lie in parts, and so do their gradients and states."""

    rows: int = 1000

    def constraints(self, step: StepGraph, axis: Axis) -> Constraints:
        inputs = []
        for spec, node in zip(step.inputs, step.placeholders, strict=True):
            val = node.meta["val"]
            if not isinstance(val, torch.Tensor):
                inputs.append(None)
            elif spec.role is Role.USER:
                inputs.append(R if spec.batch_dim is None else Sharded(spec.batch_dim, 1, val.shape[spec.batch_dim], 1))
            else:
                inputs.append(shard(0, len(val)) if val.dim() > 1 and len(val) >= self.rows else R)
        outputs = tuple(None if out.updates is None else inputs[out.updates] for out in step.outputs)
        return Constraints(tuple(inputs), outputs, blocks=axis.blocks)
