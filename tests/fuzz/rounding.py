"""Other rounding errors: what any other order of summation, or another vector length, may do to a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# What moves, picks or compares numbers yields the same everywhere: a tie between copies stays one.
EXACT = """
    abs add alias amax amin arange argmax argmin argsort bernoulli bernoulli_ cat ceil clamp clamp_max clamp_min clone constant_pad_nd
    copysign cummax cummin detach diag_embed embedding empty empty_like eye fill flip floor full full_like gather hardtanh index
    index_select kthvalue lift_fresh masked_fill max maximum median min minimum mul nanmedian native_dropout neg new_full new_zeros
    ones ones_like rand rand_like randn randn_like randperm relu repeat roll rot90 round scalar_tensor scatter select_backward
    sgn sign slice_backward sort stack sub threshold_backward topk tril triu trunc unfold_backward where zeros zeros_like _to_copy
    max_pool2d_with_indices reflection_pad1d replication_pad1d adaptive_max_pool2d
    """


class Rounding(TorchDispatchMode):
    """Every result of arithmetic is off by about `size`, relatively."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self.exact = set(EXACT.split())
        self.size, self.generator = size, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name.split("::")[1] in self.exact or any(r.alias_info is not None for r in schema.returns):
            return out
        return pytree.tree_map(self.off, out)

    def off(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float64:
            return x
        return x * (1 + self.size * torch.randn(x.shape, generator=self.generator))


def nudger(size: float, seed: int) -> Callable[[Tensor], Tensor]:
    """Adds errors of about `size`, relatively and a little absolutely: a gradient that is zero is so only nearly."""
    generator = torch.Generator().manual_seed(seed)
    return lambda x: x + size * (x.abs() + 0.01) * torch.randn(x.shape, generator=generator)
