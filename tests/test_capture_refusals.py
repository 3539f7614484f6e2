"""Steps that one graph can't hold are refused, with the line and the remedy, and nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from spmd.capture import capture
from spmd.errors import CaptureError, InputError, SideEffectError, StateError
from tests.replay import labelled, mlp, refused, train


def test_refuses_control_flow_on_values() -> None:
    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        if loss.item() > 1:
            loss.backward()
        return loss

    refused(CaptureError, step, "test_capture_refusals.py", "loss.item() > 1", "torch.where")


def test_refuses_shapes_that_depend_on_values() -> None:
    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return x[x[:, 0] > 0].sum() + x.nonzero().sum()

    text = refused(CaptureError, step, "test_capture_refusals.py", "mask")
    assert text.count("the shape of its result") >= 2, text


def test_refuses_dist_calls() -> None:
    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return model(x).sum() / torch.distributed.get_world_size()

    refused(CaptureError, step, "torch.distributed", "get_world_size")


def test_refuses_python_side_effects_all_at_once() -> None:
    import random

    log: list[Any] = []
    calls = 0

    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        nonlocal calls
        calls += 1
        model.calls = getattr(model, "calls", 0) + 1
        log.append(1)
        random.random()
        return model(x).sum()

    refused(SideEffectError, step, "log", "generator")
    assert calls == 0 and log == []


def test_refuses_counters_but_keeps_one_time_effects() -> None:
    class Counting(nn.Module):
        def __init__(self, settle: bool) -> None:
            super().__init__()
            self.a, self.calls, self.settle = nn.Linear(8, 5).double(), 0, settle

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = 1 if self.settle else self.calls + 1
            return self.a(x)

    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return model(x).sum()

    model = Counting(False)
    refused(SideEffectError, step, "calls", "from 1 to 2", model=model)
    assert model.calls == 0
    model = Counting(True)
    assert capture(step, (model, None, *labelled()(6))).guards.check(step, (model, None, *labelled()(6)), {}) is None
    assert model.calls == 1


def test_keeps_hooks_that_the_first_call_installs() -> None:
    """In the module's own dict, which their handles know."""

    class Lazy(nn.Module):
        def __init__(self, once: bool) -> None:
            super().__init__()
            self.a, self.once, self.ready = nn.Linear(8, 5).double(), once, False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                self.a.register_forward_hook(lambda module, args, output: output * 2)
                self.ready = self.once
            return self.a(x)

    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return model(x).sum()

    model, batch = Lazy(True), labelled()(6)
    hooks = model.a._forward_hooks
    assert capture(step, (model, None, *batch)).guards.check(step, (model, None, *batch), {}) is None
    assert model.ready and model.a._forward_hooks is hooks and len(hooks) == 1
    refused(SideEffectError, step, "_forward_hooks", model=Lazy(False))


def test_refuses_state_that_a_call_leaves_for_the_next() -> None:
    class Carry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(8, 5).double(), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.h = self.a(x) if self.h is None else self.a(x) + self.h.detach()
            return self.h

    refused(SideEffectError, lambda model, optim, x, y: model(x).sum(), "h", model=Carry())


def test_refuses_tensors_that_share_memory() -> None:
    model = mlp()
    model.register_buffer("view", model[0].weight.data[0])
    refused(StateError, train, "view", "0.weight", "shares memory", model=model)


def test_refuses_batch_sized_buffers() -> None:
    model = mlp()
    model.register_buffer("memory", torch.zeros(6, 5, dtype=torch.float64))

    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return (model(x) + model.memory).sum()

    refused(CaptureError, step, "memory", "12", model=model, global_batch=lambda b: 2 * b)

    def replace(model: Any, optim: Any, x: Any, y: Any) -> Any:
        model.memory = model(x).detach()

    refused(StateError, replace, "memory", model=model, global_batch=lambda b: 2 * b)


def test_refuses_arguments_that_disagree() -> None:
    with pytest.raises(InputError) as raised:
        capture(train, (mlp(), None, torch.randn(6, 8), torch.zeros(5)))
    assert "x[6, 8] has 6" in str(raised.value) and "y[5] has 5" in str(raised.value)


def test_a_step_that_fails_says_where_and_restores() -> None:
    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return model(x) @ y.double().unsqueeze(0)

    refused(CaptureError, step, "test_capture_refusals.py")


@pytest.mark.parametrize("reentrant", [False, True])
def test_refuses_checkpointed_regions_that_write(reentrant: bool) -> None:
    """Eager recomputes them in backward, and so writes twice."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = checkpoint(model, x, use_reentrant=reentrant).sum()
        loss.backward()
        return loss.detach()

    x = torch.randn(6, 4, requires_grad=True)
    with pytest.raises(CaptureError, match=r"writes to 1\.running_mean, 1\.running_var, 1\.num_batches_tracked"):
        capture(step, (x,))
    model.eval()
    capture(step, (x,))


class Preconditioned(torch.optim.SGD):
    """Keeps its preconditioners together under one key, from its first step on."""

    together: Any = list

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("factors", self.together(self.factors(p)))
        super().step(closure)

    def factors(self, p: torch.Tensor) -> Any:
        return [torch.eye(n) for n in p.shape]


@pytest.mark.parametrize("together", [list, tuple, set, lambda xs: dict(enumerate(xs))])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_containers_in_a_state_are_refused_by_optimizer_parameter_and_key(together: Any, steps_before: int) -> None:
    model = mlp()
    optim = Preconditioned(model.parameters(), 0.1)
    optim.together = together
    for _ in range(steps_before):
        train(model, optim, *labelled()(6))
    with pytest.raises(StateError) as error:
        capture(train, (model, optim, *labelled()(6)))
    text = str(error.value)
    assert all(part in text for part in ("Preconditioned", "'factors'", 'state[f"factors_{i}"]', "tensor: 0.weight")), (
        text
    )
