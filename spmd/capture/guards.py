"""Everything that a graph takes for granted, as flat lists that are cheap to compare at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch

from spmd._torch import GLOBAL_HOOKS, DTensor, pytree
from spmd.capture.arguments import Arguments, flatten_leaves
from spmd.capture.frozen import freeze, readable
from spmd.capture.inputs import scope_name
from spmd.capture.objects import SCALARS, Objects, memory, successor

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BOOKKEEPING = {
    "_opt_called",
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
    "_step_count",
    "initial_lr",
}
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


class _Scalars:
    """Scalars in many mappings: one C-speed lookup and one comparison for each mapping."""

    def __init__(self, wanted: Iterable[tuple[Mapping[str, Any], tuple[str, ...], Callable[[str], str]]]) -> None:
        self.wanted = list(wanted)
        self.getters = [(itemgetter(*keys), mapping) for mapping, keys, _ in self.wanted]
        self.expected = self._now()

    def _now(self) -> list[Any]:
        return [get(mapping) for get, mapping in self.getters]

    def changed(self) -> Changed | None:
        try:
            if self._now() == self.expected:
                return None
        except KeyError:
            pass
        for (mapping, keys, title), old in zip(self.wanted, self.expected, strict=True):
            for key, before in zip(keys, (old,) if len(keys) == 1 else old, strict=True):
                after = mapping.get(key, _ABSENT)
                if after is not before and after != before:
                    return Changed(title(key), before, after)
        return None


class _Identities:
    """Objects in many containers, by identity and order."""

    def __init__(self, containers: Iterable[tuple[Mapping[str, Any], str]]) -> None:
        pairs = list(containers)
        self.names = [name for _, name in pairs]
        self.mappings = [mapping for mapping, _ in pairs]
        self.expected = [list(m.values()) for m in self.mappings]
        self.flat = self._now()

    def _now(self) -> list[Any]:
        return list(chain.from_iterable([m.values() for m in self.mappings]))

    def changed(self) -> Changed | None:
        now = self._now()
        if len(now) == len(self.flat) and all(map(is_, now, self.flat)):
            return None
        for name, mapping, expected in zip(self.names, self.mappings, self.expected, strict=True):
            items = list(mapping.values())
            if len(items) != len(expected) or not all(map(is_, items, expected)):
                return Changed(name, None, None, f"{name} holds other objects than when it was traced")
        return None

    def rebind(self, replaced: Mapping[int, Any]) -> None:
        self.expected = [
            [successor(replaced.get(id(x), x)) if isinstance(x, torch.Tensor) else x for x in items]
            for items in self.expected
        ]
        self.flat = list(chain.from_iterable(self.expected))


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


_ENVIRONMENT = (
    "grad mode",
    "inference mode",
    "default dtype",
    "CPU autocast",
    "CUDA autocast",
    "deterministic algorithms",
    "matmul precision",
)


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
        self.scalars = _Scalars(_scalars(objects, inputs))
        self.members = _Identities(_members(objects))
        self.optimized = _optimized(objects)
        self.hooks = [vars(m)[k] for _, m in objects.submodules() for k in _HOOKS]
        self.hook_owners = [n for n, _ in objects.submodules() for _ in _HOOKS]
        self.shared_hooks = [*GLOBAL_HOOKS, *(vars(o)[k] for o in objects.optimizers.values() for k in _STEP_HOOKS)]
        self.hook_objects = self._hook_objects()
        self.frozen = [(mapping, key, name, freeze(mapping[key])) for mapping, key, name in readable(objects)]
        self.attributes = [(vars(m), type(m), frozenset(vars(m)), n) for n, m in objects.submodules()]
        self.parameters = [t.tensor for t in objects.tensors.values()]
        self.names = [t.name for t in objects.tensors.values()]
        self.flags = list(map(_flags, self.parameters))
        wanted = set(gradients)
        self.gradients = [(i, self.parameters[i].grad is None) for i, n in enumerate(self.names) if n in wanted]
        self._arguments(arguments, batch_dims, inputs)
        self.aliases = _aliases(self._pointers(arguments.leaves))
        self._states()

    def _arguments(self, arguments: Arguments, batch_dims: Mapping[int, int], inputs: frozenset[str]) -> None:
        self.spec, self.paths = arguments.spec, arguments.paths
        args, kwargs = arguments.rebuild(arguments.leaves)
        one_each = (
            not arguments.objects
            and len(args) + len(kwargs) == len(arguments.leaves)
            and all(map(is_, arguments.leaves, [*args, *kwargs.values()]))
        )
        self.plain = (tuple(map(type, args)), tuple(kwargs)) if one_each else None
        self.plain_kwargs = tuple(map(type, kwargs.values()))
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
        held = [v for _, o in self.objects.states() for s in o.state.values() for v in s.values()]
        self.memory = {memory(t) for t in [*self.parameters, *held] if isinstance(t, torch.Tensor)} - {0}

    def _pointers(self, leaves: Sequence[Any]) -> list[int]:
        """Where the plain tensors among the arguments lie."""
        return [
            x.untyped_storage().data_ptr()
            for guard, x in zip(self.leaves, leaves, strict=True)
            if type(x) is torch.Tensor and isinstance(guard, _TensorGuard)
        ]

    def check(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Changed | None:
        """None, or what changed since the trace."""
        if (now := environment()) != self.environment:
            i = next(i for i, (a, b) in enumerate(zip(now, self.environment, strict=True)) if a != b)
            return Changed(_ENVIRONMENT[i], self.environment[i], now[i])
        if self.plain == (tuple(map(type, args)), tuple(kwargs)) and self.plain_kwargs == tuple(
            map(type, kwargs.values())
        ):
            leaves = [*args, *kwargs.values()]  # each argument is a leaf, as it was: no tree to walk
        else:
            leaves = flatten_leaves(args, kwargs)
            if len(leaves) != len(self.leaves) or pytree.tree_structure((args, dict(kwargs))) != self.spec:
                return Changed("the structure of the arguments", None, None, "the structure of the arguments changed")
        for guard, leaf in zip(self.leaves, leaves, strict=True):
            if guard is not None and (changed := guard.changed(leaf)):
                return changed
        pointers = self._pointers(leaves)
        if self.aliases != _aliases(pointers):
            return Changed("the arguments' memory", None, None, "other arguments share memory than when it was traced")
        if not self.memory.isdisjoint(pointers):
            return Changed("the arguments' memory", None, None, "an argument shares memory with the model")
        return (
            self.scalars.changed()
            or self.members.changed()
            or self._check_tensors()
            or self._check_optimizers()
            or self._check_frozen()
        )

    def _hook_objects(self) -> list[tuple[Any, ...]]:
        return [tuple(d.values()) if d else () for d in (*self.hooks, *self.shared_hooks)]

    def _check_frozen(self) -> Changed | None:
        for now, kind, known, fqn in self.attributes:
            if now.keys() != known and any(hasattr(kind, key) for key in now.keys() - known):
                return Changed(
                    fqn, None, None, f"{fqn or kind.__name__} has an attribute of its own where its class's was used"
                )
        for mapping, key, name, before in self.frozen:
            if key not in mapping or freeze(mapping[key]) != before:
                return Changed(name, None, None, f"{name} holds something else than when it was traced")
        return None

    def _check_tensors(self) -> Changed | None:
        if (hooks := self._hook_objects()) != self.hook_objects:
            i = next(i for i, (a, b) in enumerate(zip(hooks, self.hook_objects, strict=True)) if a != b)
            owner = (
                self.hook_owners[i] or "the module" if i < len(self.hook_owners) else "an optimizer, or global ones,"
            )
            return Changed("hooks", None, None, f"the hooks of {owner} changed")
        flags = list(map(_flags, self.parameters))
        if flags != self.flags:
            i = next(i for i, (a, b) in enumerate(zip(flags, self.flags, strict=True)) if a != b)
            if flags[i][0] != self.flags[i][0]:
                return Changed(f"requires_grad of {self.names[i]}", self.flags[i][0], flags[i][0])
            return Changed("hooks", None, None, f"the hooks of {self.names[i]} changed")
        for i, absent in self.gradients:
            if (self.parameters[i].grad is None) != absent:
                return Changed(
                    f"{self.names[i]}.grad", "None" if absent else "a gradient", "a gradient" if absent else "None"
                )
        return None

    def _check_optimizers(self) -> Changed | None:
        now = _optimized(self.objects)
        if len(now) != len(self.optimized) or not all(map(is_, now, self.optimized)):
            name = next(iter(self.objects.optimizers))
            return Changed(
                f"{name}.param_groups",
                None,
                None,
                f"{name}.param_groups holds other parameters than when it was traced",
            )
        for name, optimizer, keys in self.states:
            if (now := _state_keys(optimizer)) != keys:
                return Changed(f"{name}.state", None, None, f"{name}.state has other entries than when it was traced")
        return None

    def rebind(self, mapping: Mapping[int, Any]) -> None:
        """Tensors were replaced, `mapping[id(old)] = new`, and optimizer states were made: both are expected from now on."""
        self.members.rebind(mapping)
        self.optimized = [successor(mapping.get(id(p), p)) for p in self.optimized]
        self.parameters = [successor(mapping.get(id(p), p)) for p in self.parameters]
        self.flags = list(map(_flags, self.parameters))
        self.hook_objects = self._hook_objects()  # spmd's own are in place now
        self.frozen = [(m, key, name, freeze(m[key])) for m, key, name, _ in self.frozen if key in m]
        self._states()


def _aliases(pointers: Sequence[int]) -> list[int]:
    """For each tensor the index of the first one that lies in the same memory."""
    first: dict[int, int] = {}
    return [first.setdefault(p, i) for i, p in enumerate(pointers) if p]


def _state_keys(optimizer: torch.optim.Optimizer) -> list[tuple[str, ...]]:
    return list(map(tuple, filter(None, optimizer.state.values())))


def _flags(t: torch.Tensor) -> tuple[bool, tuple[Any, ...]]:
    hooks, late = t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)
    return t.requires_grad, (*(hooks.values() if hooks else ()), *(late.values() if late else ()))


def _optimized(objects: Objects) -> list[Any]:
    return [p for o in objects.optimizers.values() for g in o.param_groups for p in g["params"]]


def _scalars(
    objects: Objects, inputs: frozenset[str]
) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...], Callable[[str], str]]]:
    """(mapping, keys, key -> name) of all scalars that the graph takes for granted."""

    def some(mapping: Mapping[str, Any], prefix: str, suffix: str, keys: Iterable[str]) -> Any:
        def title(key: str) -> str:
            return f"{prefix}{key}{suffix}"

        chosen = tuple(
            k
            for k in keys
            if k in mapping and _scalar(mapping[k]) and not _is_input(title(k), inputs) and k not in _BOOKKEEPING
        )
        return (mapping, chosen, title) if chosen else None

    found = [some(vars(module), f"{fqn}." if fqn else "", "", vars(module)) for fqn, module in objects.submodules()]
    found += [some(group, f"{title}.", "", group) for title, group in objects.groups()]
    found += [some(vars(o), f"{name}.", "", vars(o)) for name, o in objects.optimizers.items()]
    for root, optimizer in objects.states():
        for p, state in optimizer.state.items():
            if owner := objects.named(p):
                found.append(some(state, objects.state_name(root, owner, ""), "", state))
    found += [some(scope.mapping, "", scope_name(scope.title, ""), scope.keys) for scope in objects.scopes]
    return (f for f in found if f is not None)


def _is_input(name: str, inputs: frozenset[str]) -> bool:
    """Whether the scalar, or every element of the tuple, is read anew at each call."""
    return name in inputs or f"{name}[0]" in inputs


def _members(objects: Objects) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Where modules keep parameters and submodules. Buffers may be re-assigned by the step: their names matter, not their identity."""
    for fqn, module in objects.submodules():
        for key in ("_parameters", "_modules"):
            if vars(module)[key]:
                yield vars(module)[key], f"{fqn or type(module).__name__}.{key}"


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
            return Changed(
                f"dtype, device, requires_grad of {self.path}",
                self.fixed,
                (leaf.dtype, leaf.device, leaf.requires_grad),
            )
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
