"""The programs of all ranks in one process, with inputs to run them on in lockstep: what the tests of passes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from spmd.api import local_graph
from spmd.capture import capture
from spmd.debug import run_lockstep
from spmd.graph.axis import Mesh
from spmd.graph.local import LocalGraph
from spmd.graph.step import STORED, Role
from spmd.modes import DataParallelMode, ParallelMode
from spmd.passes import PassPipeline
from spmd.sharding.layout import R


def ranks(W: int, names: tuple[str, ...] = ()) -> list[Mesh]:
    """The mesh as each of W ranks sees it, where nothing runs."""
    return [Mesh((W,), (r,), ("0",), names) for r in range(W)]


def first(mode: ParallelMode, step: Callable[..., Any], args: tuple[Any, ...], W: int, *names: str) -> LocalGraph:
    """What the first of W ranks would run without passes; tensors among `args` are its share of the batch."""
    (along,) = mode.over((W,), names)
    shares = W if along.splits_batch else 1
    captured = capture(step, args, global_batch=lambda samples: samples * shares)
    samples = next(x.shape[0] for x in args if isinstance(x, Tensor))
    return local_graph(captured.step, captured, samples * shares, mode, ranks(W, names)[0])


def programs(step: Callable[..., Any], args: tuple[Any, ...], style: str, W: int) -> list[LocalGraph]:
    """What each rank would run without passes; tensors among `args` are one rank's share."""
    captured = capture(step, args, global_batch=lambda samples: samples * W)
    samples = next(x.shape[0] for x in args if isinstance(x, Tensor))
    return [local_graph(captured.step, captured, samples * W, DataParallelMode(style), rank) for rank in ranks(W)]


def inputs(graphs: list[LocalGraph], high: int = 3) -> list[list[Any]]:
    """Inputs for each rank: what's replicated is equal on all of them. Integers are below `high`; counters are 1."""
    found: list[list[Any]] = [[] for _ in graphs]
    for rank, graph in enumerate(graphs):
        placeholders = graph.graph.find_nodes(op="placeholder", sort=True)
        for i, (spec, layouts) in enumerate(zip(graph.step.inputs, graph.inputs, strict=True)):
            val = placeholders[i].meta["val"]
            generator = torch.Generator().manual_seed(1000 * i + (0 if layouts == (R,) else rank))
            if not isinstance(val, Tensor):
                found[rank].append(0.1)
            elif val.dtype.is_floating_point:
                value = torch.rand(val.shape, generator=generator, dtype=val.dtype)
                found[rank].append(torch.ones_like(value) if spec.role is Role.STATE and not val.dim() else value)
            else:
                found[rank].append(torch.randint(0, high, val.shape, generator=generator))
    return found


def results(graphs: list[LocalGraph]) -> list[Any]:
    """What all ranks return, and what they store."""
    given = inputs(graphs)
    returned = run_lockstep(graphs, given)
    stored = [
        x
        for rank, graph in zip(given, graphs, strict=True)
        for x, spec in zip(rank, graph.step.inputs, strict=True)
        if spec.role in STORED
    ]
    return [*(x for rank in returned for x in rank), *stored]


def apply(passes: Any, graphs: list[LocalGraph]) -> list[LocalGraph]:
    pipeline = PassPipeline.of(passes)
    return [pipeline.run(graph) for graph in graphs]


def copied(graph: LocalGraph) -> LocalGraph:
    """A program of its own; values in its metadata are shared."""
    new = fx.Graph()
    new.output(new.graph_copy(graph.graph, {}))
    return replace(graph, module=fx.GraphModule(graph.module, new))
