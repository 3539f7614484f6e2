"""OptimizerTies: an optimizer's param_groups and state stay the same objects, holding managed tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from spmd.capture.objects import successor
from spmd.graph.local import Layouts
from spmd.runtime.storage import Storage
from spmd.runtime.world import World
from spmd.sharding.layout import R

_TIES = "_spmd_ties"  # Optimizer.__getstate__ leaves it out, so copies and pickles start without


class OptimizerTies:
    """One optimizer. Shared by all compiled functions that use it."""

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self.optimizer, self.world = optimizer, world
        self.groups, self.group_list = list(optimizer.param_groups), optimizer.param_groups
        self.state = optimizer.state
        self.storages: dict[torch.Tensor, dict[str, Storage]] = {}
        optimizer.register_load_state_dict_post_hook(lambda _: self.adopt())

    @classmethod
    def of(cls, optimizer: Optimizer, world: World) -> OptimizerTies:
        ties = getattr(optimizer, _TIES, None)
        if ties is None:
            ties = cls(optimizer, world)
            setattr(optimizer, _TIES, ties)
        return ties

    def follow(self) -> None:
        """Put the successors of retired parameters into the groups and the keys of the state, in place and in order."""
        self.groups, self.group_list = (
            list(self.optimizer.param_groups),
            self.optimizer.param_groups,
        )  # add_param_group may have been called
        for group in self.groups:
            group["params"][:] = map(successor, group["params"])
        if any(successor(p) is not p for p in self.state if isinstance(p, torch.Tensor)):
            _refill(
                self.state,
                {successor(p) if isinstance(p, torch.Tensor) else p: values for p, values in self.state.items()},
            )

    def manage(self, owner: torch.Tensor, key: str, name: str, layouts: Layouts) -> Storage:
        """The storage of a state that exists already."""
        value = self.state[owner][key]
        known = self.known(owner, key)
        if known is not None and known.layouts == layouts and known.fits(value):
            known.load(value)
            storage = known
        elif self.world.mesh is None:
            storage = Storage.plain(name, value, self.world)
        else:  # in memory of its own: after load_state_dict it's shared with the user's checkpoint, or with another optimizer
            storage = self._own(owner, key, name, value, layouts)
        return self._keep(owner, key, storage)

    def create(
        self, owner: torch.Tensor, key: str, name: str, local: torch.Tensor, layouts: Layouts, like: torch.Tensor
    ) -> Storage:
        """The storage of a new state, whole as `like`, of which `local` is this rank's part."""
        known = self.known(owner, key)
        if (
            known is not None
            and known.layouts == layouts
            and known.shape == like.shape
            and known.buffer.dtype == local.dtype
        ):
            with torch.no_grad():
                known.local.copy_(local)
            storage = known
        elif _stays_plain(key, owner, local, self.world):
            storage = Storage.plain(name, local.clone(), self.world)  # two states may be one value of the graph
        else:
            storage = Storage.from_local(name, local, layouts, like.shape, like.stride(), self.world)
        return self._keep(owner, key, storage)

    def _own(self, owner: torch.Tensor, key: str, name: str, value: torch.Tensor, layouts: Layouts) -> Storage:
        if _stays_plain(key, owner, value, self.world):
            return Storage.plain(name, value.detach().clone(), self.world)
        whole = all(layout == R for layout in layouts)
        return Storage.of(name, value.detach().clone() if whole else value, layouts, self.world)

    def known(self, owner: torch.Tensor, key: str) -> Storage | None:
        return self.storages.get(owner, {}).get(key)

    def _keep(self, owner: torch.Tensor, key: str, storage: Storage) -> Storage:
        self.storages.setdefault(owner, {})[key] = storage
        self.state[owner][key] = storage.tensor
        return storage

    # ------------------------------------------------------------------------------------------------- staying true

    def in_place(self) -> bool:
        """Whether nothing was replaced since the last call."""
        optimizer, state = self.optimizer, self.state
        if optimizer.state is not state or optimizer.param_groups is not self.group_list:
            return False
        for owner, storages in self.storages.items():
            values = state.get(owner) or {}
            for key, storage in storages.items():
                if values.get(key) is not storage.tensor or not storage.intact():
                    return False
        return True

    def adopt(self) -> None:
        """After load_state_dict or the like: values go into the buffers, numbers into the old group dicts."""
        optimizer = self.optimizer
        if optimizer.param_groups is not self.group_list and len(optimizer.param_groups) == len(self.groups):
            for old, new in zip(self.groups, optimizer.param_groups, strict=True):
                if new is not old:
                    _refill(old, new)
            self.group_list[:] = self.groups
            optimizer.param_groups = self.group_list
        if optimizer.state is not self.state:
            _refill(self.state, optimizer.state)
            optimizer.state = self.state
        for owner, values in self.state.items():
            if isinstance(owner, torch.Tensor) and isinstance(values, dict):
                self._adopt_values(owner, values)

    def _adopt_values(self, owner: torch.Tensor, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            known = self.known(owner, key)
            if known is None or not known.fits(value):
                home = Storage.under(owner)
                if home is not None:
                    layouts = home.layouts if value.shape == owner.shape else (R,) * len(self.world.shape)
                    self._keep(owner, key, self._own(owner, key, f"{home.name}.{key}", value, layouts))
            elif value is known.tensor:
                if not known.intact():
                    known.repair()
            else:
                known.load(value)
                values[key] = known.tensor


def _refill(target: dict[Any, Any], source: dict[Any, Any]) -> None:
    """Give `target` the items of `source`, in their order."""
    target.clear()
    target.update(source)


def _stays_plain(key: str, owner: torch.Tensor, value: torch.Tensor, world: World) -> bool:
    """Counters such as `step` are plain tensors, as in FSDP2: they may lie on the CPU, and `.item()` reads them."""
    if isinstance(value, DTensor):
        return False
    return (
        world.mesh is None or value.device != world.device or (value.dim() == 0 and (owner.dim() > 0 or key == "step"))
    )
