"""Several mesh axes: what one axis moves, the others cut through."""

from __future__ import annotations

import itertools

import pytest
import torch

from spmd.debug import run_lockstep
from spmd.graph.axis import Axis
from spmd.graph.step import StepGraph
from spmd.sharding.constraints import Constraints
from spmd.sharding.layout import Layout, Partial, R, Sharded, join, shard
from spmd.sharding.partition import divide, partition
from spmd.sharding.plan import Choice, Plan
from spmd.sharding.propagate import propagate
from spmd.sharding.rule import Call
from spmd.sharding.sources import rule_for
from tests.parts import pieces, rand, step_graph

aten = torch.ops.aten


def moved(step: StepGraph, a: Layout, b: Layout, ranks: int) -> Plan:
    """A plan that does nothing but bring the only input from `a` to `b`."""
    node = next(n for n in step.graph.nodes if n.op == "call_function")
    plan = Plan(ranks, layouts={step.placeholders[0]: a, node: a}, outputs=[b])
    plan.choices = {node: Choice(Call(node), rule_for(Call(node)), [a], [a])}
    return plan


def layouts_of(rows: int, columns: int) -> list[Layout]:
    strided = [Sharded(1, 2, columns // 2, 1), Sharded(1, 1, columns // 2, 2)]
    return [R, Partial(), shard(0, rows), shard(1, columns), *strided]


@pytest.mark.parametrize(
    ("mesh", "shape", "split"),
    [
        *(((2, 2), (12, 8), split) for split in (0, 1, "sum")),
        *(((5, 2), (12, 12), split) for split in (0, 1)),  # uneven along the first axis
        *(((2, 3), (12, 12), split) for split in (0, 1)),
        *(((2, 2), (7, 8), split) for split in (1, "sum")),  # uneven along the last
    ],
)
def test_what_a_later_axis_moves_the_first_one_cuts_through(
    mesh: tuple[int, int], shape: tuple[int, int], split: int | str
) -> None:
    """From every layout to every other along the last axis, with a dim, or a sum, split over the first: the joined parts are the tensor that was there."""
    first, later = mesh
    x = (rand(*shape) * 10).round()
    for a, b in itertools.permutations(layouts_of(*shape), 2):
        if isinstance(b, Partial):
            continue
        step = step_graph(lambda t: aten.alias.default(t), (x,))
        plan = moved(step, a, b, later)
        programs, layouts = [], []
        for i, j in itertools.product(range(first), range(later)):
            part = divide(step, plan, Axis(later, j, "1", 1))
            one, end = (
                (R if k else Partial()) if isinstance(split, str) else shard(split, node.meta["val"].shape[split])
                for k, node in enumerate((part.placeholders[0], part.results[0]))
            )
            chosen = propagate(part, Constraints((one,), (end,)), first)
            programs.append(partition(part, chosen, Axis(first, i, "0", 0)))
            programs[-1].mesh_shape, programs[-1].coordinate = mesh, (i, j)
            layouts.append((one, end))
        along_last = pieces(x, a, later)
        cut = [pieces(along_last[j], layouts[j][0], first) for j in range(later)]
        inputs = [[cut[j][i]] for i, j in itertools.product(range(first), range(later))]
        outputs = [y for (y,) in run_lockstep(programs, inputs)]
        joined = [join([outputs[i * later + j] for i in range(first)], layouts[j][1]) for j in range(later)]
        torch.testing.assert_close(join(joined, b), x, rtol=0, atol=0, msg=f"{a} -> {b}")
