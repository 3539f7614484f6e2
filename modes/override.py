"""Override: a submodule is traced as something else, and what that leaves in the program may be rewritten."""

from __future__ import annotations

import torch.fx as fx
from torch import nn


class Override:
    """Stands in for submodules while a step is traced: for one that can't be traced, or that something else should compute.

    Example:
        class Fused(Override):
            def replacement(self, fqn, module):
                return CallsMyOp(module.weight) if isinstance(module, RMSNorm) else module
    """

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        """What's traced in the place of `module`, or itself. Its parameters and buffers are those of the model. It's put back after the trace."""
        return module

    def transform(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite this rank's program of the step, before the passes; its collectives are there already."""
        return graph
