"""Compiled tensor parallel: what moves, how it lies, and what is refused. That it's exact: tests/test_oracle.py."""

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

import spmd
from spmd._torch import StridedShard
from spmd.errors import AgreementError, PlacementError, StateError
from spmd.graph.local import LocalGraph
from spmd.modes import (
    ColwiseParallel,
    DataParallelMode,
    PrepareModuleInput,
    RowwiseParallel,
    TensorParallelMode,
    compose,
    parallelize_module,
)
from tests import programs
from tests.oracle.plans import MLP, PLAN, SEQUENCE, Decoder
from tests.oracle.world import World

T = 6  # tokens a sample


def train(model: nn.Module, optim: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def program(plan: dict[str, Any], model: nn.Module, step: Any, *batch: Tensor, W: int = 2) -> LocalGraph:
    args = (model, torch.optim.SGD(model.parameters(), 0.1), *batch)
    return programs.first(TensorParallelMode(plan), step, args, W)


def moved(graph: LocalGraph, phase: str) -> list[tuple[str, int]]:
    """(collective, elements of its result) of activations."""
    return [
        (note.op, node.meta["val"].numel())
        for node in graph.graph.nodes
        if (note := node.meta.get("collective")) and note.role == "value" and node.meta["phase"] == phase
    ]


def pair(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor) -> Tensor:
    model(x).square().sum().backward()
    optim.step()
    optim.zero_grad()
    return x.sum()


def test_a_pair_of_linears_is_reduced_once_each_way() -> None:
    model = nn.Sequential(nn.Linear(8, 8), MLP(8, 16))  # something before it that needs a gradient
    plan = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    graph = program(plan, model, pair, torch.randn(5, 8))
    assert moved(graph, "forward") == moved(graph, "backward") == [("all_reduce", 40)]


def test_a_layer_is_reduced_twice_each_way(layers: int = 2) -> None:
    graph = program(PLAN, Decoder(layers=layers), train, torch.randint(0, 13, (5, T)))
    activation = 5 * T * 16
    forward, backward = (Counter(moved(graph, phase)) for phase in ("forward", "backward"))
    assert forward["all_reduce", activation] == 2 * layers + 1  # and the embedding's rows
    assert backward["all_reduce", activation] <= 2 * layers + 1  # and the head's


def test_along_the_sequence_each_reduction_is_a_gather_and_a_scatter(layers: int = 2) -> None:
    graph = program(SEQUENCE, Decoder(layers=layers), train, torch.randint(0, 13, (5, T)))
    activation = 5 * T * 16
    forward, backward = (Counter(moved(graph, phase)) for phase in ("forward", "backward"))
    assert forward["all_gather", activation] == forward["reduce_scatter", activation // 2] == 2 * layers + 1
    assert backward["all_gather", activation] == 2 * layers
    assert backward["reduce_scatter", activation // 2] == 2 * layers + 1
    assert not {op for op, n in (*forward, *backward) if n == activation and op == "all_reduce"}


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm = nn.Linear(8, 8), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(factor=2, x=self.inlet(x))


class Scaled(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: Tensor, factor: int) -> Tensor:
        return super().forward(x) * factor


def test_keyword_arguments_are_prepared_as_well() -> None:
    style = PrepareModuleInput(input_kwarg_layouts={"x": Replicate()}, desired_input_kwarg_layouts={"x": Shard(1)})
    graph = program({"norm": style}, ByKeyword(), pair, torch.randn(5, 6, 8))
    norm = next(n for n in graph.graph.nodes if "native_layer_norm.default" in str(n.target))
    assert norm.args[0].meta["val"].shape == (5, 3, 8)


def test_a_loss_over_a_split_vocabulary_moves_numbers_a_token_only() -> None:
    plan = {"head": ColwiseParallel()}
    graph = program(plan, Decoder(), train, torch.randint(0, 13, (5, T)))
    larger = [n for phase in ("forward", "backward") for _, n in moved(graph, phase) if n > 2 * 5 * T]
    assert larger == [5 * T * 16]  # the gradient of what the head reads
    assert not graph.fallbacks


@pytest.mark.parametrize(("vocabulary", "reduction"), [(13, "mean"), (3, "sum")])
def test_the_loss_over_a_split_vocabulary(world: World, vocabulary: int, reduction: str) -> None:
    world.run(weighted_loss, 4, vocabulary, reduction)


def weighted_loss(vocabulary: int, reduction: str) -> None:
    """Class weights, ignored tokens, and vocabularies that don't divide, or have fewer words than there are ranks."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    head = nn.Linear(4, vocabulary)
    same = copy.deepcopy(head)
    weight = torch.rand(vocabulary)

    def step(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(head(x), y, weight, ignore_index=1, reduction=reduction, label_smoothing=0.1)
        loss.backward()
        return loss.detach()

    x, y = torch.randn(6, 4), torch.randint(0, vocabulary, (6,))
    loss = spmd.compile(step, parallel_mode=TensorParallelMode(ColwiseParallel()))(head, x, y)
    torch.testing.assert_close(loss, step(same, x, y), rtol=1e-12, atol=1e-12)
    for p, q in zip(head.parameters(), same.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and p.grad.placements == (Shard(0),) and q.grad is not None
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12)


def eagerly_and_compiled() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    eager = Decoder()
    model = copy.deepcopy(eager)
    plan = {k: v for k, v in PLAN.items() if k != "head"}
    mesh = init_device_mesh("cpu", (2,))
    for layer in parallelize_module(eager, mesh, plan).layers:
        layer.attention.heads //= 2
    step = spmd.compile(train, parallel_mode=TensorParallelMode(plan))
    optims = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (eager, model)]
    for _ in range(3):
        tokens = torch.randint(0, 13, (3, T))
        torch.testing.assert_close(step(model, optims[1], tokens), train(eager, optims[0], tokens), rtol=1e-9, atol=0)
    for (fqn, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert isinstance(p, DTensor)
        if isinstance(q, DTensor):
            assert p.placements == q.placements, fqn
        torch.testing.assert_close(
            p.full_tensor(), q.full_tensor() if isinstance(q, DTensor) else q, rtol=1e-9, atol=1e-12
        )


def test_eager_and_compiled_are_the_same(world: World) -> None:
    world.run(eagerly_and_compiled, 2)


def two_axes() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, tensor = DataParallelMode("fully_shard", axis="dp"), TensorParallelMode(SEQUENCE, axis="tp")
    model = Decoder()
    keys = list(model.state_dict())
    step = spmd.compile(train, parallel_mode=compose(tensor, data), mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), 0.01)
    mine = torch.randint(0, 13, (4, T)).chunk(2)[mesh.get_local_rank("dp")]
    step(model, optim, mine)
    assert list(model.state_dict()) == keys
    lies = {fqn: p.placements for fqn, p in model.named_parameters() if isinstance(p, DTensor)}
    assert lies["token.weight"] == (Shard(1), Shard(0))  # 13 rows don't divide, so data parallel takes the columns
    up, down = lies["layers.0.mlp.up.weight"], lies["layers.0.mlp.down.weight"]
    assert up == (StridedShard(0, split_factor=2), Shard(0)) and down == (Shard(0), Shard(1))
    assert lies["norm.weight"] == (Shard(0), Replicate())
    assert optim.state[model.layers[0].mlp.up.weight]["exp_avg"].placements == up

    @spmd.compile(
        parallel_mode=compose(DataParallelMode("replicate", axis="dp"), TensorParallelMode({}, axis="tp")), mesh=mesh
    )
    def evaluate(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    evaluate(model, mine)
    assert {fqn: p.placements for fqn, p in model.named_parameters() if isinstance(p, DTensor)} == lies
    with pytest.raises(AgreementError, match=r"tokens[\s\S]*same share|same share[\s\S]*tokens"):
        step(model, optim, mine + mesh.get_local_rank("tp"))
    step(model, optim, mine)


def test_two_axes_share_the_parameters(world: World) -> None:
    world.run(two_axes, 4)


def another_mesh() -> None:
    """The parameters are DTensors on one axis of the mesh; the step wants both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["tp"], [Shard(0)])))
    mode = compose(DataParallelMode("fully_shard", axis="dp"), TensorParallelMode(ColwiseParallel(), axis="tp"))
    step = spmd.compile(pair, parallel_mode=mode, mesh=mesh)
    with pytest.raises(StateError, match=r"weight[\s\S]*one parallel mode, on one mesh"):
        step(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(2, 4))


def test_parameters_on_a_part_of_the_mesh_are_refused(world: World) -> None:
    world.run(another_mesh, 4)


def other_batches() -> None:
    torch.manual_seed(0)
    model = Decoder()
    step = spmd.compile(train, parallel_mode=TensorParallelMode(PLAN))
    with pytest.raises(AgreementError, match="same share of the batch"):
        step(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            torch.randint(0, 13, (3, T)) + 0 * dist.get_rank() + (dist.get_rank() == 1),
        )


def test_all_ranks_along_the_axis_pass_the_same_batch(world: World) -> None:
    world.run(other_batches, 2)


DP, TP = DataParallelMode(axis="dp"), TensorParallelMode({}, axis="tp")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: compose(DataParallelMode(), TP),
            'DataParallelMode in compose.. needs the name of its mesh axis: axis="dp"',
        ),
        (lambda: compose(DP, DP), "several modes for the axis 'dp'"),
        (lambda: compose(DP, DataParallelMode(axis="pp", input_batch_dim=1)), "split the batch on different dims"),
        (lambda: compose(DP, TP).over((2, 2), ("dp", "cp")), "TensorParallelMode is for the axis 'tp'"),
        (lambda: compose(DP, TP).over((2, 2, 2), ("dp", "cp", "tp")), "no mode of compose.. is for the mesh axis 'cp'"),
        (lambda: compose(DP, TP).over((2, 2), ("tp", "dp")), "axes that split the batch come first"),
        (lambda: DataParallelMode().over((2, 2), ("dp", "tp")), r"works on one mesh axis, the mesh has 2 \(dp, tp\)"),
        (lambda: DataParallelMode("hybrid_shard").over((4,)), "along another, the mesh has 1"),
    ],
)
def test_modes_that_dont_fit_the_mesh(make: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        make()
