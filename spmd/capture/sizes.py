"""Which dims of a static trace carry the batch: told by a second static trace at another size, node by node."""

from __future__ import annotations

import torch
import torch.fx as fx


def note_varying_dims(graph: fx.Graph, other: fx.Graph, size: int, other_size: int) -> bool:
    """Set `varies` on the nodes of `graph`, traced at batch `size`, by the same step traced at `other_size`. False if they aren't the same program.

    Per dim: None where both sizes are equal, c where it's c * batch, 0 for any other function of the batch.
    """
    nodes, others = list(graph.nodes), list(other.nodes)
    if [(n.op, n.target) for n in nodes] != [(n.op, n.target) for n in others]:
        return False
    for node, twin in zip(nodes, others, strict=True):
        here, there = node.meta.get("val"), twin.meta.get("val")
        if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor) and here.dim() == there.dim():
            node.meta["varies"] = tuple(
                _factor(int(a), int(b), size, other_size) for a, b in zip(here.shape, there.shape, strict=True)
            )
    return True


def _factor(a: int, b: int, size: int, other_size: int) -> int | None:
    if a == b:
        return None
    return a // size if a * other_size == b * size and a % size == 0 else 0
