"""parallelize_module: a plan applied eagerly, with DTensors and hooks. `TensorParallelMode` takes the same plan and compiles it."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from spmd.errors import Offence, PlacementError
from spmd.modes.border import Border
from spmd.modes.plan import Match, Plan, joined, normal, read
from spmd.modes.styles import Description, ParallelStyle

# On a parameter that was replaced: what it was replaced by, for the other modules that hold it.
SHARDED = "_spmd_sharded"


@dataclass(frozen=True)
class Call:
    """What `apply(module, mesh)` isn't told: where values come from, and what the module is called."""

    src_data_rank: int | None = 0
    fqn: str = ""


CALL: ContextVar[Call] = ContextVar("parallelize_module", default=Call())  # noqa: B039  frozen


def parallelize_module(module: nn.Module, mesh: DeviceMesh, plan: Plan, *, src_data_rank: int | None = 0) -> nn.Module:
    """Shard `module` over the one axis of `mesh`, in place, as the plan says.

    Args:
        plan: FQN patterns to styles, ours or torch's own; a style alone is for `module` itself. A token of a pattern, between dots, matches one of
            the FQN as in `fnmatch`; "" is `module` itself. A pattern that matches nothing warns.
        src_data_rank: place on the axis of the rank whose values all get; None: each rank cuts its own, which are equal already.
    Returns:
        The module, whose matched parameters are DTensors; tied ones stay one object.
    Raises:
        PlacementError: the mesh has several axes, a style isn't for its module, or two styles or tied parameters want different placements. Nothing
            has changed then.
    """
    check_axes(mesh)
    modules = dict(module.named_modules(remove_duplicate=False))
    done: list[tuple[nn.Module, ParallelStyle]] = []
    for found in read(plan, modules):
        if (found.module, found.style) not in done:  # a module may have several names, or match several patterns
            done.append((found.module, found.style))
            before = CALL.set(Call(src_data_rank, found.fqn))
            try:
                apply(found, mesh)
            finally:
                CALL.reset(before)
    retie(modules.values())
    return module


def check_axes(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        slices = " or ".join(f"mesh[{name!r}]" for name in mesh.mesh_dim_names or ()) or "one that has names, sliced"
        raise PlacementError(f"tensor parallelism works on one mesh axis, the mesh has {mesh.ndim}: pass {slices}")


def apply(found: Match, mesh: DeviceMesh) -> None:
    """Whatever the style does, parameters that it replaces are known by the other modules that hold them."""
    retie(found.module.modules())
    held = [(sub, name, old) for sub in found.module.modules() for name, old in sub._parameters.items()]
    if found.style.apply(found.module, mesh) is not found.module:
        what = f"{type(found.style).__name__}.apply doesn't return the module that it was given"
        raise PlacementError(Offence(what, fqn=found.fqn, remedy="shard it in place and return it"))
    for sub, name, old in held:
        new = sub._parameters.get(name)
        if old is not None and new is not None and new is not old:
            setattr(old, SHARDED, new)


def retie(modules: Iterable[nn.Module]) -> None:
    """Where one of the modules that hold a parameter has a new one, all of them get it."""
    for sub in modules:
        for name, parameter in sub._parameters.items():
            while (parameter := getattr(parameter, SHARDED, None)) is not None:
                sub._parameters[name] = parameter


def apply_description(description: Description, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What a style says about `module`, done to it."""
    check_axes(mesh)
    fqn = CALL.get().fqn
    if description.parameters:
        if any(isinstance(b := border(hook), Border) and b.description.parameters for hook in hooks(module)):
            what = f"{type(module).__name__} has been parallelized already, and would be once more"
            raise PlacementError(Offence(what, fqn=fqn, remedy="apply one style to it, once"))
        retie([module])
        for name, parameter in module._parameters.items():
            if parameter is not None:
                placement = description.parameters.get(name)
                module._parameters[name] = sharded(parameter, placement, mesh, joined(fqn, name))
    at = Border(description, module, mesh, fqn)
    if description.desired_inputs or description.kwargs:
        module.register_forward_pre_hook(at.enter, with_kwargs=True)
    if description.desired_outputs:
        module.register_forward_hook(at.leave)
    return module


def hooks(module: nn.Module) -> Iterable[object]:
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def border(hook: object) -> object:
    return getattr(hook, "__self__", None)


def sharded(parameter: nn.Parameter, placement: Placement | None, mesh: DeviceMesh, fqn: str) -> nn.Parameter:
    """The parameter as a DTensor, replicated where nothing is said of it. One that is a DTensor already has to lie as it's wanted."""
    wanted = normal(placement or Replicate(), parameter.dim())
    if isinstance(parameter, DTensor):
        if parameter.device_mesh != mesh or (placement is not None and parameter.placements != (wanted,)):
            what = f"it lies as {parameter.placements} on {parameter.device_mesh} already, the plan wants {wanted} on {mesh}"
            raise PlacementError(Offence(what, fqn=fqn, remedy="give tied parameters the same placement"))
        return parameter
    whole = distribute_tensor(parameter.detach(), mesh, [wanted], src_data_rank=CALL.get().src_data_rank)
    new = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))  # what users and libraries note on parameters
    setattr(parameter, SHARDED, new)
    return new
