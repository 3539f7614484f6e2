"""Finds the modules and optimizers that a step uses, wherever they are, and names their tensors.

Looked at: the arguments, the `self` of a bound method, closure cells, the globals that the function names, and the same of functions
of its own package that it names. Containers are followed to any depth, plain objects one level (their attributes).

Names: with one root module a tensor has the module's own FQN, "layers.0.weight"; with several the root's variable name comes first,
"G.layers.0.weight". States are "<parameter>.<key>", hyper-parameters "<optimizer>.param_groups[0].lr".
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spmd._torch import DTensor
from spmd.graph.step import Role

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_EMPTY = object()
_INSTALLED = tuple(sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib"))
_CONTAINERS = (dict, list, tuple, set, frozenset)
_OPAQUE = (types.ModuleType, type, torch.Tensor, torch.Generator, *SCALARS)
_FOREIGN = ("torch", "numpy", "builtins", "typing", "collections", "transformers", "functools", "spmd.capture")


class CellView(MutableMapping[str, Any]):
    """A closure cell as a mapping with one key, so that every scalar of a step lies in some container[key]."""

    def __init__(self, cell: types.CellType, name: str) -> None:
        self.cell, self.name = cell, name

    def __getitem__(self, key: str) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # an empty cell
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self.cell.cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self.cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter((self.name,))

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True)
class Named:
    """A parameter or buffer and the names it goes by."""

    tensor: torch.Tensor
    role: Role
    name: str
    root: str
    aliases: tuple[str, ...] = ()  # further FQNs of the same object: tied weights


@dataclass
class Scope:
    """One Python namespace that the step reads: `mapping[key]` for each of `keys`."""

    title: str
    mapping: MutableMapping[str, Any]
    keys: tuple[str, ...]


@dataclass
class Objects:
    """What a step works on, by name."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    scopes: list[Scope] = field(default_factory=list)  # closure cells, globals, attributes of plain objects
    tensors: dict[int, Named] = field(default_factory=dict)  # by id of the live tensor
    keepers: dict[str, str] = field(default_factory=dict)  # parameter -> the first optimizer that has it
    free: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors in scopes that no module holds

    def names(self) -> set[str]:
        """Names of all parameters and buffers."""
        return {t.name for t in self.tensors.values()}

    def parameters(self) -> Iterator[Named]:
        return (t for t in self.tensors.values() if t.role is Role.PARAMETER)

    def groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every param_group once, by name: an optimizer may share them with the one that it wraps."""
        seen: set[int] = set()
        for root, optimizer in self.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                if id(group) not in seen:
                    seen.add(id(group))
                    yield f"{root}.param_groups[{i}]", group

    def states(self) -> Iterator[tuple[str, Optimizer]]:
        """Every optimizer that has a state of its own, by name."""
        seen: set[int] = set()
        for root, optimizer in self.optimizers.items():
            if id(optimizer.state) not in seen:
                seen.add(id(optimizer.state))
                yield root, optimizer

    def state_name(self, root: str, parameter: str, key: str) -> str:
        """Name of a state: "<parameter>.<key>", after the optimizer's own name if it isn't the parameter's first."""
        return f"{parameter}.{key}" if self.keepers.get(parameter, root) == root else f"{root}/{parameter}.{key}"

    def named(self, tensor: Any) -> str | None:
        """The name of a parameter or buffer, also under an object that it had before it was compiled."""
        found = self.tensors.get(id(successor(tensor))) if isinstance(tensor, torch.Tensor) else None
        return found.name if found is not None else None

    def submodules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once, with the FQN used in messages and metadata."""
        seen: set[int] = set()
        for root, module in self.modules.items():
            for name, sub in module.named_modules():
                if id(sub) not in seen:
                    seen.add(id(sub))
                    yield self.qualify(root, name), sub

    def qualify(self, root: str, name: str) -> str:
        return qualified(self.modules, root, name)


def joined(fqn: str, name: str) -> str:
    """The name of what is called `name` within `fqn`."""
    return f"{fqn}.{name}" if fqn else name


def qualified(modules: Mapping[str, nn.Module], root: str, name: str) -> str:
    """The FQN of what is called `name` within one of the step's modules: the root's own name counts where there are several."""
    return name if len(modules) == 1 else f"{root}.{name}" if name else root


def memory(tensor: torch.Tensor) -> int:
    """Address of the storage under a tensor, of the local part for a DTensor; 0 where it has none."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return 0 if local.is_meta or not local.numel() else local.untyped_storage().data_ptr()


def successor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that took the place of `tensor` when it was compiled, or `tensor` itself."""
    link = tensor.__dict__.get("_spmd_successor") if hasattr(tensor, "__dict__") else None
    if link is None:
        return tensor
    target = link if isinstance(link, torch.Tensor) else link()
    return tensor if target is None else successor(target)


def discover(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Objects:
    """All objects that `fn(*args, **kwargs)` can reach by the rules above."""
    finder = _Finder(Objects())
    for name, value in bind_names(fn, args, kwargs).items():
        finder.visit(value, name)
    finder.function(fn)
    objects = finder.found
    for kind in {k for m in objects.modules.values() for s in m.modules() for k in type(s).__mro__}:
        if not _foreign(kind.__module__):
            for method in vars(kind).values():
                finder.reads(method)
    for scope in list(objects.scopes):
        for key in scope.keys:
            if key in scope.mapping:
                finder.reads(scope.mapping[key], followed=True)
    _drop_inner_modules(objects)
    _name_tensors(objects)
    return objects


def bind_names(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the name of the parameter they bind to; `*args` entries are "name[i]"."""
    try:
        signature = inspect.signature(fn)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, or a wrong call: the call itself will say so
        return {f"args[{i}]": a for i, a in enumerate(args)} | dict(kwargs)
    out: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            out.update({f"{name}[{i}]": v for i, v in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            out.update(value)
        else:
            out[name] = value
    return out


class _Finder:
    def __init__(self, found: Objects) -> None:
        self.found = found
        self.seen: set[int] = set()

    def visit(self, value: Any, name: str, inside: bool = False) -> None:
        """`inside`: an attribute of a plain object; plain objects within it aren't followed."""
        if isinstance(value, torch.Tensor):
            self.found.free.setdefault(name, value)
        if isinstance(value, _OPAQUE) or id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, nn.Module):
            self.found.modules[_unused(name, self.found.modules)] = value
        elif isinstance(value, Optimizer):
            self.found.optimizers[_unused(name, self.found.optimizers)] = value
            for key, item in list(vars(value).items()):  # one that wraps another: Lookahead, SAM
                if isinstance(item, Optimizer):
                    self.visit(item, f"{name}.{key}")
        elif isinstance(value, LRScheduler) or hasattr(value, "optimizer") and hasattr(value, "last_epoch"):
            pass  # a step of it is refused in patches.py
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.visit(
                    item, f"{name}.{key}" if isinstance(key, str) and key.isidentifier() else f"{name}[{key!r}]", inside
                )
        elif isinstance(value, _CONTAINERS):
            for i, item in enumerate(value):
                self.visit(item, f"{name}[{i}]", inside)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.function(value)
        elif not inside:
            self._plain_object(value, name)

    def function(self, fn: Any) -> None:
        """Closure cells, globals and `self` of a function, and of the functions it names."""
        while isinstance(fn, functools.partial):
            for value in (*fn.args, *fn.keywords.values()):
                self.visit(value, "partial")
            fn = fn.func
        if isinstance(fn, types.MethodType):
            owner, fn = fn.__self__, fn.__func__
            if isinstance(owner, (nn.Module, Optimizer)):
                self.visit(owner, "self")
            elif id(owner) not in self.seen:
                self.seen.add(id(owner))
                self._plain_object(owner, "")
        if isinstance(fn, nn.Module):
            return self.visit(fn, "model")
        if not isinstance(fn, types.FunctionType) and not _foreign(type(fn).__module__):  # an object with __call__
            self._plain_object(fn, "")
            fn = type(fn).__call__
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self.function(wrapped)
        if not isinstance(fn, types.FunctionType) or id(fn.__code__) in self.seen or _foreign(fn.__module__):
            return
        self.seen.add(id(fn.__code__))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            view = CellView(cell, name)
            if name in view and _filled(cell):
                self.found.scopes.append(Scope(f"closure variable of {fn.__qualname__}", view, (name,)))
                self.visit(cell.cell_contents, name)
        for mapping, names in _outer(fn):
            self.found.scopes.append(Scope(f"global of {mapping.get('__name__', fn.__module__)}", mapping, names))
            for name in names:
                self.visit(mapping[name], name, inside=_foreign(getattr(type(mapping[name]), "__module__", "")))

    def reads(self, fn: Any, followed: bool = False) -> None:
        """Outer variables of a module's method, and of what it calls: guarded, but what they hold doesn't take part in the step by itself.

        followed: `fn` was found by name in another function. Installed packages aren't searched that far: their globals stay as they are.
        """
        fn = _undecorated(fn)
        if not isinstance(fn, types.FunctionType) or id(fn.__code__) in self.seen:
            return
        if followed and (_foreign(fn.__module__) or fn.__code__.co_filename.startswith(_INSTALLED)):
            return
        self.seen.add(id(fn.__code__))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            view = CellView(cell, name)
            if name in view and _filled(cell):
                self.found.scopes.append(Scope(f"closure variable of {fn.__qualname__}", view, (name,)))
                self.reads(cell.cell_contents, followed=True)
        for mapping, names in _outer(fn):
            self.found.scopes.append(Scope(f"global of {mapping.get('__name__', fn.__module__)}", mapping, names))
            for name in names:
                self.reads(mapping[name], followed=True)

    def _plain_object(self, value: Any, name: str) -> None:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or _foreign(type(value).__module__):
            return
        self.found.scopes.append(Scope(f"attribute of {name or type(value).__name__}", attributes, tuple(attributes)))
        for key, item in list(attributes.items()):
            self.visit(item, joined(name, key), inside=True)


def _undecorated(fn: Any) -> Any:
    """The function under a property, a static or class method, a bound method, functools.partial, wraps or cache."""
    for _ in range(8):
        inner = getattr(fn, "__wrapped__", None) or getattr(fn, "__func__", None)
        if isinstance(fn, (property, functools.cached_property, functools.partial)):
            inner = getattr(fn, "fget", None) or getattr(fn, "func", None)
        if inner is None:
            break
        fn = inner
    return fn


def _outer(fn: types.FunctionType) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """(namespace, names) of the globals that a function reads, those of modules that it names included."""
    wanted = tuple(dict.fromkeys(_global_names(fn.__code__)))
    own = tuple(n for n in wanted if n in fn.__globals__)
    if own:
        yield fn.__globals__, own
    for module in (fn.__globals__[n] for n in own):
        if not isinstance(module, types.ModuleType) or _foreign(module.__name__):
            continue
        names = tuple(n for n in wanted if n in vars(module))
        if names and not (getattr(module, "__file__", None) or _INSTALLED[0]).startswith(_INSTALLED):
            yield vars(module), names


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not _EMPTY
    except ValueError:
        return False


def _foreign(module: str | None) -> bool:
    return (module or "").startswith(_FOREIGN)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _global_names(const)


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    candidates = (name if i == 0 else f"{name}_{i}" for i in range(len(taken) + 1))
    return next(n for n in candidates if n not in taken)


def _drop_inner_modules(objects: Objects) -> None:
    """A module that another root contains isn't a root."""
    inner = {id(s) for m in objects.modules.values() for s in m.modules() if s is not m}
    for name in [n for n, m in objects.modules.items() if id(m) in inner]:
        del objects.modules[name]


def _name_tensors(objects: Objects) -> None:
    for root, module in objects.modules.items():
        for role, named in (
            (Role.PARAMETER, module.named_parameters(remove_duplicate=False)),
            (Role.BUFFER, module.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in named:
                full, known = objects.qualify(root, name), objects.tensors.get(id(tensor))
                if known is None:
                    objects.tensors[id(tensor)] = Named(tensor, role, full, root)
                else:
                    objects.tensors[id(tensor)] = Named(
                        tensor, known.role, known.name, known.root, (*known.aliases, full)
                    )
    for root, optimizer in objects.states():
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            objects.keepers.setdefault(objects.named(p) or "", root)
    objects.free = {
        n: t
        for n, t in objects.free.items()
        if id(t) not in objects.tensors and id(successor(t)) not in objects.tensors
    }
