"""Module hooks: load_state_dict reshards, eager calls of a sharded model are refused.

All are functions of this module and hold nothing, so models stay picklable and deep copies keep them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from spmd._torch import pytree
from spmd.errors import Offence, StaleError
from spmd.runtime.storage import Storage

LENT = "_spmd_lent"  # attribute of tensors that `gathered` lends


def watch(module: nn.Module) -> None:
    """Hook a module that holds sharded tensors itself; a second call does nothing."""
    if refuse_eager_call not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(refuse_eager_call, with_kwargs=True)
        module.register_load_state_dict_pre_hook(reshard_on_load)


def held(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """(dict, key, tensor) of the parameters and buffers that `module` holds itself."""
    places: list[dict[str, Any]] = [module._parameters, module._buffers]
    for place in places:
        for name, tensor in place.items():
            if tensor is not None:
                yield place, name, tensor


def refuse_eager_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: plain tensors don't meet sharded parameters.

    Raises:
        StaleError: naming the two ways to run the model. DTensor inputs, and fake parameters while tracing, pass.
    """
    sharded = [name for _, name, tensor in held(module) if isinstance(tensor, DTensor)]
    if not sharded or not any(
        isinstance(x, torch.Tensor) and not isinstance(x, DTensor) for x in pytree.tree_leaves((args, kwargs))
    ):
        return
    names = ", ".join(sharded)
    raise StaleError(
        Offence(
            f"{type(module).__name__} was called eagerly on a plain tensor; its {names} lie as DTensors on the ranks",
            remedy="call it in a function compiled with spmd.compile (an eval step shares the parameters), "
            "or inside `with spmd.gathered(model):`",
        )
    )


@torch.no_grad()
def reshard_on_load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
) -> None:
    """load_state_dict pre-hook: values go into the buffers, plain or DTensors, with `assign=True` or without.

    What torch then copies or assigns is the managed tensor itself. Where the buffer doesn't fit (another dtype with
    `assign=True`) the value is placed like the tensor that it replaces, and the next compiled call takes it in.
    """
    assign = local_metadata.get("assign_to_params_buffers", False)
    for _, name, tensor in held(module):
        value = state_dict.get(prefix + name)
        if not isinstance(tensor, DTensor) or not isinstance(value, torch.Tensor):
            continue
        if tensor.dim() == 0 and value.shape == (1,):
            value = value.squeeze(0)  # as torch does for checkpoints of 0.3
        if value.shape != tensor.shape:
            continue  # torch says so
        storage = Storage.under(tensor)
        if storage is not None and not (assign and value.dtype != tensor.dtype):
            storage.load(value)
            state_dict[prefix + name] = tensor
        elif not isinstance(value, DTensor):
            state_dict[prefix + name] = placed_like(tensor, value)


def placed_like(tensor: DTensor, whole: torch.Tensor) -> DTensor:
    """This rank's part of `whole` as a DTensor placed like `tensor`. No communication."""
    return distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


refuse_eager_call._spmd = True  # type: ignore[attr-defined]  # guards on hooks pass over it
