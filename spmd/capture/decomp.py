"""What is decomposed at capture: random draws, and what says its sizes by -1 or drops dims by their size, which on a shard may be another.

All else keeps its kernel; an op that needs the whole of a split dim is decomposed when that's known (spmd.sharding.decompose).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.capture import random
from spmd.capture.linalg import lstsq

aten = torch.ops.aten


def view(x: torch.Tensor, size: Sequence[Any]) -> Any:
    """-1 is spelt out."""
    free = [i for i, n in enumerate(size) if isinstance(n, int) and n == -1]
    if not free:
        return NotImplemented
    known: Any = 1
    for i, n in enumerate(size):
        known = known * (n if i != free[0] else 1)
    sizes = list(size)
    sizes[free[0]] = x.numel() // known
    return aten.view.default(x, sizes)


def expand(x: torch.Tensor, size: Sequence[Any], *, implicit: bool = False) -> Any:
    if not any(isinstance(n, int) and n == -1 for n in size):
        return NotImplemented
    new = len(size) - x.dim()
    return aten.expand.default(
        x, [x.size(i - new) if isinstance(n, int) and n == -1 else n for i, n in enumerate(size)]
    )


def squeeze(x: torch.Tensor) -> torch.Tensor:
    """Without dims it drops whatever has size 1, on a shard of one sample the batch too: the dims are spelt out."""
    return aten.squeeze.dims(x, [d for d in range(x.dim()) if x.size(d) == 1])


def squeeze_dims(x: torch.Tensor, dim: int | Sequence[int]) -> Any:
    """Dims of another size than 1 are left out: on a shard they might have size 1."""
    dims = [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]
    ones = [d for d in dims if x.dim() and x.size(d) == 1]
    return NotImplemented if not isinstance(dim, int) and ones == dims else aten.squeeze.dims(x, ones)


def split(x: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
    n = x.size(dim)
    if n == 0 or split_size == 0:
        return NotImplemented
    pieces = int((n + split_size - 1) // split_size)
    sizes = [split_size] * (pieces - 1)
    return aten.split_with_sizes.default(x, [*sizes, n - split_size * (pieces - 1)], dim)


def table() -> dict[Any, Callable[..., Any]]:
    """All decompositions of capture, by op."""
    return {
        **random.table(),
        aten.linalg_lstsq.default: lstsq,
        aten.view.default: view,
        aten.expand.default: expand,
        aten.squeeze.default: squeeze,
        aten.squeeze.dim: squeeze_dims,
        aten.squeeze.dims: squeeze_dims,
        aten.split.Tensor: split,
    }
