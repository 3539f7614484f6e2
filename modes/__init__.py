"""Parallel modes: how tensors lie on the mesh. Policy only; the engine is in spmd/sharding."""

from spmd.modes.base import ParallelMode
from spmd.modes.compose import compose
from spmd.modes.data_parallel import DataParallelMode, DataParallelStyle
from spmd.modes.dtensor_expand import DTensorExpandMode, Schema
from spmd.modes.loss import loss_parallel
from spmd.modes.override import Override
from spmd.modes.parallelize import parallelize_module
from spmd.modes.spread import ContextParallel, ExpertParallel
from spmd.modes.styles import (
    ColwiseParallel,
    Description,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from spmd.modes.tensor_parallel import TensorParallelMode

__all__ = [
    "ColwiseParallel",
    "ContextParallel",
    "DTensorExpandMode",
    "DataParallelMode",
    "DataParallelStyle",
    "Description",
    "ExpertParallel",
    "Override",
    "ParallelMode",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "Schema",
    "SequenceParallel",
    "TensorParallelMode",
    "compose",
    "loss_parallel",
    "parallelize_module",
]
