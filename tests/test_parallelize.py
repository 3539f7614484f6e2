"""parallelize_module on gloo ranks: the module's own outputs, gradients and updates, and torch's counts where torch does the same."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.debug import CommDebugMode

from spmd import modes
from spmd.errors import InputError, PlacementError
from spmd.modes import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from tests.oracle.plans import MLP, Decoder
from tests.oracle.world import World


class Block(nn.Module):
    """A norm and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), MLP(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def plans(style: Any) -> dict[str, tuple[nn.Module, dict[str, Any], dict[str, Any], Tensor]]:
    """Module, plan, its options, and an input, with the styles of `style`: ours or torch's."""
    two = {"up": style.ColwiseParallel(), "down": style.RowwiseParallel()}
    table = torch.arange(10).view(2, 5)
    return {
        "pair": (MLP(8, 12), two, {}, torch.randn(2, 4, 8)),
        "sequence": (
            Block(8),
            {
                "norm": style.SequenceParallel(),
                "mlp": style.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "mlp.up": style.ColwiseParallel(),
                "mlp.down": style.RowwiseParallel(output_layouts=Shard(1)),
            },
            {"split": 1},
            torch.randn(2, 4, 8),
        ),
        "columns": (nn.Embedding(10, 8), {"": style.ColwiseParallel()}, {"out": -1}, table),
        "rows": (nn.Embedding(10, 8), {"": style.RowwiseParallel(input_layouts=Replicate())}, {}, table),
        "scattered": (
            nn.Linear(8, 6),
            {"": style.RowwiseParallel(output_layouts=Shard(0))},
            {"split": -1, "out": 0},
            torch.randn(4, 8),
        ),
    }


def whole(x: Tensor, dim: int | None) -> Tensor:
    """From every rank's part."""
    if isinstance(x, DTensor):
        return x.full_tensor()
    if dim is None:
        return x
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return torch.cat(parts, dim)


def trained(name: str, style: Any, parallelize: Any) -> tuple[Counter[str], list[Any]]:
    """Runs a module of `plans` for two steps, whole and parallelized, and compares. Returns counts and placements."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module, plan, options, x = plans(style)[name]
    same = copy.deepcopy(module)
    parallelize(module, mesh, plan)
    split, out = options.get("split"), options.get("out", options.get("split"))
    x = x.requires_grad_() if x.is_floating_point() else x
    mine = x if split is None else distribute_tensor(x.detach(), mesh, [Shard(split)]).requires_grad_()
    mine = mine.to_local() if isinstance(mine, DTensor) and split == -1 else mine
    counts: Counter[str] = Counter()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (same, module)]
    for _ in range(2):
        expected = same(x)
        expected.square().sum().backward()
        with CommDebugMode() as comm:
            found = module(mine)
            loss = found.square().sum()
            loss.backward()
        counts = Counter({str(k): v for k, v in comm.get_comm_counts().items()})
        torch.testing.assert_close(whole(found, out).detach(), expected.detach(), rtol=1e-9, atol=1e-12)
        for (fqn, p), q in zip(module.named_parameters(), same.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(
                whole(p.grad, None), q.grad, rtol=1e-9, atol=1e-9, msg=lambda m, fqn=fqn: f"{fqn}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(module.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(whole(p, None).detach(), q.detach(), rtol=1e-9, atol=1e-9)
    return counts, [p.placements for p in module.parameters() if isinstance(p, DTensor)]


def against_torch(name: str) -> Counter[str]:
    theirs = trained(name, torchs, torchs.parallelize_module)
    assert trained(name, modes, parallelize_module) == theirs
    assert trained(name, torchs, parallelize_module) == theirs  # torch's styles in our function
    return theirs[0]


@pytest.mark.parametrize("name", ["pair", "sequence", "columns", "rows", "scattered"])
def test_it_does_what_torchs_does(world: World, name: str) -> None:
    for counts in world.run(against_torch, 2, name):
        assert counts.total() == {"pair": 2, "sequence": 4, "columns": 0, "rows": 1, "scattered": 2}[name]


def odd() -> None:
    """Sizes that don't divide, ties, frozen parameters, other arguments."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Decoder(heads=6, tied=True)
    model.layers[0].mlp.up.weight.requires_grad_(False)
    same = copy.deepcopy(model)
    plan = {
        "token": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    assert model.head.weight is model.token.weight and model.token.weight.placements == (Shard(0),)
    assert not model.layers[0].mlp.up.weight.requires_grad
    tokens = torch.randint(0, 13, (3, 5))
    for m in (model, same):
        F.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten()).backward()
    for (fqn, p), q in zip(model.named_parameters(), same.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), fqn
        if p.grad is not None:
            torch.testing.assert_close(whole(p.grad, None), q.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("W", [2, 3])
def test_sizes_that_dont_divide_ties_and_frozen_parameters(world: World, W: int) -> None:
    world.run(odd, W)


class Two(nn.Module):
    def forward(self, x: Tensor, scale: float, *, mask: Tensor) -> tuple[Tensor, float]:
        assert isinstance(x, DTensor) and isinstance(mask, DTensor)
        return x * mask, scale


def arguments() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    style = PrepareModuleInput(Shard(1), Replicate(), {"mask": Replicate()}, {"mask": Shard(0)})
    two = parallelize_module(Two(), mesh, style)
    rank = dist.get_rank()
    x, scale = two(torch.ones(2, 2 - rank), 3.0, mask=torch.ones(2, 3))  # three columns, unevenly
    assert x.full_tensor().shape == (2, 3) and scale == 3.0
    with pytest.raises(InputError, match="mask"):
        two(torch.ones(2, 2), 3.0)
    with pytest.raises(InputError, match="0 positional"):
        two(mask=torch.ones(2, 3))
    with pytest.raises(PlacementError, match=r"mesh\['dp'\] or mesh\['tp'\]"):
        parallelize_module(
            nn.Linear(2, 2), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), ColwiseParallel()
        )
    table, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = table.weight
    with pytest.raises(PlacementError, match="tied"):
        parallelize_module(nn.Sequential(table, head), mesh, {"0": ColwiseParallel(), "1": ColwiseParallel()})
    torch.manual_seed(rank)
    linear = nn.Linear(4, 4)
    first = linear.weight.detach().clone()
    dist.broadcast(first, 0)
    assert torch.equal(parallelize_module(linear, mesh, ColwiseParallel()).weight.full_tensor(), first)
    assert SequenceParallel().describe(nn.LayerNorm(4)).use_local_output is False


def test_arguments_and_what_is_refused(world: World) -> None:
    world.run(arguments, 2)
