"""Parallel modes: how tensors lie on the mesh. Policy only; the engine is in spmd/sharding."""

from spmd.modes.base import ParallelMode
from spmd.modes.compose import compose
from spmd.modes.data_parallel import DataParallelMode, DataParallelStyle

__all__ = ["DataParallelMode", "DataParallelStyle", "ParallelMode", "compose"]
