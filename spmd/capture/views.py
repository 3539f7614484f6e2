"""Places of Python numbers that aren't plain dict entries, as mappings: so that every number of a step lies in some container[key]."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer

from spmd.capture.objects import successor


class ItemView(MutableMapping[str, Any]):
    """One element of a tuple that lies in a dict, as `view[key]`: `param_groups[0]["betas"][0]`."""

    def __init__(self, owner: MutableMapping[str, Any], key: str, index: int) -> None:
        self.owner, self.key, self.index = owner, key, index

    def __getitem__(self, _: str) -> Any:
        return self.owner[self.key][self.index]

    def __setitem__(self, _: str, value: Any) -> None:
        items = list(self.owner[self.key])
        items[self.index] = value
        self.owner[self.key] = tuple(items)

    def __delitem__(self, _: str) -> None:
        raise TypeError("an element of a hyper-parameter can't be deleted")

    def __iter__(self) -> Iterator[str]:
        return iter((self.key,))

    def __len__(self) -> int:
        return 1


class StateView(MutableMapping[str, Any]):
    """`optimizer.state[parameter]`, wherever the parameter has gone since; what isn't there yet reads as 0."""

    def __init__(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        self.optimizer, self.parameter = optimizer, parameter

    def _state(self) -> dict[str, Any]:
        return self.optimizer.state[successor(self.parameter)]

    def __getitem__(self, key: str) -> Any:
        return self._state().get(key, 0) if successor(self.parameter) in self.optimizer.state else 0

    def __setitem__(self, key: str, value: Any) -> None:
        self._state()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._state()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state())

    def __len__(self) -> int:
        return len(self._state())


class GroupView(MutableMapping[str, Any]):
    """A group into which the step puts a new key: until it's there it reads as 0."""

    def __init__(self, group: MutableMapping[str, Any]) -> None:
        self.group = group

    def __getitem__(self, key: str) -> Any:
        return self.group.get(key, 0)

    def __setitem__(self, key: str, value: Any) -> None:
        self.group[key] = value

    def __delitem__(self, key: str) -> None:
        del self.group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.group)

    def __len__(self) -> int:
        return len(self.group)
