"""Counter-based randomness: equal numbers on any number of ranks, in parts, under recomputation, and after a restart."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import spmd
from spmd.capture import capture
from spmd.counter.keys import key_of
from spmd.counter.rewrite import number, rewrite
from spmd.errors import CaptureError, StateError
from spmd.graph.concrete import at
from spmd.graph.step import Role
from spmd.modes import DataParallelMode
from tests.oracle import models, steps
from tests.oracle.world import World, rank, size

GLOBAL = 12  # the least batch that 1, 2, 3 and 4 ranks share evenly
STYLES = ("replicate", "fully_shard")


def share(x: Tensor, dim: int = 0) -> Tensor:
    return x.chunk(size(), dim)[rank()]


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def train(
    model: nn.Module, step: Callable[..., Any], data: tuple[Tensor, ...], style: str, dim: int = 0, seed: int | None = 5
) -> dict[str, Tensor]:
    """Losses of three steps, and the parameters after them."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mode = DataParallelMode(style, input_batch_dim=dim)
    compiled = spmd.compile(step, parallel_mode=mode, seed=seed, randomness="counter")
    local = [share(x, dim) for x in data]
    found = {f"loss {i}": whole(compiled(model, optim, *local)) for i in range(3)}
    return found | {name: whole(p) for name, p in model.named_parameters()}


def gpt(style: str, recompute: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = models.GPT(dropout=0.2, recompute=recompute)
    data = torch.randint(0, 13, (GLOBAL, 7)), torch.randint(0, 13, (GLOBAL, 7))
    return train(model, steps.basic(steps.tokens), data, style)


def encoder(style: str) -> dict[str, Tensor]:
    """[T, B, D]: the batch is the second dim, so a part is strided."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    data = torch.randn(5, GLOBAL, 8), torch.randn(5, GLOBAL, 8)

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(model(x), 0.3).flatten(0, 1)  # [T * B, D]: a strided shard
        loss = F.mse_loss(F.dropout(h, 0.5) + 0.1 * torch.randn_like(h), y.flatten(0, 1))
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=13, dropout=0.2)
    return train(layer, step, data, style, dim=1)


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@functools.cache
def alone(job: Callable[..., dict[str, Tensor]], *args: str) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        try:
            return job(*args)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("style", STYLES)
def test_dropout_is_equal_on_any_number_of_ranks(world: World, style: str, ranks: int) -> None:
    for found in world.run(gpt, ranks, style, ""):
        close(found, alone(gpt, style, ""))


@pytest.mark.parametrize("recompute", ("free", "reentrant"))
def test_and_under_checkpointing(world: World, recompute: str) -> None:
    """Recomputed regions drop out the same elements: the results are those without checkpointing."""
    close(alone(gpt, "fully_shard", recompute), alone(gpt, "fully_shard", ""))
    for found in world.run(gpt, 3, "fully_shard", recompute):
        close(found, alone(gpt, "fully_shard", ""))


@pytest.mark.parametrize("style", STYLES)
def test_and_where_parts_are_strided(world: World, style: str) -> None:
    for ranks in (2, 3):
        for found in world.run(encoder, ranks, style):
            close(found, alone(encoder, style))
