"""Binding: puts managed tensors into the user's modules and optimizers, and keeps them there (contract C6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from spmd.capture.objects import successor
from spmd.capture.result import Capture, Slot
from spmd.errors import Offence, SpmdError, StaleError, StateError
from spmd.graph.local import Layouts
from spmd.graph.step import STORED, Role
from spmd.runtime import hooks
from spmd.runtime.optimizer import OptimizerTies
from spmd.runtime.stale import retire
from spmd.runtime.storage import Misplaced, Storage, layouts_of, local_part, placements_of
from spmd.runtime.world import World
from spmd.sharding.layout import R


def placed(tensor: torch.Tensor) -> Layouts | None:
    """The layouts that a tensor has already, from an earlier function or as a DTensor of the user's. None: it's plain.

    Raises:
        PlacementError: the user's DTensor is placed in a way that can't be kept.
    """
    tensor = successor(tensor)
    storage = Storage.under(tensor)
    if storage is not None:
        return storage.layouts
    return layouts_of(tensor) if isinstance(tensor, DTensor) else None


class Binding:
    """The storages of one captured step, and their places in modules and optimizers.

    `storages` has one for each stored input, by its name; `slot.tensor` of each is the managed tensor.
    """

    def __init__(self, capture: Capture, layouts: Sequence[Layouts | None], world: World) -> None:
        """`layouts` has an entry for each input of the step.

        Raises:
            StateError: a tensor is on another device than the mesh, or placed otherwise already. Nothing is changed.
            PlacementError: a layout has no torch placement.
        """
        self.capture, self.world = capture, world
        self.storages: dict[str, Storage] = {}
        self.ties = {name: OptimizerTies.of(o, world) for name, o in capture.optimizers.items()}
        wanted = [
            (slot, lay)
            for slot, lay in zip(capture.slots, layouts, strict=True)
            if slot.input.role in STORED and lay is not None
        ]
        _check(wanted, world)
        for slot, lay in wanted:
            if slot.input.role is not Role.STATE:
                self.storages[slot.input.name] = self._tensor(slot, lay)
        self._rest()
        for ties in self.ties.values():
            ties.follow()
        for slot, lay in wanted:
            if slot.input.role is Role.STATE and slot.tensor is not None:
                self._state(slot, lay)
        self._remember()

    # ------------------------------------------------------------------------------------------------- taking over

    def _tensor(self, slot: Slot, layouts: Layouts) -> Storage:
        assert slot.tensor is not None
        storage = take_over(slot.input.name, slot.tensor, layouts, self.world)
        slot.tensor = storage.tensor
        return storage

    def _rest(self) -> None:
        """Tensors that the step doesn't read are whole on every rank. Then every place gets its managed tensor."""
        whole = (R,) * len(self.world.shape)
        for root, module in self.capture.modules.items():
            for prefix, sub in module.named_modules():
                for place, key, tensor in list(hooks.held(sub)):
                    managed = successor(tensor)
                    if self.world.mesh is not None and not isinstance(managed, DTensor):
                        name = ".".join(filter(None, (root if len(self.capture.modules) > 1 else "", prefix, key)))
                        managed = take_over(name, managed, whole, self.world).tensor
                    if managed is not tensor:
                        setattr(sub, key, managed)  # not the dict alone: nn.LSTM keeps a list as well
                        place[key] = managed
                if self.world.mesh is not None and next(hooks.held(sub), None) is not None:
                    hooks.watch(sub)

    def _state(self, slot: Slot, layouts: Layouts) -> None:
        spec, ties = slot.input, self.ties[slot.input.root]
        self.storages[spec.name] = ties.manage(self.parameter(spec.owner), spec.key, spec.name, layouts)
        slot.tensor = self.storages[spec.name].tensor

    def add_state(self, name: str, local: torch.Tensor, layouts: Layouts, like: torch.Tensor) -> Storage:
        """Put a state that a graph has made into its optimizer: this rank's part of one that is whole like `like`.

        One that exists already stays as it is.
        """
        known = self.storages.get(name)
        if known is not None:  # a program for another batch size has made it
            return known
        root, owner, key = self._state_place(name)
        storage = self.ties[root].create(self.parameter(owner), key, name, local, layouts, like)
        self.storages[name] = storage
        for slot in self.capture.slots:
            if slot.input.role is Role.STATE and slot.input.name == name:
                slot.tensor = storage.tensor
        return storage

    def _state_place(self, name: str) -> tuple[str, str, str]:
        """(optimizer, parameter, key) of a state, from its slot or else from its name "<parameter>.<key>"."""
        for slot in self.capture.slots:
            if slot.input.role is Role.STATE and slot.input.name == name:
                return slot.input.root, slot.input.owner, slot.input.key
        owner, _, key = name.rpartition(".")
        tensor = self.parameter(owner)
        root = next(n for n, t in self.ties.items() if any(p is tensor for g in t.groups for p in g["params"]))
        return root, owner, key

    def parameter(self, name: str) -> torch.Tensor:
        """The managed parameter or buffer with this name."""
        return self.storages[name].tensor

    # ------------------------------------------------------------------------------------------------- gradients

    def gradient(self, owner: str) -> torch.Tensor | Misplaced | None:
        """The local part of a parameter's live gradient."""
        storage = self.storages[owner]
        grad = storage.tensor.grad
        if grad is None or storage.mesh is None:
            return grad
        return local_part(grad, storage.layouts, self.world)

    def set_gradient(self, owner: str, local: torch.Tensor | None) -> None:
        """Make `local` (this rank's part) the parameter's gradient."""
        storage = self.storages[owner]
        storage.tensor.grad = local if local is None or storage.mesh is None else storage.like(local)

    # ------------------------------------------------------------------------------------------------- staying true

    def _remember(self) -> None:
        """What `check` looks at: (container, key, tensor) of all places, and each tensor's storage."""
        managed = {id(s.tensor): s for s in self.storages.values()}
        self._places = [
            (place, key, tensor, managed[id(tensor)])
            for module in self.capture.modules.values()
            for sub in module.modules()
            for place, key, tensor in hooks.held(sub)
            if id(tensor) in managed
        ]
        roles = {slot.input.name: slot.input.role for slot in self.capture.slots}
        self._tensors = [s for name, s in self.storages.items() if roles.get(name) in (Role.PARAMETER, Role.BUFFER)]

    def check(self) -> bool:
        """Whether every managed tensor is in its place, once values that were put there instead are in the buffers.

        False if something no longer fits its buffer (another shape or dtype): the step must be captured anew.

        Raises:
            StaleError: called inside `with spmd.gathered(...)`.
        """
        fine = True
        for place, key, tensor, storage in self._places:
            if place.get(key) is not tensor:
                fine = self._adopt(place, key, storage) and fine
        for storage in self._tensors:
            if not storage.intact():
                fine = self._repair(storage) and fine
        for ties in self.ties.values():
            if not ties.in_place():
                ties.adopt()
        return fine

    def _adopt(self, place: dict[str, Any], key: str, storage: Storage) -> bool:
        """Something else stands where `storage.tensor` stood."""
        value = place.get(key)
        if getattr(value, hooks.LENT, False):
            raise StaleError(
                Offence(
                    "a compiled step was called inside `with spmd.gathered(...)`",
                    fqn=storage.name,
                    remedy="leave the block first",
                )
            )
        if not isinstance(value, torch.Tensor) or not storage.fits(value):
            return False
        storage.load(value.detach())
        place[key] = storage.tensor
        for module in (m for root in self.capture.modules.values() for m in root.modules()):
            if place is module._parameters or place is module._buffers:
                setattr(module, key, storage.tensor)
        return True

    def _repair(self, storage: Storage) -> bool:
        if not storage.fits(storage.tensor):
            return False
        storage.repair()
        storage.mark()
        return True


# ----------------------------------------------------------------------------------------------------- one tensor


def take_over(name: str, tensor: torch.Tensor, layouts: Layouts, world: World) -> Storage:
    """The storage of a parameter or buffer: the one it has, one under the user's DTensor, or one that replaces it."""
    tensor = successor(tensor)
    known = Storage.under(tensor)
    if known is not None:
        if not known.intact():
            known.repair()
        return known
    if world.mesh is None:
        return Storage.plain(name, tensor, world)
    if isinstance(tensor, DTensor) and tensor.device_mesh == world.mesh:
        return Storage.adopt(name, tensor, layouts, world).mark()
    storage = Storage.of(name, tensor, layouts, world).mark()
    _carry(tensor, storage)
    retire(tensor, storage.tensor, name)
    return storage


def _carry(old: torch.Tensor, storage: Storage) -> None:
    """Attributes, hooks and the live gradient go with the values."""
    new = storage.tensor
    new.__dict__.update({k: v for k, v in old.__dict__.items() if not k.startswith("_spmd") and k != "_is_param"})
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks  # the same dict, so that the user's handles still remove them
    if getattr(old, "_post_accumulate_grad_hooks", None):
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    if old.grad is not None:
        new.grad = Storage.of(storage.name, old.grad, storage.layouts, storage.world).tensor


def _check(wanted: Sequence[tuple[Slot, Layouts]], world: World) -> None:
    """All that can be wrong, before anything is changed."""
    offences: list[Offence] = []
    for slot, layouts in wanted:
        if slot.tensor is None or world.mesh is None:
            continue
        name, tensor = slot.input.name, successor(slot.tensor)
        try:
            placements_of(name, layouts, tensor.shape, world)
        except SpmdError as error:
            offences.extend(error.offences)
        if slot.input.role is not Role.STATE and tensor.device != world.device:
            offences.append(
                Offence(
                    f"it's on {tensor.device}, the mesh on {world.device}",
                    fqn=name,
                    remedy=f'move the model first: model.to("{world.device}")',
                )
            )
        offences.extend(_conflict(slot, tensor, layouts, world))
    if offences:
        raise StateError(offences)


def _conflict(slot: Slot, tensor: torch.Tensor, layouts: Layouts, world: World) -> list[Offence]:
    """A parameter keeps the layout it has."""
    if slot.input.role is Role.STATE:
        return []
    known = Storage.under(tensor)
    if known is not None and known.world.mesh != world.mesh:
        what = f"it lies on {known.world.mesh} already, this function runs on {world.mesh}"
        return [Offence(what, fqn=slot.input.name, remedy="use one mesh for all functions that share it")]
    now = placed(tensor)
    if now is None or now == layouts:
        return []
    has, asks = (", ".join(map(str, x)) for x in (now, layouts))
    return [
        Offence(
            f"it lies as {has} already, this function asks for {asks}",
            fqn=slot.input.name,
            remedy="use one parallel mode, on one mesh, for all that share it",
        )
    ]
