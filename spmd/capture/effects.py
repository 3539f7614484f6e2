"""Python side effects of the step: they happen at trace time only, so they're compared before and after, undone, and refused.

An effect that is settled after one call (a cache filled, a mode switched on) is kept instead: if a second trace, from the changed
state, gives the same graph and changes nothing more, then not repeating it makes no difference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from spmd.capture.objects import SCALARS, Objects
from spmd.errors import Offence, SideEffectError

# Kept by torch itself for bookkeeping, or by us; swap.py puts back what lies in the tensor dicts.
_IGNORED = {"_parameters", "_buffers", "_flat_weights", "_flat_weight_refs", "_opt_called", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "param_groups", "state", "_zero_grad_profile_name", "_step_count"}  # fmt: skip
_MISSING = object()
_RETURN = "return the value from the step and update it in the training loop"


@dataclass
class Change:
    """One thing that the step changed. `settles`: it may be a one-time effect. `grown`: what it filled in place, as with hooks."""

    name: str
    before: Any
    after: Any
    remedy: str
    mapping: MutableMapping[str, Any] | None = None
    key: str = ""
    settles: bool = False
    grown: Any = None

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.after, torch.Tensor)

    def make(self, value: Any) -> None:
        """Give the changed thing this value, what it was before or is after."""
        assert self.mapping is not None
        if self.grown is not None:
            _refill(self.grown, value)
        elif value is _MISSING:
            self.mapping.pop(self.key, None)
        else:
            self.mapping[self.key] = value

    def offence(self) -> Offence:
        return Offence(
            f"the step changes {self.name} from {_short(self.before)} to {_short(self.after)}", remedy=self.remedy
        )


@dataclass
class _Watched:
    title: str
    mapping: MutableMapping[str, Any]
    keys: tuple[str, ...] | None  # None: all, new ones included
    before: dict[str, Any]
    remedy: str

    def now(self) -> dict[str, Any]:
        keys = self.keys if self.keys is not None else tuple(k for k in self.mapping if k not in _IGNORED)
        return {k: self.mapping[k] for k in keys if k in self.mapping}


def _short(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def _frozen(value: Any) -> Any:
    """`value`, or a copy of its members if it's a mutable container."""
    return type(value), value.copy() if isinstance(value, (list, dict, set)) else None, value


def _same(frozen: Any, now: Any) -> bool:
    kind, members, value = frozen
    if members is not None and now is value:
        if len(members) != len(now):
            return False
        if isinstance(members, dict):
            return members.keys() == now.keys() and all(_equal(v, now[k]) for k, v in members.items())
        return members == now if isinstance(members, set) else all(map(_equal, members, now))
    return now is value or type(now) is kind and _equal(value, now)


def _equal(a: Any, b: Any) -> bool:
    return a is b or isinstance(a, SCALARS) and type(a) is type(b) and bool(a == b)


class Effects:
    """Watches one trace. `changes` is filled when the trace ends; everything is put back."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.changes: list[Change] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        watched = list(self._watched())
        python, np = random.getstate(), numpy.random.get_state(legacy=False)
        try:
            yield
        finally:
            for w in watched:
                self._compare(w)
            self._generators(python, np)

    def _watched(self) -> Iterator[_Watched]:
        for fqn, module in self.objects.submodules():
            title = f"{fqn or type(module).__name__}."
            yield self._watch(
                title, vars(module), None, "keep it in a buffer (register_buffer) as a tensor, or " + _RETURN
            )
        for name, optimizer in self.objects.optimizers.items():
            yield self._watch(f"{name}.", vars(optimizer), None, "keep counters as tensors in optimizer.state")
        for scope in self.objects.scopes:
            whole = scope.title.startswith("attribute of")
            yield self._watch(f"{scope.title} ", scope.mapping, None if whole else scope.keys, _RETURN)

    def _watch(self, title: str, mapping: Any, keys: tuple[str, ...] | None, remedy: str) -> _Watched:
        w = _Watched(title, mapping, keys, {}, remedy)
        w.before = {k: _frozen(v) for k, v in w.now().items()}
        return w

    def _compare(self, w: _Watched) -> None:
        """Records what changed in `w` and puts the old values back."""
        now = w.now()
        for key in [*w.before, *(k for k in now if k not in w.before)]:
            frozen, value = w.before.get(key, (None, None, _MISSING)), now.get(key, _MISSING)
            if _same(frozen, value):
                continue
            _, members, old = frozen
            grown = members is not None and value is old
            shown = (members, value.copy()) if grown else (old, value)
            settles = not grown or isinstance(value, dict) and all(map(callable, value.values()))
            held = value if grown else None
            self.changes.append(Change(w.title + key, *shown, w.remedy, w.mapping, key, settles, held))
            if grown:
                _refill(old, members)
            elif old is _MISSING:
                del w.mapping[key]
            else:
                w.mapping[key] = old

    def _generators(self, python: Any, np: Any) -> None:
        if random.getstate() != python:
            random.setstate(python)
            self.changes.append(_generator("random"))
        if str(numpy.random.get_state(legacy=False)) != str(np):
            numpy.random.set_state(np)
            self.changes.append(_generator("numpy.random"))

    @contextmanager
    def containers(self, mappings: list[MutableMapping[str, Any]]) -> Iterator[None]:
        """Lists, dicts and sets in the traced copies of groups and states, which are still the user's own."""
        held = [
            (mapping, key, _frozen(value))
            for mapping in mappings
            for key, value in mapping.items()
            if isinstance(value, (list, dict, set)) and key != "params"
        ]
        yield
        for mapping, key, frozen in held:
            if not _same(frozen, mapping.get(key)):
                self.refuse_written(f"{key!r} of the optimizer", frozen[1], mapping.get(key))
                _refill(frozen[2], frozen[1])

    def refuse_written(self, name: str, before: Any, after: Any) -> None:
        """A change in an optimizer's groups or state that no graph can hold."""
        remedy = (
            "keep counters as tensors: state['step'] = torch.tensor(0.0); change hyper-parameters between the calls"
        )
        before = _MISSING if type(before) is object or before is None else before
        self.changes.append(Change(name, before, Text(_short(after)), remedy))


class Text(str):
    """Is shown as it is."""

    def __repr__(self) -> str:
        return str(self)


def _generator(name: str) -> Change:
    remedy = "draw with torch (torch.rand, torch.randint), or pass the number as an argument"
    return Change(f"the state of Python's {name} generator", "one state", "another", remedy)


def _refill(container: Any, members: Any) -> None:
    container.clear()
    container.extend(members) if isinstance(container, list) else container.update(members)


def refuse(changes: list[Change]) -> None:
    """Raises SideEffectError for all of `changes`."""
    if changes:
        raise SideEffectError([c.offence() for c in changes])


@contextmanager
def pretended(changes: list[Change]) -> Iterator[set[int]]:
    """The world after one call: changed attributes have their new values, tensors stand-ins whose ids are yielded. Undone at exit."""
    poison: dict[int, torch.Tensor] = {}
    for c in changes:
        assert c.mapping is not None
        value = c.after
        if c.is_tensor:
            value = torch.zeros([int(n) if isinstance(n, int) else 1 for n in c.after.shape], dtype=c.after.dtype)
            poison[id(value)] = value
        c.make(value)
    try:
        yield set(poison)
    finally:
        for c in changes:
            c.make(c.before)


def settle(changes: list[Change]) -> None:
    """Keeps the one-time effects that aren't tensors."""
    for c in changes:
        if (
            c.mapping is not None
            and not c.is_tensor
            and not any(isinstance(v, torch.Tensor) for v in _members(c.after))
        ):
            c.make(c.after)


def _members(value: Any) -> list[Any]:
    return (
        list(value.values())
        if isinstance(value, dict)
        else list(value)
        if isinstance(value, (list, tuple, set))
        else [value]
    )
