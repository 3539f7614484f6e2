"""parallelize_module on gloo ranks: the module's own outputs, gradients and updates, and torch's counts where torch does the same."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.debug import CommDebugMode

from spmd import modes
from spmd.errors import InputError, PlacementError
from spmd.modes import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
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
    along = {
        "norm": style.SequenceParallel(),
        "mlp": style.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.up": style.ColwiseParallel(),
        "mlp.down": style.RowwiseParallel(output_layouts=Shard(1)),
    }
    table = torch.arange(10).view(2, 5)
    return {
        "pair": (MLP(8, 12), two, {}, torch.randn(2, 4, 8)),
        "sequence": (Block(8), along, {"split": 1}, torch.randn(2, 4, 8)),
        "plain sequence": (Block(8), along, {"split": 1, "plain": True}, torch.randn(2, 4, 8)),
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


def short(comm: CommDebugMode) -> Counter[str]:
    return Counter({str(op).rpartition(".")[2]: n for op, n in comm.get_comm_counts().items()})


def trained(name: str, style: Any, parallelize: Any) -> tuple[list[Counter[str]], list[Any]]:
    """Runs a module of `plans` for two steps, whole and parallelized, and compares. Returns counts, forward and backward, and placements."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module, plan, options, x = plans(style)[name]
    same = copy.deepcopy(module)
    parallelize(module, mesh, plan)
    split, out = options.get("split"), options.get("out", options.get("split"))
    x = x.requires_grad_() if x.is_floating_point() else x
    mine = x if split is None else distribute_tensor(x.detach(), mesh, [Shard(split)]).requires_grad_()
    plain = options.get("plain", split == -1)
    mine = mine.to_local() if isinstance(mine, DTensor) and plain else mine
    counts: list[Counter[str]] = []
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (same, module)]
    for _ in range(2):
        expected = same(x)
        expected.square().sum().backward()
        with CommDebugMode() as forward:
            found = module(mine)
        with CommDebugMode() as backward:
            found.square().sum().backward()
        counts = [short(forward), short(backward)]
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


def against_torch(name: str) -> list[Counter[str]]:
    theirs = trained(name, torchs, torchs.parallelize_module)
    for style in (modes, torchs):  # torch's styles in our function, too
        counts, lies = trained(name, style, parallelize_module)
        asked = counts[0].pop("allreduce_", 0)  # for the lengths of the norm's parts, which torch takes for equal
        assert asked == (name == "plain sequence") and (counts, lies) == theirs
    return theirs[0]


GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
EXPECTED: dict[str, list[dict[str, int]]] = {  # forward, backward
    "pair": [{"all_reduce": 1}, {"all_reduce": 1}],
    "sequence": [{GATHER: 1, SCATTER: 1}, {GATHER: 1, SCATTER: 1}],
    "plain sequence": [{GATHER: 1, SCATTER: 1}, {GATHER: 1, SCATTER: 1}],
    "columns": [{}, {}],
    "rows": [{"all_reduce": 1}, {}],
    "scattered": [{SCATTER: 1}, {GATHER: 1}],
}


@pytest.mark.parametrize(("name", "W"), [*((name, 2) for name in EXPECTED), ("pair", 4), ("rows", 4)])
def test_it_does_what_torchs_does(world: World, name: str, W: int) -> None:
    for counts in world.run(against_torch, W, name):
        assert counts == EXPECTED[name]


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
    with pytest.raises(TypeError, match="mask"):  # as the module itself says
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


class Doubling(torchs.ParallelStyle):
    """Somebody's style for torch: rows of the weight in parts, the output whole."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        for name, p in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(p.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(whole))
        module.register_forward_pre_hook(lambda m, a: (distribute_tensor(a[0], device_mesh, [Replicate()]),))
        module.register_forward_hook(lambda m, a, out: 2 * out.full_tensor())
        return module


@dataclass(frozen=True)
class Acts(ParallelStyle):
    """Does what a column-wise style does, and more."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.seen = True
        return ColwiseParallel(output_layouts=Replicate()).apply(module, mesh)


@dataclass(frozen=True)
class Swaps(ParallelStyle):
    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return nn.Identity()


def pair_of(a: nn.Module, b: nn.Module) -> nn.Sequential:
    """Two modules with one weight."""
    b.weight = a.weight
    return nn.Sequential(a, b)


def styles_of_ones_own() -> None:
    torch.set_default_dtype(torch.float64)
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for second in (Acts(), Doubling(), ColwiseParallel(output_layouts=Replicate())):
        for first in (Acts(), Doubling(), ColwiseParallel(output_layouts=Replicate())):
            model = pair_of(nn.Linear(4, 5), nn.Linear(4, 5, bias=False))
            a, b = copy.deepcopy(model)
            parallelize_module(model, mesh, {"0": first, "1": second})
            assert model[0].weight is model[1].weight and isinstance(model[0].weight, DTensor)
            torch.testing.assert_close(model[0](x), a(x) * (2 if isinstance(first, Doubling) else 1))
            torch.testing.assert_close(model[1](x), b(x) * (2 if isinstance(second, Doubling) else 1))
    for style in (Acts(), Doubling(), ColwiseParallel()):  # each rank cuts its own
        own = nn.Linear(4, 5)
        mine = own.weight.detach().clone() + rank
        with torch.no_grad():
            own.weight.copy_(mine)
        parallelize_module(own, mesh, style, src_data_rank=None)
        assert torch.equal(own.weight.to_local(), mine.chunk(2)[rank])  # type: ignore[operator]
        again = nn.Linear(4, 5)
        with torch.no_grad():
            again.weight.fill_(rank)
        parallelize_module(again, mesh, style, src_data_rank=1)
        assert (again.weight.full_tensor() == 1).all()  # type: ignore[operator]
    with pytest.raises(PlacementError, match=r"Swaps.apply doesn't return[\s\S]*tensor: 0"):
        parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": Swaps()})


def test_styles_of_ones_own_and_torchs(world: World) -> None:
    world.run(styles_of_ones_own, 2)


def several_names() -> None:
    """Modules that several patterns or names lead to, and plans that don't fit. A rowwise output reduced twice would be doubled."""
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (2,))
    linear, x = nn.Linear(4, 5), torch.randn(3, 4)
    shared = nn.ModuleDict({"a": linear, "b": linear})
    expected = linear(x).detach()
    linear.weight.note = "kept"  # type: ignore[attr-defined]
    parallelize_module(
        shared, mesh, {"*": RowwiseParallel(input_layouts=Replicate()), "a": RowwiseParallel(Replicate())}
    )
    assert shared["b"].weight.note == "kept"
    for module in (shared["a"], copy.deepcopy(shared)["b"]):
        torch.testing.assert_close(module(x).detach(), expected)
    with pytest.raises(PlacementError, match=r"parallelized already[\s\S]*tensor: a"):
        parallelize_module(shared, mesh, {"a": RowwiseParallel(Replicate())})
    both = nn.Sequential(nn.Linear(4, 6))
    expected = both(x).detach()
    parallelize_module(
        both, mesh, {"*": PrepareModuleInput(Shard(0), Replicate()), "0": ColwiseParallel(output_layouts=Replicate())}
    )
    torch.testing.assert_close(both(x.chunk(2)[dist.get_rank()]).detach(), expected)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    before = list(model.parameters())
    with pytest.raises(PlacementError, match=r"RowwiseParallel is for[\s\S]*tensor: 1"):
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True)) and not model[0]._forward_hooks
    with torch.device("meta"):
        late = parallelize_module(nn.Linear(4, 6), mesh, ColwiseParallel())
    late.to_empty(device="cpu")
    nn.init.ones_(late.weight)  # type: ignore[arg-type]
    assert late.weight.shape == (6, 4) and late(x).shape == (3, 3)


def test_modules_with_several_names_and_plans_that_dont_fit(world: World) -> None:
    world.run(several_names, 2)


class Point(NamedTuple):
    x: Any
    y: Any


class Returns(nn.Module):
    """Its arguments, as `kind` makes them."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.scale = kind, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.kind(x * self.scale if type(x) is Tensor else x, mask)


def borders() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    x = torch.arange(6.0).view(3, 2)

    def made(kind: Any, style: ParallelStyle) -> nn.Module:
        return parallelize_module(Returns(kind), mesh, style)

    out = PrepareModuleOutput((Replicate(), None), (Shard(0), None), use_local_output=False)
    for kind in (Point, lambda *both: both, lambda *both: list(both)):
        found = made(kind, out)(x)
        assert type(found) is type(kind(1, 2)) and found[1] is None
        assert found[0].placements == (Shard(0),) and torch.equal(found[0].full_tensor(), x)
    with pytest.raises(InputError, match=r"result 0 of Returns is a dict"):
        made(lambda a, b: {"x": a}, PrepareModuleOutput(Replicate(), Shard(0)))(x)
    with pytest.raises(InputError, match=r"returns 1 values, its style describes 2"):
        made(lambda a, b: a, out)(x)
    with pytest.raises(InputError, match=r"argument 0 of Returns has 2 dims"):
        made(Point, PrepareModuleInput(Shard(2), Replicate()))(x)

    local = PrepareModuleInput(Shard(0), Replicate(), {"mask": Shard(0)}, {"mask": Replicate()}, use_local_output=True)
    given = made(Point, local)
    mine = x.chunk(2)[rank]
    assert type(given(mine).x) is Tensor and torch.equal(given(mine).x, x) and given(mine).y is None
    assert torch.equal(given(mine, mask=mine).y, x)
    with pytest.raises(InputError, match=r"gets 'mask' by position"):
        given(mine, mine)
    with pytest.raises(InputError, match=r"no argument 'masc'[\s\S]*it has x, mask"):
        made(Point, PrepareModuleInput(input_kwarg_layouts={"masc": None}, desired_input_kwarg_layouts={"masc": None}))(
            x
        )
    with pytest.raises(InputError, match=r"of lengths \[2, 1\]; it has \[1, 2\]"):  # on both ranks
        given(x[:1] if rank == 0 else x[1:])
    row = parallelize_module(nn.Linear(6, 4), mesh, RowwiseParallel())
    with pytest.raises(InputError, match=r"of lengths \[3, 3\]; it has 6[\s\S]*input_layouts=Replicate"):
        row(torch.randn(2, 6))  # not in parts
    plain = nn.Linear(2, 4)  # its own in_features say nothing of what comes out
    parallelize_module(plain, mesh, PrepareModuleOutput(Shard(-1), Replicate()))
    assert plain(x).shape == (3, 8)


def test_what_goes_in_and_out(world: World) -> None:
    world.run(borders, 2)


def test_a_pattern_that_fits_nothing_warns_at_the_call() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(nn.Linear(2, 2), Axis(), {"layers.*.up": ColwiseParallel()})  # type: ignore[arg-type]
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    (warning,) = caught
    assert "'layers.*.up'" in str(warning.message) and (warning.filename, warning.lineno) == (__file__, line)


class Axis:
    """A mesh of which nothing more is asked."""

    ndim = 1
