"""Expert and context parallel: styles that spread experts, or a sequence, over an axis."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from spmd.errors import PlacementError
from spmd.modes.styles import Description, ParallelStyle, unfit


@dataclass(frozen=True)
class ExpertParallel(ParallelStyle):
    """Split stacked experts: a rank has some of them, and computes them for the tokens of all ranks.

    For a module whose parameters all have the experts as dim 0, and that takes and returns [experts, tokens, ...]: dispatch before it and
    combine after it are an all-to-all each, where the tokens lie in parts.

    input_layouts: how the input comes; None: in parts along dim 1, the tokens. output_layouts: how the output leaves; None: as the input comes.
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True

    def describe(self, module: nn.Module) -> Description:
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if len({p.shape[:1] for p in own.values()}) != 1 or any(p.dim() < 2 for p in own.values()):
            raise unfit(self, module, "modules whose own parameters are stacked by expert")
        comes = self.input_layouts or Shard(1)
        return Description(
            dict.fromkeys(own, Shard(0)),
            inputs=(comes,),
            desired_inputs=(Shard(0),),
            outputs=(Shard(0),),
            desired_outputs=(self.output_layouts or comes,),
            use_local_output=self.use_local_output,
        )


@dataclass(frozen=True)
class ContextParallel(ParallelStyle):
    """Split the sequence, from a module's first argument on: for the whole model ("") usually. Its parameters are left as they are.

    sequence_dim: dim of that argument. Attention gathers keys and values, for each rank's own queries.
    exchange_heads: attention inside runs on parts of the heads instead, for whole sequences: an all-to-all for each of queries, keys, values and
        the result, which is less where there are few heads a rank, and more memory. With fewer heads than ranks attention runs whole on each.
    """

    sequence_dim: int = 1
    exchange_heads: bool = False

    def describe(self, module: nn.Module) -> Description:
        split = (Shard(self.sequence_dim),)
        return Description(
            inputs=(Replicate(),), desired_inputs=split, context="heads" if self.exchange_heads else "keys"
        )

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        raise PlacementError("ContextParallel compiles: pass the plan to TensorParallelMode, not to parallelize_module")
