"""Modes by name, plugins' modes, and what a mode tells of its choices."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import spmd
from spmd.cost import Device, Link, compute_seconds, device_of, link_of, seconds, work
from spmd.errors import PlacementError
from spmd.modes import DataParallelMode, registry
from spmd.report.explain import Explanation
from tests import programs
from tests.conftest import SAMPLE
from tests.oracle import steps
from tests.oracle.world import World
from tests.parts import rand, step_graph

aten = torch.ops.aten


def test_names(plugin: Path) -> None:
    assert registry.mode("zero2") == DataParallelMode("zero2")
    assert type(registry.mode("split_tables")).__name__ == "SplitTables"
    with pytest.raises(
        PlacementError, match=r"no parallel mode is called 'fully_shared'[\s\S]*did you mean 'fully_shard'"
    ):
        spmd.compile(lambda: None, parallel_mode="fully_shared")
    assert (
        '[project.entry-points."spmd.modes"]\nsplit_tables = "spmd_sample_mode:SplitTables"'
        in (SAMPLE / "pyproject.toml").read_text()
    )


def test_names_taken_twice_and_what_is_no_mode(plugin: Path) -> None:
    (plugin / "entry_points.txt").write_text("[spmd.modes]\nzero1 = spmd_sample_mode:SplitTables\n")
    with pytest.raises(PlacementError, match=r"two modes are called 'zero1'[\s\S]*spmd-sample"):
        registry.mode("replicate")
    (plugin / "entry_points.txt").write_text("[spmd.modes]\nother = builtins:list\n")
    with pytest.raises(PlacementError, match="is no ParallelMode"):
        registry.mode("other")


def test_a_plugins_mode_is_short() -> None:
    assert len((SAMPLE / "spmd_sample_mode.py").read_text().splitlines()) <= 40


train = steps.basic()


def split_tables() -> None:
    sys.path.insert(0, str(SAMPLE))
    from spmd_sample_mode import SplitTables

    torch.set_default_dtype(torch.float64)
    models = []
    words, y = torch.randint(0, 11, (6,)), torch.randn(6, 3)
    for mode in (None, SplitTables(rows=10)):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3)))
        optim = torch.optim.Adam(models[-1].parameters(), 0.1)
        step = train if mode is None else spmd.compile(train, parallel_mode=mode)
        rank = torch.distributed.get_rank()
        batch = (words, y) if mode is None else (words.chunk(2)[rank], y.chunk(2)[rank])
        for _ in range(3):
            step(models[-1], optim, *batch)
    placements = []
    for p, q in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert isinstance(p, DTensor)
        placements.append(p.placements)
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-9, atol=1e-12)
    assert placements == [(Shard(0),), (Replicate(),), (Replicate(),)]


def test_a_plugins_mode_is_exact(world: World) -> None:
    torch.manual_seed(3)
    world.run(split_tables, 2)


def test_the_default_style_says_why_a_parameter_stays_whole() -> None:
    model = nn.Sequential(nn.Embedding(300, 400), nn.Linear(400, 2))
    model.scale = nn.Parameter(torch.tensor(2.0))
    optim = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randint(0, 300, (4,)), torch.randn(4, 2)

    def scaled(model: nn.Module, optim: torch.optim.Optimizer, words: Tensor, y: Tensor) -> Tensor:
        return train(model, optim, words, y) * model.scale.detach()

    def found(**options: int) -> dict[str, tuple[str, str]]:
        mode = DataParallelMode("default", **options)
        explanation = Explanation.of(programs.first(mode, scaled, (model, optim, *batch), 3))
        assert "reason" in str(explanation)
        return {p.name: (p.layout, p.reason) for p in explanation.placements if p.role == "parameter"}

    chosen = found()
    assert chosen["0.weight"] == ("S(0)", "")
    assert chosen["1.weight"][0] == "R" and "fewer than 40000 elements: a gather would take" in chosen["1.weight"][1]
    small = found(min_numel=1)
    assert small["scale"] == ("R", "no dim has 3 rows")
    assert small["1.weight"] == ("S(1)", "") and small["1.bias"] == ("R", "no dim has 3 rows")


def test_costs() -> None:
    """The alpha-beta model by hand: a ring of 4, 8 bytes a second, 1 second to start."""
    link = Link(1.0, 8.0)
    assert seconds("all_gather", 64, 4, link) == 3 * (1 + 16 / 8)
    assert seconds("all_reduce", 64, 4, link) == 2 * seconds("reduce_scatter", 64, 4, link)
    assert seconds("all_gather", 64, 1, link) == 0
    assert link_of("cuda").bandwidth > link_of("cpu").bandwidth


def test_a_roofline() -> None:
    """By hand: a product of [3, 8] and [8, 4] is 192 operations on 68 numbers; a sum of [3, 4] with itself reads and writes 24; a view is free."""
    graph = step_graph(lambda a, b: (torch.mm(a, b) + torch.mm(a, b)).view(12), (rand(3, 8), rand(8, 4))).graph
    costs = [work(node) for node in graph.nodes if node.op == "call_function"]
    assert costs == [(192, 8 * 68)] * 2 + [(12, 8 * 36), (0, 0)]
    assert compute_seconds(graph, Device(1.0, 1e9, {torch.float64: 2.0})) == 2 * 96 + 6
    assert compute_seconds(graph, Device(1e9, 8.0)) == 2 * 68 + 36
    q, k = rand(2, 3, 5, 8), rand(2, 3, 7, 8)
    attend = step_graph(lambda *x: aten._scaled_dot_product_flash_attention_for_cpu.default(*x)[0], (q, k, k)).graph
    assert max(work(node)[0] for node in attend.nodes) == 2 * 2 * 6 * 5 * 7 * 8  # two products for each of 6 heads
    assert device_of("cuda").rate(torch.bfloat16) > device_of("cuda").rate(torch.float32)


def test_the_guides_code_runs() -> None:
    """A mode and a style of one's own, as docs/modes.md has them."""
    import spmd.modes as modes
    from spmd.graph.step import Role
    from spmd.sharding.constraints import Constraints
    from spmd.sharding.layout import R, shard

    text = (Path(__file__).parents[1] / "docs" / "modes.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python")[1:]]
    names = {**vars(modes), **vars(torch.distributed.tensor), "dataclass": dataclass, "torch": torch}
    names |= {"Role": Role, "Constraints": Constraints, "R": R, "shard": shard}
    for block in (b for b in blocks if "class " in b):
        exec("from __future__ import annotations\n" + block, names)
    assert names["SplitTable"]().describe(nn.Linear(2, 2)).parameters == {"table": Shard(0)}
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 3))
    args = (model, torch.optim.SGD(model.parameters(), 0.1), torch.randint(0, 9, (2,)), torch.randn(2, 3))
    local = programs.first(names["SplitTables"](), train, args, 2)
    assert [str(x[0]) for x in local.inputs[:3] if x] == ["S(0)", "R", "R"]
