"""Any callable that rewrites a GraphModule, as a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.fx as fx

from spmd.graph.edit import yielded
from spmd.graph.local import LocalGraph
from spmd.passes.base import GraphPass, Numerics

Rewrite = Callable[[fx.GraphModule], fx.GraphModule | None]


@dataclass(frozen=True)
class Adapted(GraphPass):
    """A rewrite that knows nothing of local graphs. Nodes that it makes get their values' metadata; it may work in place."""

    rewrite: Rewrite
    name: str = ""  # type: ignore[misc]  # of the callable, by default
    numerics = Numerics.ROUNDING

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or getattr(self.rewrite, "__name__", type(self.rewrite).__name__))

    def run(self, graph: LocalGraph) -> LocalGraph:
        module = self.rewrite(graph.module)
        module = graph.module if module is None else module
        for node in module.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = yielded(node)
        return replace(graph, module=module)
