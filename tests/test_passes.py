"""The contract of passes: specs, order, the registry and plugins, what a run records, and what the compiler does with it."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.nn import functional as F

import spmd
from spmd.errors import PassError
from spmd.graph.local import LocalGraph
from spmd.passes import Adapted, Bucket, Dedup, Fuse, GraphPass, Numerics, Overlap, PassPipeline, Regather, registry
from tests import programs
from tests.conftest import SAMPLE
from tests.oracle import tools
from tests.oracle.world import World


def train(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture(scope="module")
def graph() -> LocalGraph:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return programs.programs(
        train, (model, optim.SGD(model.parameters(), 0.1), torch.rand(2, 4), torch.rand(2, 2)), "fully_shard", 2
    )[0]


# ---- specs


def test_a_spec_makes_passes_and_they_make_it() -> None:
    text = "dedup,bucket{cap_mb=10,first_mb=0.5},overlap{prefetch=2}"
    pipeline = PassPipeline.parse(
        " dedup , bucket{ cap_mb = 10, first_mb=.5 },overlap{max_in_flight_mb=512,prefetch=2}"
    )
    assert pipeline == PassPipeline((Dedup(), Bucket(cap_mb=10.0, first_mb=0.5), Overlap(prefetch=2)))
    assert str(pipeline) == text and PassPipeline.parse(text) == pipeline
    assert str(PassPipeline()) == "none" and PassPipeline.parse("none") == PassPipeline()


@given(
    st.permutations([Dedup(), Fuse(small_kb=2.5), Overlap(), Bucket(gather_mb=0.0)]),
    st.floats(0.001, 1e6),
    st.integers(0, 9),
)
def test_specs_round_trip(passes: list[GraphPass], mb: float, count: int) -> None:
    pipeline = PassPipeline((Regather(keep_mb=float(f"{mb:g}")), *passes[: count % 5]))
    assert PassPipeline.parse(str(pipeline)) == pipeline


def test_default_stands_for_the_usual_passes_and_can_be_changed() -> None:
    usual = PassPipeline.parse("default")
    assert [p.name for p in usual.passes] == list(registry.DEFAULT)
    changed = PassPipeline.parse("default,-overlap,bucket{cap_mb=5}")
    assert [p.name for p in changed.passes] == [n for n in registry.DEFAULT if n != "overlap"]
    assert Bucket(cap_mb=5.0) in changed.passes


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bukcet", "did you mean 'bucket'"),
        ("bucket{cap=3}", "no option 'cap'"),
        ("bucket{cap_mb=big}", "isn't of type float"),
        ("overlap{prefetch=1.5}", "isn't of type int"),
        ("dedup,bucket{cap_mb=3", "can't be read from 'bucket{cap_mb=3'"),
        ("dedup;bucket", "can't be read from"),
        ("-bucket", "isn't in it"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(spec: str, words: str) -> None:
    with pytest.raises(PassError, match=words):
        PassPipeline.parse(spec)


def test_the_environment_stands_above_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_PASSES", "default,-dedup")
    assert spmd.compile(train, passes="dedup,bucket").passes == PassPipeline((Bucket(),))
    monkeypatch.setenv("SPMD_PASSES", "none")
    assert spmd.compile(train).passes == PassPipeline()


# ---- order


@dataclass(frozen=True)
class Sort(GraphPass):
    name = "sort"
    provides = frozenset({"sorted"})

    def run(self, graph: LocalGraph) -> LocalGraph:
        return graph


@dataclass(frozen=True)
class Search(Sort):
    name = "search"
    requires = frozenset({"sorted"})
    provides = frozenset()


@dataclass(frozen=True)
class Shuffle(Sort):
    name = "shuffle"
    invalidates = frozenset({"sorted"})
    provides = frozenset()


def test_the_order_is_checked() -> None:
    PassPipeline((Sort(), Search(), Shuffle()))
    with pytest.raises(PassError, match=r"'search' lacks 'sorted'\n.*put a pass before it that provides"):
        PassPipeline((Search(), Sort()))
    with pytest.raises(
        PassError, match=r"'search' lacks 'sorted', which 'shuffle' ends\n.*put 'search' before 'shuffle'"
    ):
        PassPipeline((Sort(), Shuffle(), Search()))
    with pytest.raises(PassError, match="'regather' lacks 'separate', which 'bucket' ends"):
        PassPipeline.parse("bucket,regather")


# ---- runs


def test_a_run_records_what_each_pass_did(graph: LocalGraph) -> None:
    seen: list[str] = []
    pipeline = PassPipeline.parse("dedup,bucket")
    first = pipeline.run(programs.copied(graph), lambda p, _: seen.append(p.name))
    second = pipeline.run(programs.copied(graph))
    assert seen == ["dedup", "bucket"] and str(first) == str(second)
    start, dedup, bucket = first.history
    assert (start.name, dedup.name, bucket.name) == ("partition", "dedup", "bucket")
    assert bucket.nodes == (dedup.nodes[1], len(first.graph.nodes)) and bucket.seconds > 0
    assert bucket.collectives == (len(graph.collectives), len(first.collectives))
    assert not bucket.diff and [r.digest for r in first.history] == [r.digest for r in second.history]


def test_diffs_on_request(graph: LocalGraph) -> None:
    diff = PassPipeline((Bucket(),), diffs=True).run(programs.copied(graph)).history[-1].diff
    assert any(line.startswith("-reduce_scatter_tensor_default") for line in diff.splitlines())
    assert any(line.startswith("+cat_default") for line in diff.splitlines())


def test_any_rewrite_of_a_graph_module_is_a_pass(graph: LocalGraph) -> None:
    def doubled_twice(module: fx.GraphModule) -> fx.GraphModule:
        (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
        with module.graph.inserting_after(node):
            half = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5))
        with module.graph.inserting_after(half):
            whole = module.graph.call_function(torch.ops.aten.mul.Tensor, (half, 2.0))
        node.replace_all_uses_with(whole, delete_user_cb=lambda u: u is not half)
        return module

    pipeline = PassPipeline.of(["dedup", doubled_twice, Bucket()])
    assert [p.name for p in pipeline.passes] == ["dedup", "doubled_twice", "bucket"]
    assert pipeline.passes[1] == Adapted(doubled_twice) and pipeline.passes[1].numerics is Numerics.ROUNDING
    text = str(pipeline.run(programs.copied(graph)))
    assert "aten.mul.Tensor(tanh_default, 0.5)" in text
    with pytest.raises(PassError, match="is no pass"):
        PassPipeline.of([3])


def test_a_pass_that_fails_is_named(graph: LocalGraph) -> None:
    def fails(module: fx.GraphModule) -> None:
        raise KeyError("lost")

    with pytest.raises(PassError, match="pass 'fails' failed: KeyError: 'lost'"):
        PassPipeline.of([fails]).run(programs.copied(graph))


# ---- plugins


def test_a_plugin_is_found_by_its_entry_point(plugin: Path, graph: LocalGraph) -> None:
    pipeline = PassPipeline.parse("fold_scale{limit=3},bucket")
    assert str(pipeline) == "fold_scale{limit=3},bucket"
    assert pipeline.run(programs.copied(graph)).history[1].name == "fold_scale"


def test_a_plugin_installs_with_pip(tmp_path: Path) -> None:
    """Its pyproject declares what the fixture installs."""
    text = (SAMPLE / "pyproject.toml").read_text()
    assert '[project.entry-points."spmd.passes"]\nfold_scale = "spmd_sample:FoldScale"' in text


def test_a_name_taken_twice_is_refused(plugin: Path) -> None:
    (plugin / "entry_points.txt").write_text("[spmd.passes]\nbucket = spmd_sample:FoldScale\n")
    with pytest.raises(PassError, match="two passes are called 'bucket'"):
        PassPipeline.parse("dedup")


def test_an_entry_point_must_be_a_pass_of_its_name(plugin: Path) -> None:
    (plugin / "entry_points.txt").write_text("[spmd.passes]\nother = spmd_sample:FoldScale\nnumber = math:pi\n")
    with pytest.raises(PassError, match="calls itself 'fold_scale', its entry point 'other'"):
        PassPipeline.parse("other")
    with pytest.raises(PassError, match="is no dataclass derived from GraphPass"):
        PassPipeline.parse("number")


def test_the_command_lists_all() -> None:
    run = subprocess.run([sys.executable, "-m", "spmd", "passes"], capture_output=True, text=True, check=True)
    for name in registry.OWN:
        assert name in run.stdout
    assert ",".join(registry.DEFAULT) in run.stdout


# ---- in the compiler


def test_explain_tells_what_the_passes_did(world: World) -> None:
    for text in world.run(_explained, 2):
        assert "bucket" in text and "passes" in text


def _explained() -> str:
    step = tools.compile(tools.train)
    explanation = step.explain(*tools.setup(), *tools.batch())
    assert [p.name for p in explanation.passes] == list(registry.DEFAULT)
    assert explanation.counts()["grad_reduce"] == 1
    return str(explanation)


def test_a_pass_that_makes_the_ranks_differ_is_named(world: World) -> None:
    for message in world.run(_differs, 2):
        assert "differ first at node" in message and "equal before the pass 'by_rank'" in message


def _differs() -> str:
    from spmd.errors import AgreementError
    from tests.oracle import world as ranks

    def by_rank(module: fx.GraphModule) -> fx.GraphModule:
        (node, *_) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
        with module.graph.inserting_after(node):
            scaled: Any = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.0 + ranks.rank()))
        node.replace_all_uses_with(scaled, delete_user_cb=lambda u: u is not scaled)
        return module

    with pytest.raises(AgreementError) as caught:
        tools.compile(tools.train, passes=["dedup", by_rank, "bucket"])(*tools.setup(), *tools.batch())
    return str(caught.value)
