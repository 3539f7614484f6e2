"""Lists the inputs of the step graph: every tensor and number that is read anew at each call."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from spmd._torch import DTensor
from spmd.capture.arguments import Arguments
from spmd.capture.objects import Objects, joined, successor
from spmd.capture.result import Slot
from spmd.capture.views import ItemView, StateView
from spmd.errors import Offence, StateError
from spmd.graph.step import Input, Role


@dataclass
class Entry:
    """One input: its description, the live value, and what stands for it while tracing."""

    input: Input
    slot: Slot
    value: Any
    traced: Any = None
    keeper: Any = None  # STATE, and numbers in a state: the key under which optimizer.state holds it

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def list_inputs(objects: Objects, arguments: Arguments, dims: dict[int, int], lifted: frozenset[str]) -> list[Entry]:
    """All inputs, in the order of roles: parameters, buffers, states, gradients, hyper-parameters, arguments."""
    entries = [_entry(Input(t.role, t.name, t.root), t.tensor) for t in objects.tensors.values()]
    entries.sort(key=lambda e: e.input.role is not Role.PARAMETER)
    entries += _states(objects)
    entries += [
        _entry(Input(Role.GRADIENT, f"{p.name}.grad", p.root, p.name), p.tensor.grad)
        for p in objects.parameters()
        if p.tensor.grad is not None
    ]
    entries += _hypers(objects, lifted)
    entries += _scalars(objects, lifted)
    taken = {e.input.name for e in entries}
    for e in _arguments(objects, arguments, dims, lifted):
        if e.input.name in taken:  # an argument called like a parameter of the step's only module
            e.input = replace(e.input, name=f"{e.input.name} (argument)")
            e.slot.input = e.input
        entries.append(e)
    return entries


def _entry(input: Input, tensor: torch.Tensor) -> Entry:
    return Entry(input, Slot(input, tensor), tensor)


def _states(objects: Objects) -> Iterator[Entry]:
    """Tensors and numbers in the states of parameters."""
    for root, optimizer in objects.states():
        for parameter, state in optimizer.state.items():
            owner = objects.named(parameter)
            if owner is None:
                continue  # check_state has refused what matters
            for key, value in state.items():
                name = objects.state_name(root, owner, key)
                if isinstance(value, torch.Tensor):
                    input, container = Input(Role.STATE, name, root, owner, key), None
                elif is_number(value):
                    input, container = Input(Role.HYPER, name, root), StateView(optimizer, parameter)
                else:
                    continue
                tensor = value if isinstance(value, torch.Tensor) else None
                yield Entry(input, Slot(input, tensor, container, key), value, keeper=parameter)


def _hypers(objects: Objects, lifted: frozenset[str]) -> Iterator[Entry]:
    for title, group in objects.groups():
        root = title.partition(".param_groups")[0]
        for key, value in group.items():
            name = f"{title}.{key}"
            wanted = key == "lr" or name in lifted
            if isinstance(value, torch.Tensor) or wanted and is_number(value):
                yield _hyper(name, root, group, key, value)
            elif wanted and isinstance(value, tuple):
                for j, item in enumerate(value):
                    if is_number(item):
                        yield _hyper(f"{name}[{j}]", root, ItemView(group, key, j), key, item)


def _hyper(name: str, root: str, container: MutableMapping[str, Any], key: str, value: Any) -> Entry:
    input = Input(Role.HYPER, name, root)
    return Entry(input, Slot(input, value if isinstance(value, torch.Tensor) else None, container, key), value)


def _scalars(objects: Objects, lifted: frozenset[str]) -> Iterator[Entry]:
    """Lifted attributes of modules and optimizers, closure variables and globals."""
    for fqn, module in objects.submodules():
        for key, value in vars(module).items():
            if is_number(value) and (name := joined(fqn, key)) in lifted:
                yield _hyper(name, fqn, vars(module), key, value)
    for scope in objects.scopes:
        for key in scope.keys:
            if scope_name(scope.title, key) in lifted and is_number(scope.mapping[key]):
                yield _hyper(scope_name(scope.title, key), "", scope.mapping, key, scope.mapping[key])
    for root, optimizer in objects.optimizers.items():
        for key, value in vars(optimizer).items():
            if f"{root}.{key}" in lifted and is_number(value):
                yield _hyper(f"{root}.{key}", root, vars(optimizer), key, value)


def scope_name(title: str, key: str) -> str:
    """Name of a variable outside the step's arguments, as guards and `lifted` use it."""
    return f"{key} ({title})"


def _arguments(objects: Objects, arguments: Arguments, dims: dict[int, int], lifted: frozenset[str]) -> Iterator[Entry]:
    for i, (path, value) in enumerate(zip(arguments.paths, arguments.leaves, strict=True)):
        if isinstance(value, torch.Tensor):
            if id(successor(value)) not in objects.tensors:
                input = Input(Role.USER, path, batch_dim=None if isinstance(value, DTensor) else dims.get(i))
                yield Entry(input, Slot(input, leaf=i), value)
        elif is_number(value) and path in lifted:
            input = Input(Role.HYPER, path)
            yield Entry(input, Slot(input, leaf=i), value)


def check_state(objects: Objects, arguments: Arguments) -> None:
    """Refuses state that can't be one coherent model.

    Raises:
        StateError: an optimizer holds tensors that no module does, tensors overlap in memory, or devices differ.
    """
    offences = [*_unmade(objects), *_orphans(objects), *_overlaps(objects), *_devices(objects, arguments)]
    if offences:
        raise StateError(offences)


def _unmade(objects: Objects) -> Iterator[Offence]:
    for t in objects.tensors.values():
        if t.tensor.device.type == "meta":
            yield Offence(
                "it's on the meta device and has no values yet",
                fqn=t.name,
                remedy='make the model\'s memory first, model.to_empty(device="..."), fill it, and build the optimizer after that',
            )


def _orphans(objects: Objects) -> Iterator[Offence]:
    for root, optimizer in objects.optimizers.items():
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if id(successor(p)) not in objects.tensors:
                    label = f"{root}.param_groups[{i}]['params'][{j}] of shape {tuple(p.shape)}"
                    yield Offence(
                        f"{label} belongs to no module that the step reaches",
                        remedy="build the optimizer from model.parameters() after the model is final, and pass the model to the step",
                    )


def _overlaps(objects: Objects) -> Iterator[Offence]:
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for t in objects.tensors.values():
        if isinstance(t.tensor, DTensor) or t.tensor.numel() == 0 or t.tensor.is_meta:
            continue
        item = t.tensor.element_size()
        start = int(t.tensor.storage_offset()) * item
        extent = sum(int((n - 1) * s) for n, s in zip(t.tensor.shape, t.tensor.stride(), strict=True)) * item + item
        by_storage.setdefault(t.tensor.untyped_storage().data_ptr(), []).append((start, start + extent, t.name))
    for ranges in by_storage.values():
        ranges.sort()
        for (_, end, first), (start, _, second) in pairwise(ranges):
            if start < end:
                yield Offence(
                    f"{second} shares memory with {first}, but is another tensor",
                    fqn=second,
                    remedy="tie tensors by sharing one Parameter (a.weight = b.weight), or clone one of them",
                )


def _devices(objects: Objects, arguments: Arguments) -> Iterator[Offence]:
    by_device: dict[torch.device, str] = {}
    for t in objects.tensors.values():
        by_device.setdefault(t.tensor.device, t.name)
    for path, leaf in zip(arguments.paths, arguments.leaves, strict=True):
        if by_device and isinstance(leaf, torch.Tensor) and leaf.dim():  # 0-dim tensors mix with any device
            by_device.setdefault(leaf.device, path)
    if len(by_device) > 1:
        listing = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        yield Offence(
            f"the model's tensors and the arguments lie on several devices: {listing}",
            remedy="move the model and the batch to one device",
        )
