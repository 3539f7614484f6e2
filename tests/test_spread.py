"""Expert and context parallel: what moves, what is refused, and experts eagerly. That they are exact when compiled: tests/test_oracle.py."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from spmd.errors import PlacementError
from spmd.graph.local import LocalGraph
from spmd.modes import (
    ContextParallel,
    DataParallelMode,
    ExpertParallel,
    ParallelMode,
    TensorParallelMode,
    compose,
    parallelize_module,
)
from tests import programs
from tests.oracle import steps
from tests.oracle.plans import CONTEXT, EXPERTS, HEADS, Decoder, Experts, Mixture, sequences, words
from tests.oracle.world import World


def program(mode: ParallelMode, model: nn.Module, step: Any, batch: tuple[Tensor, ...], W: int) -> LocalGraph:
    return programs.first(mode, step, (model, torch.optim.SGD(model.parameters(), 0.1), *batch), W, "dp")


def moved(graph: LocalGraph) -> Counter[str]:
    """Activations that move, but for sums of a few numbers."""
    return Counter(note.op for note in graph.collectives if note.role == "value" and note.op != "all_reduce")


@pytest.mark.parametrize("W", [2, 3])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(W: int, layers: int = 2) -> None:
    graph = program(TensorParallelMode(CONTEXT), Decoder(layers=layers), steps.basic(steps.tokens), words(2), W)
    assert moved(graph) == {"all_gather": 2 * layers, "reduce_scatter": 2 * layers}
    assert not graph.fallbacks


def test_heads_are_exchanged_for_the_sequence(layers: int = 2) -> None:
    graph = program(TensorParallelMode(HEADS), Decoder(layers=layers), steps.basic(steps.tokens), words(2), 2)
    assert moved(graph) == {"all_to_all": 8 * layers}  # queries, keys, values and the result, and their gradients
    assert not graph.fallbacks


@pytest.mark.parametrize(("style", "others"), [("replicate", 0), ("fully_shard", 4)])
def test_tokens_go_to_their_experts_and_back(style: str, others: int) -> None:
    mode = compose(DataParallelMode(style, axis="dp"), TensorParallelMode(EXPERTS, axis="dp"))
    graph = program(mode, Mixture(), steps.basic(), sequences(2), 3)
    assert Counter(note.op for note in graph.collectives)["all_to_all"] == 4
    gathered = {note.fqn for note in graph.collectives if note.role == "param_gather"}
    assert len(gathered) == others and not {name for name in gathered if name.startswith("experts")}
    reduced = {note.fqn for note in graph.collectives if note.role == "grad_reduce"}
    assert reduced == {
        "inlet.weight",
        "inlet.bias",
        "router.weight",
        "router.bias",
    }  # an expert's gradient is whole where it is
    lies = {spec.name: str(places[0]) for spec, places in zip(graph.step.inputs, graph.inputs, strict=True) if places}
    assert lies["experts.up"] == lies["experts.down"] == "S(0)"
    assert lies["inlet.weight"] == ("R" if style == "replicate" else "S(0)")


def test_what_is_refused() -> None:
    with pytest.raises(
        PlacementError,
        match=r"ExpertParallel is for modules whose own parameters are stacked by expert, not for Linear",
    ):
        ExpertParallel().describe(nn.Linear(3, 4))
    with pytest.raises(PlacementError, match="ContextParallel compiles"):
        ContextParallel().apply(nn.Linear(3, 4), None)  # type: ignore[arg-type]
    for twice in (DataParallelMode, lambda axis: TensorParallelMode(EXPERTS, axis=axis)):
        with pytest.raises(PlacementError, match="several modes for the axis 'dp'"):
            compose(twice(axis="dp"), twice(axis="dp"))


def experts_eagerly() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, x = Experts(5, 4, 6), torch.randn(5, 2 * ranks, 4)
    mesh = init_device_mesh("cpu", (ranks,))
    for style in (ExpertParallel(), ExpertParallel(input_layouts=Replicate())):
        module = parallelize_module(copy.deepcopy(whole), mesh, style)
        mine, same = x.chunk(ranks, 1)[rank] if style == ExpertParallel() else x, x.clone().requires_grad_()
        mine = mine.clone().requires_grad_()
        out, expected = module(mine), whole(same)
        out.square().sum().backward()
        expected.square().sum().backward()
        if style == ExpertParallel():
            torch.testing.assert_close(out, expected.chunk(ranks, 1)[rank])
            torch.testing.assert_close(mine.grad, same.grad.chunk(ranks, 1)[rank])
        else:
            torch.testing.assert_close(out, expected)
        for p, q in zip(module.parameters(), whole.parameters(), strict=True):
            if style == ExpertParallel():
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        whole.zero_grad()


def test_experts_eagerly(world: World) -> None:
    world.run(experts_eagerly, 2)
