"""parallelize_module on whole models, with plans as a user writes them: trained, they are the module on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torchs

from spmd.modes import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tests.oracle import models
from tests.oracle.plans import LLAMA, MLP, PLAN, SEQUENCE, Decoder
from tests.oracle.world import World

LOCAL: dict[str, Any] = {
    **PLAN,
    "token": RowwiseParallel(input_layouts=Replicate()),  # ours by default; torch's takes the tokens for parts
    "head": ColwiseParallel(use_local_output=False),  # for loss_parallel
}
ALONG: dict[str, Any] = {  # activations lie along the sequence: the positions too, and the head gathers them
    **SEQUENCE,
    "position": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


def trained(model: nn.Module, tokens: Tensor, logits: Callable[[Any], Any] = lambda x: x) -> list[Tensor]:
    """Losses of three steps, and the parameters after them, whole."""
    optim = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    losses = []
    for _ in range(3):
        with loss_parallel():
            loss = F.cross_entropy(logits(model(tokens)).flatten(0, 1), tokens.flatten(), ignore_index=2)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    every = [*losses, *(p.detach() for p in model.parameters())]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in every]


def compare(model: nn.Module, same: nn.Module, tokens: Tensor, logits: Callable[[Any], Any] = lambda x: x) -> None:
    names = [*(f"loss {n}" for n in range(3)), *(name for name, _ in same.named_parameters())]
    for name, a, b in zip(names, trained(model, tokens, logits), trained(same, tokens, logits), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def decoder(plan: dict[str, Any], tied: bool, length: int, torch_too: bool) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    W = dist.get_world_size()
    mesh = init_device_mesh("cpu", (W,), mesh_dim_names=("tp",))
    for parallelize in (parallelize_module, torchs.parallelize_module)[: 1 + torch_too]:
        model = Decoder(tied=tied, layers=1 if torch_too else 2)
        same = copy.deepcopy(model)
        theirs = parallelize is torchs.parallelize_module
        parallelize(model, mesh, {k: as_torchs(v) for k, v in plan.items()} if theirs else plan)
        for layer in model.layers:
            layer.attention.heads //= W
        assert (model.head.weight is model.token.weight) == tied
        compare(model, same, torch.randint(0, 13, (3, length)))


def as_torchs(style: Any) -> Any:
    return getattr(torchs, type(style).__name__)(**vars(style))


@pytest.mark.parametrize(
    ("W", "plan", "tied", "length", "torch_too"),
    [
        (2, LOCAL, False, 6, True),
        (4, LOCAL, True, 5, False),
        (2, ALONG, False, 6, False),
        (2, ALONG, False, 5, False),  # uneven: torch's own takes the parts for equal
    ],
    ids=["plain", "tied", "sequence", "uneven sequence"],
)
def test_a_decoder(world: World, W: int, plan: dict[str, Any], tied: bool, length: int, torch_too: bool) -> None:
    world.run(decoder, W, plan, tied, length, torch_too)


def llama() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = models.transformers_model("llama").double()
    same = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {**LLAMA, "lm_head": ColwiseParallel(use_local_output=False)})
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    assert len(split) == 9 and all(isinstance(p.placements[0], Shard) for p in split)
    compare(model, same, torch.randint(0, 37, (3, 6)), lambda out: out.logits)


def test_llama_of_transformers(world: World) -> None:
    world.run(llama, 2)


def pieces() -> None:
    """Six hidden features on four ranks (2, 2, 2, 0), between parts of the sequence that don't divide either (2, 2, 1, 0)."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Sequential(nn.LayerNorm(5), MLP(5, 6), nn.LayerNorm(5))
    same = copy.deepcopy(model)
    plan = {
        "0": SequenceParallel(),
        "1.up": ColwiseParallel(input_layouts=Shard(1)),
        "1.down": RowwiseParallel(output_layouts=Shard(1)),
        "2": SequenceParallel(),
    }
    parallelize_module(model, mesh, plan)
    x = torch.randn(2, 5, 5)
    start = 2 * dist.get_rank()
    found = model(x[:, start : start + 2]).full_tensor()
    torch.testing.assert_close(found, same(x), rtol=1e-9, atol=1e-12)
    found.square().sum().backward()
    same(x).square().sum().backward()
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12)


def test_sizes_smaller_than_the_mesh(world: World) -> None:
    world.run(pieces, 4)
