"""DTensorExpandMode: DTensor's choices, Schemas, and Overrides of submodules. That it's exact: tests/test_oracle.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import spmd
from spmd.errors import InputError, PlacementError
from spmd.graph.local import LocalGraph
from spmd.modes import DataParallelMode, DTensorExpandMode, Override, ParallelMode, Schema, compose
from spmd.passes import PassPipeline
from tests import programs
from tests.oracle import steps


def mesh(*shape: int) -> DeviceMesh:
    """For Schemas alone: nothing communicates."""
    ranks = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)


train = steps.basic()


def program(mode: ParallelMode, model: nn.Module, *batch: Tensor, W: int = 2) -> LocalGraph:
    return programs.first(mode, train, (model, torch.optim.Adam(model.parameters(), 0.1), *batch), W)


def moved(graph: LocalGraph) -> list[tuple[str, str, str]]:
    return [(note.op, note.before, note.after) for note in graph.collectives if note.role in ("value", "param_gather")]


def test_of_a_large_weight_and_few_samples_dtensor_moves_the_samples() -> None:
    """Data parallel would gather the weight; DTensor counts bytes."""
    model, batch = nn.Linear(512, 1024), (torch.randn(2, 512), torch.randn(2, 1024))
    split = {"weight": Schema(mesh(2), [Shard(0)]), "bias": Schema(mesh(2), [Shard(0)])}
    expanded = moved(program(DTensorExpandMode(split), model, *batch))
    assert ("all_gather", "S(0)", "R") not in moved(program(DTensorExpandMode(), model, *batch))
    assert [
        c.tensor for c in program(DTensorExpandMode(split), model, *batch).collectives if c.role == "param_gather"
    ] == []
    assert expanded[0] == ("all_gather", "S(0)", "R")  # of x
    whole = program(DataParallelMode("fully_shard"), model, *batch)
    assert {c.tensor for c in whole.collectives if c.role == "param_gather"} == {"weight", "bias"}


def test_by_default_it_is_data_parallel() -> None:
    batch = torch.randn(3, 5), torch.randn(3, 2)
    notes = program(DTensorExpandMode(), nn.Linear(5, 2), *batch).collectives
    assert [(c.op, c.role) for c in notes] == [("all_reduce", "grad_reduce")] * 2 + [("all_reduce", "value")]


def test_states_lie_as_their_parameter_and_ties_share_a_schema() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    graph = program(
        DTensorExpandMode({"2.weight": Schema(mesh(2), [Shard(1)])}), model, torch.randn(3, 4), torch.randn(3, 4)
    )
    lies = {spec.name: str(places[0]) for spec, places in zip(graph.step.inputs, graph.inputs, strict=True) if places}
    assert lies["0.weight"] == lies["0.weight.exp_avg"] == lies["0.weight.exp_avg_sq"] == "S(1)"
    assert lies["0.weight.step"] == "R"


def refused(mode: Callable[[], Any], match: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(PlacementError, match=match):
        program(mode(), model, torch.randn(3, 4), torch.randn(3, 4))


def test_what_a_schema_may_say() -> None:
    refused(lambda: Schema(mesh(2), [Shard(0), Shard(1)]), "2 placements for a mesh of 1 axes")
    refused(lambda: Schema(mesh(2), [Partial()]), "not by P")
    refused(lambda: DTensorExpandMode({"0.weight": Schema(mesh(3), [Shard(0)])}), "for another mesh than")
    refused(
        lambda: DTensorExpandMode({"0.*": Schema(mesh(2), [Shard(1)])}),
        r"a dim that it doesn't have[\s\S]*tensor: 0\.bias",
    )
    axes = {"x": Schema(mesh(2, 2), [Shard(0), Replicate()]), "y": Schema(mesh(2, 2), [Replicate(), Shard(0)])}
    with pytest.raises(PlacementError, match="along different axes"):
        _ = DTensorExpandMode(inputs=axes).splits_batch
    with pytest.warns(
        UserWarning, match=r"'1\.weight' of the schemas matches no parameter or buffer; there are 0\.weight, 0\.bias"
    ):
        mode = DTensorExpandMode({"1.weight": Schema(mesh(2), [Shard(0)])})
        program(mode, nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4), torch.randn(3, 4))


# ---------------------------------------------------------------------------------------------- overrides


@torch.library.custom_op("spmd_test::stand_in", mutates_args=())
def stand_in(x: Tensor, w: Tensor) -> Tensor:
    raise AssertionError("transform takes it out")


@stand_in.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("spmd_test::stand_in_backward", mutates_args=())
def stand_in_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("transform takes it out")


@stand_in_backward.register_fake
def _(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


stand_in.register_autograd(
    lambda ctx, g: stand_in_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Scale(nn.Module):
    """Can't be captured as it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum().item() < 1e9 else x


class CallStandIn(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return stand_in(x, self.weight)


class Rescale(Override):
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.targets: list[str] = []
        self.modules: set[str] = set()  # in whose name they ran

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        self.seen.append(fqn)
        return CallStandIn(module.weight) if isinstance(module, Scale) else module

    def transform(self, graph: fx.GraphModule) -> fx.GraphModule:
        for node in list(graph.graph.nodes):
            if "stand_in" not in str(node.target):
                continue
            self.targets.append(str(node.target))
            self.modules.add(node.meta.get("module", ""))
            with graph.graph.inserting_before(node):
                if len(node.args) == 2:
                    new = graph.graph.call_function(torch.ops.aten.mul.Tensor, node.args)
                    node.replace_all_uses_with(new)
                else:
                    g, x, w = node.args
                    product = graph.graph.call_function(torch.ops.aten.mul.Tensor, (g, x))
                    found = (
                        graph.graph.call_function(torch.ops.aten.mul.Tensor, (g, w)),
                        graph.graph.call_function(torch.ops.aten.sum.dim_IntList, (product, [0])),
                    )
                    for user in list(node.users):
                        user.replace_all_uses_with(found[user.args[1]])
                        graph.graph.erase_node(user)
            graph.graph.erase_node(node)
        return graph


def test_an_override_stands_in_while_the_step_is_traced() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 2), Scale(), nn.Sequential(Scale())) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    override, batch = Rescale(), (torch.randn(3, 4), torch.randn(3, 2))
    step = spmd.compile(train, parallel_mode=DTensorExpandMode(overrides=(override,)))
    kept = [models[1][1], models[1][2][0]]
    optims = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for _ in range(2):
        plain, compiled = (f(m, o, *batch) for f, m, o in zip((train, step), models, optims, strict=True))
        torch.testing.assert_close(compiled, plain)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q, p)
    assert sorted(override.targets) == ["spmd_test.stand_in.default"] * 2 + ["spmd_test.stand_in_backward.default"] * 2
    assert [models[1][1], models[1][2][0]] == kept
    assert set(override.seen) == {"0", "1", "2", "2.0"} and override.modules == {"1", "2.0"}


class Own(Override):
    def replacement(self, fqn: str, module: nn.Module) -> Any:
        return nn.Linear(4, 2) if isinstance(module, nn.Linear) else 7 if isinstance(module, nn.ReLU) else module


def test_a_replacement_is_made_of_the_models_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    step = spmd.compile(train, parallel_mode=DTensorExpandMode(overrides=(Own(),)))
    batch = torch.randn(3, 4), torch.randn(3, 2)
    with pytest.raises(
        InputError, match=r"replacement has weight, bias[\s\S]*tensor: 0[\s\S]*replacement is no module[\s\S]*tensor: 1"
    ):
        step(model, torch.optim.SGD(model.parameters(), 0.1), *batch)
    assert isinstance(model[1], nn.ReLU)
    assert len(compose(DTensorExpandMode(overrides=(Own(),), axis="dp")).overrides) == 1


class Quiet(DataParallelMode):
    def passes(self) -> PassPipeline:
        return PassPipeline.parse("dedup")


def test_a_mode_names_the_passes_that_default_stands_for() -> None:
    assert str(spmd.compile(train, parallel_mode=Quiet()).passes) == "dedup"
    assert str(spmd.compile(train, parallel_mode=Quiet(), passes=["default"]).passes) == "dedup"
    assert str(spmd.compile(train, parallel_mode=Quiet(), passes="none").passes) == "none"
