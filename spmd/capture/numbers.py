"""Python values that an optimizer's step puts into its groups and states: step counts, weights, flags. They leave the graph as outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from spmd.capture.objects import SCALARS, Objects
from spmd.capture.views import GroupView, StateView

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
MISSING = object()
_OVERRIDDEN = frozenset({"params", "foreach", "fused", "capturable"})  # set by us in the copies


@dataclass
class Written:
    """`container[key]` holds another value after the step."""

    name: str
    root: str
    container: MutableMapping[str, Any]
    key: str
    before: Any  # MISSING where there was nothing
    after: Any

    @property
    def is_number(self) -> bool:
        return type(self.before) in (int, float) and isinstance(self.after, (int, float, *_SYMBOLIC))

    @property
    def can_be_kept(self) -> bool:
        return isinstance(self.after, (*SCALARS, *_SYMBOLIC))


def snapshot(copies: Mapping[int, Any]) -> dict[tuple[int, Any], Any]:
    """The values in the copies of groups and states, as the step finds them."""
    return {(id(mapping), key): value for mapping in mappings(copies) for key, value in mapping.items()}


def mappings(copies: Mapping[int, Any]) -> list[Any]:
    """The copies of groups, and of the states of parameters."""
    return [m for copy in copies.values() for m in (copy.values() if isinstance(copy, defaultdict) else [copy])]


def written(
    objects: Objects,
    groups: Iterable[tuple[str, dict[str, Any]]],
    copies: Mapping[int, Any],
    before: Mapping[tuple[int, Any], Any],
) -> Iterator[Written]:
    """Everything in groups and states that differs from the snapshot, but for the tensors of the states. The optimizers hold the copies now."""
    for title, group in groups:
        root = title.partition(".param_groups")[0]
        for key, after in copies[id(group)].items():
            old = before.get((id(copies[id(group)]), key), MISSING)
            if key not in _OVERRIDDEN and not _same(old, after):
                container: MutableMapping[str, Any] = group if key in group else GroupView(group)
                yield Written(f"{title}.{key}", root, container, key, old, after)
    live = {t.name: t.tensor for t in objects.parameters()}
    for root, optimizer in objects.states():
        for state in optimizer.state.values():
            for key, after in state.items():
                old = before.get((id(state), key), MISSING)
                if not isinstance(after, torch.Tensor) and not _same(old, after):
                    name = objects.state_name(root, state.parameter, key)
                    container = StateView(optimizer, live[state.parameter])
                    yield Written(name, root, container, key, old, after)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or type(a) is type(b) and isinstance(b, SCALARS) and bool(a == b)
