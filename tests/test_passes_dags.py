"""Random programs of collectives, casts, views and compute, with stored state: every pass leaves what they compute."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd._torch import FakeTensorMode
from spmd._torch import c10d_functional as c10d
from spmd.graph.edit import call
from spmd.graph.local import Collective, LocalGraph, settle
from spmd.graph.step import Input, Output, Role, StepGraph
from spmd.graph.verify import verify_local, verify_ranks
from spmd.sharding.layout import R
from tests import programs

aten = torch.ops.aten
N = 6  # elements of every value; divides by 2 and 3
MOVES = ("all_reduce", "max", "gather", "scatter")
KINDS = ("add", "mul", "sin", "narrow", "wide", "view", "store", *MOVES)


@dataclass(frozen=True)
class Line:
    """One step of a program: its operands are earlier values, counted back."""

    kind: str
    a: int
    b: int
    role: int


lines = st.lists(
    st.builds(Line, st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)),
    min_size=4,
    max_size=24,
)


def build(code: list[Line], W: int) -> LocalGraph:
    """A program over three inputs, the last of them stored."""
    graph, fake = fx.Graph(), FakeTensorMode()
    names = ("x", "y", "state")
    values = []
    for name in names:
        values.append(graph.placeholder(name))
        with fake:
            values[-1].meta["val"] = torch.empty(N)
    handle = graph.placeholder("settle")
    graph.call_function(settle, (handle,)).meta["val"] = handle.meta["val"] = None
    state, new = values[2], None
    for i, line in enumerate(code):
        a, b = (values[-1 - k % len(values)] for k in (line.a, line.b))
        phase = "forward" if i < len(code) // 2 else "backward"
        if line.kind == "store":
            new = a
            continue
        values.append(emit(graph, line, a, b, W))
        for node in list(graph.nodes)[-8:]:
            node.meta.setdefault("phase", phase)
    stored = new is not None and new is not state
    kept = [call(graph, aten.clone.default, v) for v in values[-3:]]
    if stored:
        call(graph, aten.copy_.default, state, call(graph, aten.mul.Tensor, new, 2.0))
    graph.output((*kept, None))
    return LocalGraph(fx.GraphModule({}, graph), step(stored), ((R,),) * 3, ((R,),) * 4, (W,), (0,))


def emit(graph: fx.Graph, line: Line, a: fx.Node, b: fx.Node, W: int) -> fx.Node:
    if line.kind in ("add", "mul"):
        return call(graph, getattr(aten, line.kind).Tensor, a, b)
    if line.kind == "view":
        return call(graph, aten.view.default, call(graph, aten.view.default, a, [2, N // 2]), [N])
    if line.kind == "sin":
        return call(graph, aten.sin.default, a)
    if line.kind in ("narrow", "wide"):
        return call(graph, aten._to_copy.default, a, dtype=torch.float32 if line.kind == "wide" else torch.float64)
    if line.kind == "gather":
        part = call(graph, aten.slice.Tensor, a, 0, 0, N // W)
        return moved(
            graph, line, c10d.all_gather_into_tensor.default, call(graph, aten.contiguous.default, part), W, "0"
        )
    if line.kind == "scatter":
        part = moved(
            graph, line, c10d.reduce_scatter_tensor.default, call(graph, aten.contiguous.default, a), "sum", W, "0"
        )
        return call(graph, aten.cat.default, [part] * W)
    op = "max" if line.kind == "max" else "sum"
    return moved(graph, line, c10d.all_reduce.default, call(graph, aten.contiguous.default, a), op, "0")


def moved(graph: fx.Graph, line: Line, target: Any, x: fx.Node, *args: Any) -> fx.Node:
    node = call(graph, target, x, *args)
    role, fqn = (
        (
            ("param_gather", f"blocks.{line.role}.w")
            if line.kind == "gather"
            else ("grad_reduce", f"blocks.{line.role}.w")
        )
        if line.role
        else ("value", "")
    )
    node.meta["collective"] = Collective(role, line.kind, 0, x.name, fqn, 4 * N, "", "", "")
    return call(graph, c10d.wait_tensor.default, node)


def step(stored: bool) -> StepGraph:
    """The step graph behind it, as far as verifiers and inputs look at it."""
    graph = fx.Graph()
    x, y, state = (graph.placeholder(n) for n in ("x", "y", "state"))
    with FakeTensorMode():
        for node in (x, y, state):
            node.meta["val"] = torch.empty(N)
    new = graph.call_function(operator.neg, (state,)) if stored else state
    graph.output((x, x, x, new))
    inputs = (Input(Role.USER, "x"), Input(Role.USER, "y"), Input(Role.BUFFER, "state"))
    outputs = (*(Output(Role.USER, f"out{i}") for i in range(3)), Output(Role.BUFFER, "state", updates=2))
    return StepGraph(fx.GraphModule({}, graph), inputs, outputs)


PASSES = (
    "dedup",
    "bucket",
    "bucket{first_mb=0,cap_mb=0,gather_mb=0}",
    "overlap",
    "overlap{max_in_flight_mb=0}",
    "regather{keep_mb=0}",
    "fuse",
    "overlap,bucket,overlap",
    "dedup,regather{keep_mb=0},bucket,fuse,overlap{prefetch=3}",
)


@pytest.mark.parametrize("passes", PASSES)
@settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate)
)
@given(lines, st.sampled_from([2, 3]))
def test_random_programs_compute_the_same(passes: str, code: list[Line], W: int) -> None:
    plain, changed = ([build(code, W) for _ in range(W)] for _ in range(2))
    for graph in plain:
        verify_local(graph)
    expected = programs.results(plain)
    changed = programs.apply(passes, changed)
    verify_ranks(changed)
    for a, b in zip(expected, programs.results(changed), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
