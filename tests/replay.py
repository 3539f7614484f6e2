"""A captured graph replayed on one device beside eager: what the capture tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from spmd.capture import Capture, capture, flatten_leaves, guards_hold
from spmd.graph.step import Role


class Replay:
    """Runs a captured graph on one device, with storage of its own."""

    def __init__(self, captured: Capture) -> None:
        self.captured, self.step = captured, captured.step
        self.stored = {s.input.name: s.tensor.detach().clone() for s in captured.slots if s.tensor is not None}
        self.numbers: dict[str, Any] = {}  # what the graph wrote: the live ones belong to eager
        if captured.init is not None:
            inputs = [
                self._number(i.name) if i.role is Role.HYPER else self.stored[i.name] for i in captured.init.inputs
            ]
            for output, value in zip(captured.init.outputs, captured.init.module(*inputs), strict=True):
                self.stored[output.name] = value

    def _slot(self, name: str) -> Any:
        return next(s for s in self.captured.slots if s.input.name == name)

    def _number(self, name: str) -> Any:
        slot = self._slot(name)
        return slot.tensor if slot.tensor is not None else slot.container[slot.key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = flatten_leaves(args, kwargs)
        inputs = []
        for s in self.captured.slots:
            if s.leaf is not None:
                inputs.append(leaves[s.leaf])
            elif s.input.role is Role.HYPER and s.container is not None:
                inputs.append(self.numbers.get(s.input.name, s.container[s.key]))
            else:
                inputs.append(self.stored[s.input.name])
        with torch.no_grad():
            values = self.step.module(*inputs)
        user = []
        for output, value in zip(self.step.outputs, values, strict=True):
            if output.role is Role.USER and output.updates is None:
                user.append(self.stored[output.alias_of] if output.alias_of else value)
            elif output.role is Role.USER and self.captured.slots[output.updates].leaf is not None:
                leaves[self.captured.slots[output.updates].leaf].copy_(value)
            elif output.role is Role.HYPER and not isinstance(value, torch.Tensor):
                self.numbers[self.captured.slots[output.updates].input.name] = value
            else:
                self.stored[output.name] = value
        return pytree.tree_unflatten(user, self.captured.out_spec)


def difference(a: Any, b: Any) -> float:
    """Largest difference relative to the largest value."""
    a, b = torch.as_tensor(a).detach().double(), torch.as_tensor(b).detach().double()
    assert a.shape == b.shape, (a.shape, b.shape)
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() if a.numel() else 0.0


def named_state(model: nn.Module, optim: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    names = {p: n for n, p in model.named_parameters()}
    out = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for p, state in optim.state.items() if optim else ():
        out.update({f"{names[p]}.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)})
    return out


def check(
    step: Callable[..., Any],
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    batch: Callable[[int], tuple[Any, ...]],
    sizes: tuple[int, ...] = (6, 6, 4, 6),
    tolerance: float = 1e-12,
    between: Callable[[torch.optim.Optimizer | None], None] = lambda optim: None,
    before: int = 0,
) -> Capture:
    """Replays one capture for several calls of different batch sizes, and eager beside it. `before`: eager steps first."""
    for _ in range(before):
        step(model, optim, *batch(sizes[0]))
    state = torch.get_rng_state()
    first = batch(sizes[0])
    torch.set_rng_state(state)
    flags = [p.requires_grad for p in model.parameters()]
    snapshot = copy.deepcopy((model.state_dict(), optim.state_dict() if optim else None))
    captured = capture(step, (model, optim, *first))
    assert torch.equal(state, torch.get_rng_state()), "tracing drew random numbers"
    assert [p.requires_grad for p in model.parameters()] == flags
    after = (model.state_dict(), optim.state_dict() if optim else None)
    assert pytree.tree_all(
        lambda same: same,
        pytree.tree_map(
            lambda a, b: (
                bool((torch.as_tensor(a) == torch.as_tensor(b)).all())
                if isinstance(a, (torch.Tensor, float))
                else a == b
            ),
            snapshot,
            after,
        ),
    )
    assert captured.guards.check(step, (model, optim, *first), {}) is None
    replay = Replay(captured)
    for i, size in enumerate(sizes):
        if captured.step.size is not None and size != captured.step.size:
            continue
        assert guards_hold(captured.step, size)
        state = torch.get_rng_state()
        data = batch(size)
        middle = torch.get_rng_state()
        replayed = replay(model, optim, *data)
        ended = torch.get_rng_state()
        torch.set_rng_state(state)
        data = batch(size)
        assert torch.equal(middle, torch.get_rng_state())
        eager = step(model, optim, *data)
        assert torch.equal(ended, torch.get_rng_state()), "another number of random draws than eager"
        compare(replay, replayed, eager, model, optim, tolerance, f"step {i}, batch {size}")
        between(optim)
        assert captured.guards.scalars.changed() is None, "something that changed is baked into the graph"
    return captured


def compare(
    replay: Replay, replayed: Any, eager: Any, model: nn.Module, optim: Any, tolerance: float, where: str
) -> None:
    ours, theirs = pytree.tree_leaves(replayed), pytree.tree_leaves(eager)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert difference(a, b) <= tolerance if b is not None else a is None, (where, "output", a, b)
    reference = named_state(model, optim)
    for name, number in replay.numbers.items():
        slot = replay._slot(name)
        assert number == pytest.approx(slot.container[slot.key], rel=1e-12), (where, name)
    lacking = set(reference) - set(replay.stored)
    assert not lacking, (where, lacking)
    for name, value in reference.items():
        error = difference(replay.stored[name], value)
        assert error <= tolerance, (where, name, error)
        assert replay.stored[name].dtype == value.dtype, name


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def labelled(
    dtype: torch.dtype = torch.float64, *shape: int, classes: int = 5
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda n: (torch.randn(n, *(shape or (8,)), dtype=dtype), torch.randint(0, classes, (n,)))


def train(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def refused(
    error: type[Exception], step: Callable[..., Any], *words: str, model: nn.Module | None = None, **options: Any
) -> str:
    """The step is refused, the message has all of `words`, and nothing has changed."""
    model = model or mlp()
    optim = options.pop("optim", None) or torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(error) as raised:
        capture(step, (model, optim, *labelled()(6)), {}, **options)
    text = str(raised.value)
    assert all(w in text for w in words), text
    assert all(type(p) is nn.Parameter for p in model.parameters()) and all(p.grad is None for p in model.parameters())
    return text
