"""Stale: what becomes of a parameter or buffer whose values have moved into a DTensor. It raises when used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spmd._torch import pytree
from spmd.errors import Offence, StaleError


class Stale:
    """Mixin of the classes that retired tensors get. `_spmd_successor` is the tensor that holds the values now."""

    _spmd_fqn: str
    _spmd_successor: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        names = [x._spmd_fqn for x in pytree.tree_leaves((args, dict(kwargs or {}))) if isinstance(x, Stale)]
        raise StaleError([stale(name) for name in dict.fromkeys(names)])

    def __repr__(self, **_: Any) -> str:
        return f"<{self._spmd_fqn} from before spmd.compile; its values are in the DTensor `_spmd_successor`>"


def stale(fqn: str) -> Offence:
    return Offence(
        "a tensor from before compilation was used; the model holds a DTensor in its place",
        fqn=fqn,
        remedy="take it from the model (model.get_parameter(...)), or a whole one inside `with spmd.gathered(model):`",
    )


def retire(old: torch.Tensor, new: torch.Tensor, fqn: str) -> None:
    """Free the memory of `old`, whose values are in `new` now, and make it raise StaleError when used."""
    with torch.no_grad():
        old.grad = None
        old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    old._spmd_fqn, old._spmd_successor = fqn, new  # type: ignore[attr-defined]
    old.__class__ = _stale_class(type(old))


@functools.cache
def _stale_class(kind: type) -> type:
    return type(kind)(f"Stale{kind.__name__}", (Stale, kind), {"__module__": __name__})
