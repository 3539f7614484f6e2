"""The roofline model of compute: an op takes as long as its arithmetic or its memory traffic, whichever is longer.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures", 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from spmd._torch import OpOverload, tree_leaves
from spmd.graph.memory import seen_through


@dataclass(frozen=True)
class Device:
    """flops: operations a second in products of float32. bandwidth: bytes a second of its memory. narrow: operations in other types."""

    flops: float
    bandwidth: float
    narrow: Mapping[torch.dtype, float] = field(default_factory=dict)

    def rate(self, dtype: torch.dtype) -> float:
        return self.narrow.get(dtype, self.flops)


DEVICES = {
    # NVIDIA H100 SXM data sheet, without sparsity
    "cuda": Device(67e12, 3.35e12, {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float64: 67e12}),
    "cpu": Device(34e9, 11e9, {torch.float64: 17e9}),  # one core of a machine of ours: docs/benchmarks.md, "Compute"
}


aten = torch.ops.aten
FORMULAS = {  # operations by op; torch has none of its CPU kernel of attention, which takes what that for GPUs takes
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


def device_of(device_type: str) -> Device:
    return DEVICES.get(device_type, DEVICES["cuda"])


def work(node: fx.Node) -> tuple[float, float]:
    """(operations, bytes read and written) of one call: 2 m n k of a product as torch counts it, one for each element that others yield; of a view nothing."""
    results = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    if node.op != "call_function" or not results or seen_through(node) is not None:
        return 0.0, 0.0
    read = [x for n in node.all_input_nodes for x in tree_leaves(n.meta.get("val")) if isinstance(x, torch.Tensor)]
    moved = sum(x.numel() * x.element_size() for x in (*read, *results))
    count = FORMULAS.get(node.target.overloadpacket) if isinstance(node.target, OpOverload) else None
    if count is None:
        return float(sum(x.numel() for x in results)), float(moved)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"])), float(moved)


def compute_seconds(graph: fx.Graph, device: Device) -> float:
    """Time of all calls of a local graph but its collectives, one after the other."""
    total = 0.0
    for node in graph.nodes:
        if "collective" not in node.meta:
            flops, moved = work(node)
            dtype = next(
                (x.dtype for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)), torch.float32
            )
            total += max(flops / device.rate(dtype), moved / device.bandwidth)
    return total
