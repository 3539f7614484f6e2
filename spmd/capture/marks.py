"""Nodes written by hand: marks on optimizer state as it's made, and tensors lifted to inputs in mid-trace.

A mark is an identity node. It makes the tensor opaque: `step = torch.tensor(0.)` is a constant to the tracer, and `step.item()` would be
baked; behind a mark it's a value like any other. `finish.py` cuts the graph at the marks and removes them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from spmd._torch import (
    DisableTorchFunction,
    FakeTensorMode,
    FunctionalTensor,
    detect_fake_mode,
    disable_functional_mode,
    disable_proxy_modes_tracing,
    from_functional_tensor,
    functionalize_commit_update,
    functionalize_replace,
    get_proxy_mode,
    get_proxy_slot,
    sync,
    track_tensor_tree,
)


def mark(x: torch.Tensor) -> torch.Tensor:
    """Target of a mark's node."""
    return x


def inner(t: torch.Tensor) -> torch.Tensor:
    """The fake tensor behind what the user's code sees, with all pending writes done."""
    if not isinstance(t, FunctionalTensor):
        return t
    sync(t)
    return from_functional_tensor(t.elem)


def overwrite(t: torch.Tensor, new: torch.Tensor) -> None:
    """`t[...] = new` without a copy: `new` is a fake with a node."""
    functionalize_replace(t.elem, new)  # type: ignore[attr-defined]
    functionalize_commit_update(t.elem)  # type: ignore[attr-defined]
    sync(t)


def fake_like(t: torch.Tensor) -> torch.Tensor:
    """A fresh fake with the metadata of `t`, and no node yet."""
    source = inner(t)
    mode: FakeTensorMode | None = detect_fake_mode([source])
    assert mode is not None
    with disable_proxy_modes_tracing(), disable_functional_mode(), mode:
        return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device)


def node_of(t: torch.Tensor) -> fx.Node | None:
    """The node that `t` is now, while tracing."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot = get_proxy_slot(inner(t), mode.tracer, None)
    return None if slot is None else slot.proxy.node


class Marks:
    """The marks of one trace: node -> what it marks."""

    def __init__(self) -> None:
        self.nodes: dict[fx.Node, Any] = {}

    def mark(self, t: torch.Tensor, key: Any) -> None:
        """Puts a mark on `t`, in place: everyone who holds it sees the marked value."""
        with DisableTorchFunction():
            self._mark(t, key)

    def _mark(self, t: torch.Tensor, key: Any) -> None:
        before = node_of(t)
        mode = get_proxy_mode()
        if before is None or mode is None:  # not a traced value
            return
        proxy = mode.tracer.create_proxy("call_function", mark, (fx.Proxy(before, mode.tracer),), {})
        new = fake_like(t)
        track_tensor_tree(new, proxy, constant=None, tracer=mode.tracer)
        overwrite(t, new)
        self.nodes[proxy.node] = key


def lift(fake: torch.Tensor, name: str) -> tuple[torch.Tensor, fx.Node]:
    """A new input in mid-trace. `finish.py` moves its placeholder to the front."""
    mode = get_proxy_mode()
    assert mode is not None
    proxy = mode.tracer.create_proxy("placeholder", name, (), {})
    track_tensor_tree(fake, proxy, constant=None, tracer=mode.tracer)
    return FunctionalTensor.to_functional(fake), proxy.node


def lift_number(number: torch.SymInt, name: str) -> tuple[torch.SymInt, fx.Node]:
    """`lift` for a symbolic number."""
    mode = get_proxy_mode()
    assert mode is not None
    proxy = mode.tracer.create_proxy("placeholder", name, (), {})
    track_tensor_tree(number, proxy, constant=None, tracer=mode.tracer)
    return number, proxy.node
