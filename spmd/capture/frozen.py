"""Snapshots of what a step may read besides tensors and plain numbers: lists, dicts, arrays and objects in attributes and outer variables."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from spmd.capture.inputs import scope_name
from spmd.capture.objects import SCALARS, Objects, joined, successor

DEPTH = 4  # containers within containers, and the attributes of an object, down to here; deeper by identity
SMALL = 4096  # elements of an array that are compared one by one
_OWN = frozenset(vars(nn.Module()))  # bookkeeping of nn.Module, which has guards of its own
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)


class Same:
    """Equal to the same object only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (other.value is self.value or _same_method(self.value, other.value))

    def __hash__(self) -> int:
        return id(self.value)


def _same_method(a: Any, b: Any) -> bool:
    """A bound method is a new object at each look."""
    return isinstance(a, types.MethodType) and isinstance(b, types.MethodType) and a == b


def freeze(value: Any, depth: int = DEPTH) -> Any:
    """A value that equals another's exactly if a step that reads either goes the same way."""
    if isinstance(value, SCALARS):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return Same(successor(value))
    if isinstance(value, np.ndarray) and value.size <= SMALL:
        return value.shape, value.dtype, value.tobytes()
    if depth == 0 or isinstance(value, (*_CODE, nn.Module, torch.optim.Optimizer)):
        return Same(value)
    if isinstance(value, Mapping):
        return type(value), [(k if isinstance(k, SCALARS) else Same(k), freeze(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [freeze(v, depth - 1) for v in value]
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(v if isinstance(v, SCALARS) else Same(v) for v in value)
    attributes = getattr(value, "__dict__", None)
    return Same(value), freeze(attributes, depth - 1) if attributes else None


def readable(objects: Objects) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """(mapping, key, name) of everything that isn't a scalar: attributes of modules and of their classes, and outer variables."""
    classes: set[type] = set()
    for fqn, module in objects.submodules():
        for key, value in vars(module).items():
            if key not in _OWN and not isinstance(value, SCALARS):
                yield vars(module), key, joined(fqn, key)
        for kind in type(module).__mro__:
            if kind not in classes and not kind.__module__.startswith(("torch.", "builtins", "transformers.")):
                classes.add(kind)
                for key in vars(kind):
                    if not key.startswith("__"):
                        yield vars(kind), key, f"{kind.__name__}.{key}"
    for scope in objects.scopes:
        for key in scope.keys:
            if key in scope.mapping and not isinstance(scope.mapping[key], SCALARS):
                yield scope.mapping, key, scope_name(scope.title, key)
