"""Everything that a graph takes for granted, as flat lists that are cheap to compare at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from spmd._torch import DTensor
from spmd.capture.arguments import Arguments, flatten_leaves
from spmd.capture.inputs import scope_name
from spmd.capture.objects import SCALARS, Objects, successor

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BOOKKEEPING = {"_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_step_count", "initial_lr"}
_ABSENT = object()


class Changed(str):
    """A sentence that says what changed. `name`: the thing, as `capture(lifted=...)` takes it; `liftable`: a number that can be an input."""

    name: str
    liftable: bool

    def __new__(cls, name: str, before: Any, after: Any, text: str = "") -> Changed:
        self = super().__new__(cls, text or f"{name} was {_show(before)}, is {_show(after)}")
        self.name = name
        self.liftable = type(before) in (int, float) and type(after) in (int, float)
        return self


def _show(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)


def _scalar(value: Any) -> bool:
    return isinstance(value, SCALARS) or isinstance(value, tuple) and all(isinstance(v, SCALARS) for v in value)


@dataclass
class _Values:
    """Scalars in one mapping. `title` formats a key into a name."""

    mapping: Mapping[str, Any]
    keys: tuple[str, ...]
    title: Callable[[str], str]
    get: Callable[[Any], Any] = field(init=False)
    expected: Any = field(init=False)

    def __post_init__(self) -> None:
        self.get = itemgetter(*self.keys)
        self.expected = self.get(self.mapping)

    def changed(self) -> Changed | None:
        try:
            now = self.get(self.mapping)
        except KeyError:
            now = None
        if now == self.expected:
            return None
        old = (self.expected,) if len(self.keys) == 1 else self.expected
        for key, before in zip(self.keys, old, strict=True):
            after = self.mapping.get(key, _ABSENT)
            if after is not before and after != before:
                return Changed(self.title(key), before, after)
        return None


@dataclass
class _Identities:
    """The objects in one container, by identity and order."""

    items: Callable[[], Iterable[Any]]
    name: str
    expected: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = list(self.items())

    def changed(self) -> Changed | None:
        now = list(self.items())
        if len(now) == len(self.expected) and all(map(_is, now, self.expected)):
            return None
        return Changed(self.name, None, None, f"{self.name} holds other objects than when it was traced")

    def rebind(self, mapping: Mapping[int, Any]) -> None:
        self.expected = [mapping.get(id(x), x) for x in self.expected]


def _is(a: Any, b: Any) -> bool:
    return a is b


def environment() -> tuple[Any, ...]:
    """Global switches that change what ops do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


_ENVIRONMENT = ("grad mode", "inference mode", "default dtype", "CPU autocast", "CUDA autocast", "deterministic algorithms", "matmul precision")


class Guards:
    """Compares the world of a call with the world of the trace."""

    def __init__(
        self,
        objects: Objects,
        arguments: Arguments,
        batch_dims: Mapping[int, int],
        inputs: frozenset[str],
        gradients: Iterable[str],
    ) -> None:
        """`inputs`: names of scalars that are inputs of the graph; `gradients`: parameters whose gradient's presence matters."""
        self.environment = environment()
        self.objects = objects
        self.values = list(_scalars(objects, inputs))
        self.identities = list(_identities(objects))
        self.hooks = [(vars(m), n) for n, m in objects.submodules()]
        self.had_hooks = {id(d): _hook_count(d) for d, _ in self.hooks}
        self.parameters = [t.tensor for t in objects.tensors.values()]
        self.names = [t.name for t in objects.tensors.values()]
        self.flags = list(map(_flags, self.parameters))
        wanted = set(gradients)
        self.gradients = [(i, self.parameters[i].grad is None) for i, n in enumerate(self.names) if n in wanted]
        self.tensors: list[tuple[Callable[[], Any], str]] = []
        self._arguments(arguments, batch_dims, inputs)
        self._states()

    def _arguments(self, arguments: Arguments, batch_dims: Mapping[int, int], inputs: frozenset[str]) -> None:
        self.spec, self.paths = arguments.spec, arguments.paths
        self.leaves: list[Any] = []
        for i, (path, leaf) in enumerate(zip(arguments.paths, arguments.leaves, strict=True)):
            if isinstance(leaf, torch.Tensor) and id(successor(leaf)) not in self.objects.tensors:
                self.leaves.append(_TensorGuard(path, leaf, batch_dims.get(i)))
            elif _scalar(leaf):
                self.leaves.append(None if path in inputs else _ScalarGuard(path, leaf))
            else:
                self.leaves.append(_ObjectGuard(path, leaf))

    def _states(self) -> None:
        """Which state exists: a graph reads what was there, and makes the rest."""
        self.states = [(name, o, _state_keys(o)) for name, o in self.objects.optimizers.items()]

    def check(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Changed | None:
        """None, or what changed since the trace."""
        if (now := environment()) != self.environment:
            i = next(i for i, (a, b) in enumerate(zip(now, self.environment, strict=True)) if a != b)
            return Changed(_ENVIRONMENT[i], self.environment[i], now[i])
        leaves = flatten_leaves(args, kwargs)
        if len(leaves) != len(self.leaves) or not args and not kwargs and leaves or pytree.tree_structure((args, dict(kwargs))) != self.spec:
            return Changed("the structure of the arguments", None, None, "the structure of the arguments changed")
        for guard, leaf in zip(self.leaves, leaves, strict=True):
            if guard is not None and (changed := guard.changed(leaf)):
                return changed
        for checks in (self.values, self.identities):
            for check in checks:
                if changed := check.changed():
                    return changed
        return self._check_tensors() or self._check_states()

    def _check_tensors(self) -> Changed | None:
        for d, name in self.hooks:
            if _hook_count(d) != self.had_hooks[id(d)]:
                return Changed(f"hooks of {name or 'the module'}", self.had_hooks[id(d)], _hook_count(d))
        flags = list(map(_flags, self.parameters))
        if flags != self.flags:
            i = next(i for i, (a, b) in enumerate(zip(flags, self.flags, strict=True)) if a != b)
            what = "requires_grad" if flags[i][0] != self.flags[i][0] else "number of hooks"
            j = 0 if what == "requires_grad" else 1
            return Changed(f"{what} of {self.names[i]}", self.flags[i][j], flags[i][j])
        for i, absent in self.gradients:
            if (self.parameters[i].grad is None) != absent:
                return Changed(f"{self.names[i]}.grad", "None" if absent else "a gradient", "a gradient" if absent else "None")
        return None

    def _check_states(self) -> Changed | None:
        for name, optimizer, keys in self.states:
            if (now := _state_keys(optimizer)) != keys:
                return Changed(f"{name}.state", None, None, f"{name}.state has other entries than when it was traced")
        return None

    def rebind(self, mapping: Mapping[int, Any]) -> None:
        """Tensors were replaced, `mapping[id(old)] = new`, and optimizer states were made: both are expected from now on."""
        for check in self.identities:
            check.rebind(mapping)
        self.parameters = [mapping.get(id(p), p) for p in self.parameters]
        self.flags = list(map(_flags, self.parameters))
        self._states()


def _state_keys(optimizer: torch.optim.Optimizer) -> list[tuple[str, ...]]:
    return [tuple(s) if isinstance(s, dict) else () for s in optimizer.state.values() if s]


def _flags(t: torch.Tensor) -> tuple[bool, int]:
    hooks = t._backward_hooks
    return t.requires_grad, len(hooks) if hooks else 0


def _hook_count(d: Mapping[str, Any]) -> int:
    """The user's hooks on a module; those that spmd puts on sharded ones don't count."""
    return sum(not getattr(hook, "_spmd", False) for k in _HOOKS if d[k] for hook in d[k].values())



def _scalars(objects: Objects, inputs: frozenset[str]) -> Iterator[_Values]:
    def some(mapping: MutableMapping[str, Any], title: Callable[[str], str], keys: Iterable[str]) -> Iterator[_Values]:
        chosen = tuple(k for k in keys if k in mapping and _scalar(mapping[k]) and title(k) not in inputs and k not in _BOOKKEEPING)
        if chosen:
            yield _Values(mapping, chosen, title)

    for fqn, module in objects.submodules():
        yield from some(vars(module), lambda k, fqn=fqn: f"{fqn}.{k}" if fqn else k, vars(module))  # type: ignore[misc]
    for name, optimizer in objects.optimizers.items():
        for i, group in enumerate(optimizer.param_groups):
            yield from some(group, lambda k, name=name, i=i: f"{name}.param_groups[{i}].{k}", group)  # type: ignore[misc]
    for scope in objects.scopes:
        yield from some(scope.mapping, lambda k, title=scope.title: scope_name(title, k), scope.keys)  # type: ignore[misc]


def _identities(objects: Objects) -> Iterator[_Identities]:
    for fqn, module in objects.submodules():
        for key in ("_parameters", "_buffers", "_modules"):
            held = vars(module)[key]
            if held and key != "_buffers":
                yield _Identities(held.values, f"{fqn or type(module).__name__}.{key}")
    for name, optimizer in objects.optimizers.items():
        yield _Identities(lambda o=optimizer: [p for g in o.param_groups for p in g["params"]], f"{name}.param_groups")  # type: ignore[misc]


class _TensorGuard:
    def __init__(self, path: str, tensor: torch.Tensor, batch_dim: int | None) -> None:
        self.path, self.batch_dim = path, batch_dim
        self.kind = isinstance(tensor, DTensor)
        self.fixed = (tensor.dtype, tensor.device, tensor.requires_grad)
        self.shape = self._shape(tensor)
        self.full = tuple(tensor.shape)

    def _shape(self, t: torch.Tensor) -> tuple[Any, ...]:
        d = self.batch_dim
        shape = tuple(t.shape)
        return shape if d is None else (shape[:d], shape[d + 1 :])

    def changed(self, leaf: Any) -> Changed | None:
        if not isinstance(leaf, torch.Tensor):
            return Changed(self.path, "a tensor", leaf)
        if (leaf.dtype, leaf.device, leaf.requires_grad) != self.fixed:
            return Changed(f"dtype, device, requires_grad of {self.path}", self.fixed, (leaf.dtype, leaf.device, leaf.requires_grad))
        if leaf.dim() != len(self.full) or self._shape(leaf) != self.shape:
            return Changed(f"shape of {self.path}", self.full, tuple(leaf.shape))
        return None


class _ScalarGuard:
    def __init__(self, path: str, value: Any) -> None:
        self.path, self.value = path, value

    def changed(self, leaf: Any) -> Changed | None:
        same = leaf is self.value or type(leaf) is type(self.value) and leaf == self.value
        return None if same else Changed(self.path, self.value, leaf)


class _ObjectGuard:
    def __init__(self, path: str, value: Any) -> None:
        self.path, self.value = path, value
        self.tensor = isinstance(value, torch.Tensor)

    def changed(self, leaf: Any) -> Changed | None:
        if leaf is self.value or self.tensor and (leaf is successor(self.value) or successor(leaf) is self.value):
            return None
        return Changed(self.path, None, None, f"{self.path} is another object than when it was traced")
