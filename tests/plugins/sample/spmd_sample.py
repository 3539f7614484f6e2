"""A pass of somebody else's: the smallest that does something, to copy from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spmd.graph.local import LocalGraph
from spmd.passes import GraphPass, Numerics

mul = torch.ops.aten.mul.Tensor


@dataclass(frozen=True)
class FoldScale(GraphPass):
    """x * a * b becomes x * (a * b) for numbers a and b.

    limit: how often at most.
    """

    name = "fold_scale"
    numerics = Numerics.ROUNDING
    limit: int = 100

    def run(self, graph: LocalGraph) -> LocalGraph:
        for outer in graph.graph.find_nodes(op="call_function", target=mul)[: self.limit]:
            inner, b = outer.args
            if getattr(inner, "target", None) is mul and type(inner.args[1]) is type(b) is float:
                outer.args = (inner.args[0], inner.args[1] * b)
        return graph
