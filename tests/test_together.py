"""Functions that share a model in different modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import spmd
from spmd.errors import SpmdError
from spmd.modes import (
    ColwiseParallel,
    DataParallelMode,
    DTensorExpandMode,
    ParallelMode,
    RowwiseParallel,
    Schema,
    TensorParallelMode,
)
from tests.oracle import steps
from tests.oracle.world import World

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


train = steps.basic()


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
