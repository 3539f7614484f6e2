"""Functions that share a model in different modes, and updates over parameters that lie differently."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import spmd
from spmd.errors import CaptureError, SpmdError
from spmd.modes import (
    ColwiseParallel,
    DataParallelMode,
    DTensorExpandMode,
    ParallelMode,
    RowwiseParallel,
    Schema,
    TensorParallelMode,
)
from tests.oracle.world import World

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y).detach()


def mode(name: str) -> ParallelMode:
    if name == "tensor":
        return TensorParallelMode(PLAN)
    if name == "dtensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return DTensorExpandMode({"0.weight": Schema(mesh, [Shard(1)]), "2.weight": Schema(mesh, [Shard(0)])})
    return DataParallelMode(name, min_numel=20 if name == "default" else None)


def share(x: Tensor, mode: ParallelMode) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()] if mode.splits_batch else x


def train_in_one_mode_evaluate_in_others(name: str) -> None:
    """Whatever the second function's mode would like, the parameters stay where the first one has put them."""
    torch.set_default_dtype(torch.float64)
    model, plain = build(), build()
    optims = [torch.optim.Adam(m.parameters(), 0.1) for m in (model, plain)]
    x, y = torch.randn(6, 5), torch.randn(6, 3)
    first = mode(name)
    step = spmd.compile(train, parallel_mode=first)
    lies: list[Any] = []
    for other in ("replicate", "zero2", "fully_shard", "default", "tensor", "dtensor"):
        torch.testing.assert_close(
            step(model, optims[0], share(x, first), share(y, first)), train(plain, optims[1], x, y)
        )
        lies = lies or [p.placements for p in model.parameters()]
        second = mode(other)
        found = spmd.compile(evaluate, parallel_mode=second)(model, share(x, second), share(y, second))
        torch.testing.assert_close(found, evaluate(plain, x, y))
        assert [p.placements for p in model.parameters()] == lies
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor)
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["fully_shard", "tensor"])
def test_an_eval_step_in_another_mode_keeps_placements(world: World, name: str) -> None:
    world.run(train_in_one_mode_evaluate_in_others, 2, name)


def another_mesh() -> None:
    model, x, y = build(), torch.randn(2, 5), torch.randn(2, 3)
    spmd.compile(evaluate, parallel_mode="replicate")(model, x, y)
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(SpmdError, match="mesh"):
        spmd.compile(evaluate, parallel_mode="hybrid_shard", mesh=mesh)(model, x, y)


def test_a_model_on_another_mesh_is_refused(world: World) -> None:
    world.run(another_mesh, 4)


# ---------------------------------------------------------------------------------------------- clipping

NORMS = (1.0, 2.0, 3.0, math.inf, -math.inf)


def clip(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor, norm: float, foreach: bool) -> Tensor:
    F.mse_loss(model(x), y).backward()
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm, foreach=foreach)
    some = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.dim() > 1], norm)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.02, foreach=foreach)
    optim.step()
    optim.zero_grad()
    return found + some


def clip_in_every_way(name: str) -> None:
    """Some parameters and gradients are whole, others in parts, uneven ones; each of two groups has both."""
    torch.set_default_dtype(torch.float64)
    x, y = torch.randn(6, 5), torch.randn(6, 3)
    for norm in NORMS:
        models = [build(), build()]
        optims = [
            torch.optim.SGD(
                [{"params": list(m[0].parameters())}, {"params": list(m[2].parameters()), "lr": 0.5}],
                0.1,
                0.9,
                foreach=True,
            )
            for m in models
        ]
        step = spmd.compile(clip, parallel_mode=mode(name))
        for foreach in (True, False):
            found = step(models[0], optims[0], share(x, mode(name)), share(y, mode(name)), norm, foreach)
            torch.testing.assert_close(found, clip(models[1], optims[1], x, y, norm, foreach), rtol=1e-9, atol=1e-12)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-9, atol=1e-12, msg=f"{norm}")
    kinds = {type(p.placements[0]) for p in models[0].parameters()}
    assert name != "default" or kinds == {Shard, Replicate}


@pytest.mark.parametrize("name", ["default", pytest.param("tensor", marks=pytest.mark.slow)])
def test_clipping_over_parameters_that_lie_differently(world: World, name: str) -> None:
    world.run(clip_in_every_way, 3, name)


def test_clipping_that_looks_at_the_norm_is_refused() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError, match=r"clip_grad_norm_|value of a tensor"):
        spmd.compile(step)(model, torch.randn(2, 5))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
