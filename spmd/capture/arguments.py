"""The arguments of one call as a flat list of leaves with paths, and the batch they carry."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spmd._torch import pytree
from spmd.capture.objects import SCALARS, bind_names
from spmd.errors import InputError, Offence


@dataclass(frozen=True)
class _Object:
    """How to rebuild a plain object (a dataclass, a UserDict) whose attributes hold tensors."""

    prototype: Any
    spec: pytree.TreeSpec


@dataclass
class Arguments:
    """The leaves of (args, kwargs). Plain objects that hold tensors are opened: their tensors are leaves too."""

    leaves: list[Any]
    paths: list[str]
    spec: pytree.TreeSpec
    objects: dict[int, _Object]  # pytree leaf index -> the plain object there
    starts: list[int]  # pytree leaf index -> index of its first leaf here

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with other leaves."""
        outer: list[Any] = []
        for i, start in enumerate(self.starts):
            opened = self.objects.get(i)
            if opened is None:
                outer.append(leaves[start])
                continue
            twin = copy.copy(opened.prototype)
            twin.__dict__.update(
                pytree.tree_unflatten(list(leaves[start : start + opened.spec.num_leaves]), opened.spec)
            )
            outer.append(twin)
        return pytree.tree_unflatten(outer, self.spec)


def _opens(leaf: Any) -> dict[str, Any] | None:
    """The attributes of a plain object that holds tensors, else None."""
    if isinstance(leaf, (*SCALARS, torch.Tensor, nn.Module, Optimizer, type)) or not hasattr(leaf, "__dict__"):
        return None
    if not (is_dataclass(leaf) or isinstance(leaf, Mapping) or type(leaf).__module__ not in ("builtins", "torch")):
        return None
    attributes = vars(leaf)
    held = pytree.tree_leaves(attributes)
    return (
        attributes
        if any(isinstance(t, torch.Tensor) for t in held)
        and not any(isinstance(m, (nn.Module, Optimizer)) for m in held)
        else None
    )


def flatten_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves that `Slot.leaf` counts: those of the pytree (args, kwargs), plain objects with tensors opened."""
    out: list[Any] = []
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        opened = _opens(leaf)
        out.extend([leaf] if opened is None else pytree.tree_leaves(opened))
    return out


def flatten(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Leaves of a call with the argument path of each: "x", "batch.mask", "batch[0]"."""
    names = _top_names(fn, args, kwargs)
    with_path, spec = pytree.tree_flatten_with_path((args, dict(kwargs)))
    result = Arguments([], [], spec, {}, [])
    for i, (path, leaf) in enumerate(with_path):
        text = names[(path[0].idx, _key(path[1]))] + "".join(_step(k) for k in path[2:])  # type: ignore[attr-defined]
        result.starts.append(len(result.leaves))
        opened = _opens(leaf)
        if opened is None:
            result.leaves.append(leaf)
            result.paths.append(text)
            continue
        inner, inner_spec = pytree.tree_flatten_with_path(opened)
        result.objects[i] = _Object(leaf, inner_spec)
        inner_path = inner[0][0][:1] if isinstance(leaf, Mapping) else ()  # a UserDict's `.data` isn't part of the name
        result.leaves.extend(value for _, value in inner)
        result.paths.extend(text + "".join(_step(k) for k in (p[1:] if inner_path else p)) for p, _ in inner)
    return result


def _key(entry: Any) -> Any:
    return getattr(entry, "idx", getattr(entry, "key", getattr(entry, "name", None)))


def _step(entry: Any) -> str:
    key = _key(entry)
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _top_names(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[tuple[int, Any], str]:
    bound = list(bind_names(fn, args, {}).keys()) if not kwargs else list(bind_names(fn, args, kwargs).keys())
    positional = [n for n in bound if n not in kwargs]
    out: dict[tuple[int, Any], str] = {(1, k): k for k in kwargs}
    out.update({(0, i): positional[i] if i < len(positional) else f"args[{i}]" for i in range(len(args))})
    return out


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether `path`, or something that contains it, is named in `patterns`."""
    return any(path == p or path.startswith((p + ".", p + "[")) for p in patterns)


def batch_dims(arguments: Arguments, batch_dim: int, replicated: Sequence[str]) -> tuple[dict[int, int], int | None]:
    """Which leaves carry the batch on which dim, and its size on this rank (None without any).

    Raises:
        InputError: sizes differ, a tensor lacks the dim, or a `replicated` path names nothing.
    """
    tensors = [(i, p) for i, p in enumerate(arguments.paths) if isinstance(arguments.leaves[i], torch.Tensor)]
    unknown = [r for r in replicated if not any(matches(p, (r,)) for p in arguments.paths)]
    offences = [
        Offence(
            f"replicated_inputs names {r!r}, which is no argument",
            remedy=f"use one of: {', '.join(p for _, p in tensors)}",
        )
        for r in unknown
    ]
    dims: dict[int, int] = {}
    for i, path in tensors:
        t = arguments.leaves[i]
        if t.dim() == 0 or matches(path, replicated) or isinstance(t, nn.Parameter):
            continue
        if not -t.dim() <= batch_dim < t.dim():
            offences.append(
                Offence(
                    f"{path} has shape {tuple(t.shape)}: no dim {batch_dim} to carry the batch",
                    remedy=_REPLICATE.format(path),
                )
            )
            continue
        dims[i] = batch_dim % t.dim()
    sizes = {i: arguments.leaves[i].shape[d] for i, d in dims.items()}
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{arguments.paths[i]}{list(arguments.leaves[i].shape)} has {n}" for i, n in sizes.items())
        odd = arguments.paths[min(sizes, key=lambda i: list(sizes.values()).count(sizes[i]))]
        offences.append(
            Offence(
                f"arguments disagree about the batch size along dim {batch_dim}: {listing}",
                remedy=_REPLICATE.format(odd),
            )
        )
    if offences:
        raise InputError(offences)
    return dims, next(iter(sizes.values()), None)


_REPLICATE = (
    "if it doesn't carry the batch, name it: replicated_inputs=({!r},); else give all arguments the same batch size"
)
