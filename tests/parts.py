"""Small step graphs, run on all ranks in one process: what the tests of rules, decompositions and redistributions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from spmd._torch import make_fx
from spmd.debug import run_lockstep
from spmd.graph.axis import Axis
from spmd.graph.step import Input, Output, Role, StepGraph
from spmd.sharding.layout import Layout, Partial, take
from spmd.sharding.partition import partition
from spmd.sharding.plan import Plan

F64 = torch.float64


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def step_graph(fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> StepGraph:
    module = make_fx(fn, tracing_mode="fake")(*args)
    results = tree_leaves(module.graph.output_node().args[0])
    module.graph.output_node().args = (tuple(results),)
    inputs = tuple(Input(Role.USER, f"x{i}") for i in range(len(args)))
    return StepGraph(module, inputs, tuple(Output(Role.USER, f"y{i}") for i in range(len(results))))


def run(step: StepGraph, plan: Plan, world: int, args: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
    graphs = [partition(step, plan, Axis(world, r, "0")) for r in range(world)]
    places = [plan.layouts[ph] for ph in step.placeholders]
    parts = [pieces(x, p, world) for x, p in zip(args, places, strict=True)]
    return run_lockstep(graphs, [[x[r] for x in parts] for r in range(world)])


def pieces(x: torch.Tensor, layout: Layout, world: int) -> list[torch.Tensor]:
    """Each rank's part; summands that are all unlike the whole, and whole numbers, so that a sum of few bits stays exact."""
    if layout == Partial() and x.is_floating_point() and x.itemsize > 1:
        first = [torch.randint(-9, 10, x.shape).to(x.dtype) for _ in range(world - 1)]
        return [*first, x - sum(first)]
    return [take(x, layout, world, r).contiguous() for r in range(world)]
