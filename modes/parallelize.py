"""parallelize_module: a plan applied eagerly, with DTensors and hooks. `TensorParallelMode` takes the same plan and compiles it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from spmd.errors import InputError, Offence, PlacementError
from spmd.modes.plan import Plan, match
from spmd.modes.styles import Description, ParallelStyle

SHARDED = (
    "_spmd_sharded"  # on a parameter that was replaced: what it was replaced by, for the other modules that hold it
)


def parallelize_module(module: nn.Module, mesh: DeviceMesh, plan: Plan, *, src_data_rank: int | None = 0) -> nn.Module:
    """Shard `module` over the one axis of `mesh`, in place, as the plan says.

    Args:
        plan: FQN patterns to styles, ours or torch's own; a style alone is for `module` itself. A token of a pattern, between dots, matches one of
            the FQN as in `fnmatch`; "" is `module` itself. A pattern that matches nothing warns.
        src_data_rank: place on the axis of the rank whose values all get; None: each rank cuts its own, which are equal already.
    Returns:
        The module, whose matched parameters are DTensors; tied ones stay one object.
    Raises:
        PlacementError: the mesh has several axes, a style isn't for its module, or tied parameters would lie differently.
    """
    if mesh.ndim != 1:
        slices = " or ".join(f"mesh[{name!r}]" for name in mesh.mesh_dim_names or ()) or "one that has names, sliced"
        raise PlacementError(f"parallelize_module works on one mesh axis, the mesh has {mesh.ndim}: pass {slices}")
    modules = dict(module.named_modules(remove_duplicate=False))
    for _, sub, style in list(match(plan, modules)):
        if type(style).apply is ParallelStyle.apply:
            apply_description(style.describe(sub), sub, mesh, src_data_rank)
        else:
            style.apply(sub, mesh)
    for sub in modules.values():
        for name, parameter in sub._parameters.items():
            sub._parameters[name] = getattr(parameter, SHARDED, parameter)
    return module


def apply_description(
    description: Description, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None = 0
) -> nn.Module:
    """What a style says about `module`, done to it."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            placement = description.parameters.get(name, Replicate())
            module._parameters[name] = sharded(parameter, placement, mesh, name, src_data_rank)
    border = Border(description, module, mesh)
    if description.desired_inputs or description.kwargs:
        module.register_forward_pre_hook(border.enter, with_kwargs=True)
    if description.desired_outputs:
        module.register_forward_hook(border.leave)
    return module


def sharded(
    parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh, name: str, src_data_rank: int | None
) -> nn.Parameter:
    """The parameter as a DTensor; the one it was made before, where another module holds it too."""
    known = getattr(parameter, SHARDED, parameter)
    wanted = Shard(placement.dim % known.dim()) if isinstance(placement, Shard) else placement
    if isinstance(known, DTensor):
        if known.device_mesh != mesh or known.placements != (wanted,):
            what = f"it lies as {known.placements} on {known.device_mesh} already, the plan wants {wanted} on {mesh}"
            raise PlacementError(Offence(what, fqn=name, remedy="give tied parameters the same placement"))
        return known  # type: ignore[return-value]
    whole = distribute_tensor(parameter.detach(), mesh, [wanted], src_data_rank=src_data_rank)
    new = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    setattr(parameter, SHARDED, new)
    return new


class Border:
    """The hooks of one module."""

    def __init__(self, description: Description, module: nn.Module, mesh: DeviceMesh) -> None:
        self.description, self.mesh = description, mesh
        self.name, self.features = type(module).__name__, getattr(module, "in_features", None)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        d = self.description
        if len(args) < len(d.desired_inputs):
            what = f"{self.name} gets {len(args)} positional arguments, its style describes {len(d.desired_inputs)}"
            raise InputError(Offence(what, remedy="describe keyword arguments by name: input_kwarg_layouts"))
        if missing := [name for name in d.kwargs if name not in kwargs]:
            raise InputError(
                Offence(f"{self.name} isn't given the keyword arguments {missing} that its style describes")
            )
        local = d.use_local_input
        new = [self.move(x, a, b, local) for x, a, b in zip(args, d.inputs, d.desired_inputs, strict=False)]
        named = {name: self.move(kwargs[name], a, b, local) for name, (a, b) in d.kwargs.items()}
        return (*new, *args[len(new) :]), {**kwargs, **named}

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        d = self.description
        results = output if isinstance(output, (tuple, list)) else (output,)
        if len(results) < len(d.desired_outputs):
            what = f"{self.name} returns {len(results)} values, its style describes {len(d.desired_outputs)}"
            raise InputError(
                Offence(what, remedy="give a layout for each value that it returns, None for those to leave alone")
            )
        new = [
            self.move(x, a, b, d.use_local_output)
            for x, a, b in zip(results, d.outputs, d.desired_outputs, strict=False)
        ]
        whole = (*new, *results[len(new) :])
        return type(output)(whole) if isinstance(output, (tuple, list)) else whole[0]

    def move(self, x: Any, has: Placement | None, wants: Placement | None, local: bool) -> Any:
        if not isinstance(x, torch.Tensor) or (has is None and wants is None):
            return x
        whole = x if isinstance(x, DTensor) else self.whole(x, has or Replicate())
        if wants is not None and whole.placements != (wants,):
            whole = whole.redistribute(placements=[wants])
        return whole.to_local() if local else whole

    def whole(self, x: torch.Tensor, has: Placement) -> DTensor:
        """A plain tensor, understood as this rank's part. Parts may be uneven: how long all of them are is known for a Linear, else asked."""
        if not isinstance(has, Shard):
            return DTensor.from_local(x, self.mesh, [has], run_check=False)
        dim = has.dim % x.dim()
        if dim == x.dim() - 1 and self.features is not None:
            length = self.features
        else:
            size = torch.tensor([x.shape[dim]], device=x.device)
            dist.all_reduce(size, group=self.mesh.get_group())
            length = int(size)
        shape = torch.Size((*x.shape[:dim], length, *x.shape[dim + 1 :]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, self.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
