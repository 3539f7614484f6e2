"""Styles and plans: what they say, and what they refuse. One process."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import style as torchs

from spmd.errors import PlacementError
from spmd.modes import (
    ColwiseParallel,
    Description,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    TensorParallelMode,
)
from spmd.modes.plan import matches, patterns, read

LINEAR, TABLE, NORM = nn.Linear(4, 6), nn.Embedding(8, 4), nn.LayerNorm(4)
STYLES: list[Any] = [
    ColwiseParallel(output_layouts=Replicate()),
    RowwiseParallel(Replicate(), Shard(1), use_local_output=False),
    SequenceParallel(2),
    PrepareModuleInput([Shard(1), None], [Replicate(), None], {"mask": Shard(0)}, {"mask": Replicate()}),
    PrepareModuleOutput(Shard(0), Replicate()),
    PrepareModuleInputOutput(Shard(1), Replicate(), output_layouts=Shard(0), desired_output_layouts=Replicate()),
]


@pytest.mark.parametrize(
    ("style", "module", "parameters", "output"),
    [
        (ColwiseParallel(), LINEAR, {"weight": Shard(0), "bias": Shard(0)}, (Shard(-1), Shard(-1))),
        (ColwiseParallel(output_layouts=Replicate()), TABLE, {"weight": Shard(1)}, (Shard(-1), Replicate())),
        (RowwiseParallel(), LINEAR, {"weight": Shard(1), "bias": Replicate()}, (Partial(), Replicate())),
        (RowwiseParallel(output_layouts=Shard(1)), TABLE, {"weight": Shard(0)}, (Partial(), Shard(1))),
        (SequenceParallel(), NORM, {"weight": Replicate(), "bias": Replicate()}, (Shard(1), Shard(1))),
    ],
)
def test_what_a_style_says(style: ParallelStyle, module: nn.Module, parameters: Any, output: Any) -> None:
    found = style.describe(module)
    assert found.parameters == parameters
    assert (found.outputs, found.desired_outputs) == ((output[0],), (output[1],))


@pytest.mark.parametrize("style", STYLES, ids=lambda style: type(style).__name__)
def test_styles_are_values(style: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        style.use_local_output = True
    same = eval(repr(style))  # what's printed can be pasted
    assert same == style and hash(same) == hash(style) and len({same, style}) == 1
    assert pickle.loads(pickle.dumps(style)) == style == copy.deepcopy(style) == replace(style)


def test_layouts_are_none_by_default() -> None:
    for kind in map(type, STYLES):
        for option in fields(kind):
            assert not isinstance(option.default, Placement)
            if option.name.endswith("_layouts"):
                assert option.default in (None, ())


def test_a_style_doesnt_see_later_changes_of_what_it_was_given() -> None:
    has, wants, by_name = [Shard(1)], [Replicate()], {"mask": Shard(0)}
    style = PrepareModuleInput(has, wants, by_name, {"mask": None})
    has.append(Shard(0))  # type: ignore[arg-type]
    by_name["other"] = Shard(0)
    assert style == PrepareModuleInput(Shard(1), Replicate(), {"mask": Shard(0)}, {"mask": None})
    found = style.describe(NORM)
    assert (found.inputs, found.desired_inputs) == ((Shard(1),), (Replicate(),))
    assert found.kwargs == {"mask": (Shard(0), None)} and not found.parameters


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel()])
def test_a_style_is_for_its_modules(style: ParallelStyle) -> None:
    with pytest.raises(PlacementError, match=r"is for nn.Linear and nn.Embedding, not for LayerNorm"):
        style.describe(NORM)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PrepareModuleInput((Shard(0), None), Replicate()),
            "input_layouts has 2 entries, desired_input_layouts has 1",
        ),
        (
            lambda: PrepareModuleOutput(Shard(0), (Shard(0), Shard(1))),
            "output_layouts has 1 entries, desired_output_layouts has 2",
        ),
        (lambda: PrepareModuleInputOutput(Shard(0)), "desired_input_layouts has 0"),
        (lambda: PrepareModuleInputOutput(output_layouts=(Shard(0), None)), "desired_output_layouts has 0"),
        (lambda: PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}), r"input_kwarg_layouts has \['x'\]"),
        (lambda: TensorParallelMode({"a": Shard(0)}), "'a' has Shard"),  # type: ignore[dict-item]
    ],
)
def test_what_is_refused_where_its_written(make: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        make()


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("", [""]),
        ("layers.*", ["layers.0", "layers.1"]),
        ("layers.*.up", ["layers.0.up", "layers.1.up"]),
        ("layers.[0].*", ["layers.0.up", "layers.0.down"]),
        ("*", ["layers", "head"]),
        ("layers.0.up", ["layers.0.up"]),
    ],
)
def test_a_pattern_goes_token_by_token(pattern: str, fits: list[str]) -> None:
    names = ["", "layers", "layers.0", "layers.1", "layers.0.up", "layers.1.up", "layers.0.down", "head"]
    assert [n for n in names if matches(pattern, n)] == fits


def test_a_pattern_that_fits_nothing_warns_at_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read({"layers.*.upp": ColwiseParallel(), "head": RowwiseParallel()}, {"": LINEAR, "head": LINEAR})
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert [m.fqn for m in found] == ["head"]
    (warning,) = caught
    assert "'layers.*.upp'" in str(warning.message) and (warning.filename, warning.lineno) == (__file__, line)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (torchs.ColwiseParallel(), ColwiseParallel(Replicate(), Shard(-1))),
        (torchs.RowwiseParallel(output_layouts=Shard(1)), RowwiseParallel(Shard(-1), Shard(1))),
        (torchs.SequenceParallel(sequence_dim=2), SequenceParallel(2)),
        (
            torchs.PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)),
            PrepareModuleInput((Shard(0), None), (Replicate(), None)),
        ),
        (
            torchs.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
            PrepareModuleOutput(Replicate(), Shard(0)),
        ),
        (
            torchs.PrepareModuleInputOutput(
                input_layouts=Shard(0),
                desired_input_layouts=Replicate(),
                output_layouts=Replicate(),
                desired_output_layouts=Shard(0),
            ),
            PrepareModuleInputOutput(
                Shard(0), Replicate(), output_layouts=Replicate(), desired_output_layouts=Shard(0)
            ),
        ),
    ],
)
def test_torchs_own_styles_are_understood(theirs: Any, ours: ParallelStyle) -> None:
    assert patterns({"x": theirs}) == {"x": ours}


class Unheard(torchs.ParallelStyle):
    """A style that somebody wrote for torch."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


def test_a_style_that_only_acts_is_for_eager_use() -> None:
    @dataclass(frozen=True)
    class Acts(ParallelStyle):
        def apply(self, module: nn.Module, mesh: Any) -> nn.Module:
            return module

    for style in (Acts(), Unheard()):
        (found,) = read({"0": style}, dict(nn.Sequential(LINEAR).named_modules()))
        assert found.description is None
        with pytest.raises(PlacementError, match=r"only has apply[\s\S]*tensor: 0\n[\s\S]*override describe"):
            TensorParallelMode({"0": style}).of(dict(nn.Sequential(LINEAR).named_modules()))
    with pytest.raises(PlacementError, match="Neither doesn't say what it means"):
        type("Neither", (ParallelStyle,), {})().describe(LINEAR)


@dataclass(frozen=True)
class Places(ParallelStyle):
    """Parameters as given."""

    parameters: tuple[tuple[str, Any], ...]

    def describe(self, module: nn.Module) -> Description:
        return Description(dict(self.parameters))


def test_all_that_is_wrong_with_a_plan_is_said_at_once() -> None:
    model = nn.ModuleDict(
        {
            "norm": nn.LayerNorm(4),
            "made": torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "twice": nn.Linear(4, 4),
            "deep": nn.Linear(4, 4),
        }
    )
    plan = {
        "norm": RowwiseParallel(),
        "made": ColwiseParallel(),
        "t*": ColwiseParallel(),
        "twice": RowwiseParallel(),
        "deep": Places((("bias", Shard(1)),)),
    }
    with pytest.raises(PlacementError) as caught:
        read(plan, dict(model.named_modules()))
    assert [(o.fqn, fragment in o.what) for o, fragment in zip(
        caught.value.offences,
        ("not for LayerNorm", "places ['weight'], ", "it has 1 dims", "'t*' gives it ColwiseParallel(", "the plan wants it as"),
        strict=False,
    )] == [("norm", True), ("made", True), ("deep.bias", True), ("twice", True)]  # fmt: skip


def test_the_same_style_from_two_patterns_is_no_conflict() -> None:
    assert len(read({"*": ColwiseParallel(), "0": ColwiseParallel()}, dict(nn.Sequential(LINEAR).named_modules()))) == 2


def test_tied_parameters_want_one_placement() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["table"].weight  # type: ignore[assignment]
    modules = dict(model.named_modules())
    same = TensorParallelMode({"table": RowwiseParallel(), "head": ColwiseParallel()}).of(modules)
    assert {p for p, _ in same.parameters.values()} == {Shard(0)} and len(same.parameters) == 2
    with pytest.raises(PlacementError, match=r"table.weight[\s\S]*head.weight"):
        TensorParallelMode({"table": ColwiseParallel(), "head": ColwiseParallel()}).of(modules)


def test_a_style_of_ones_own_is_a_description() -> None:
    @dataclass(frozen=True)
    class Rows(ParallelStyle):
        def describe(self, module: nn.Module) -> Description:
            return Description({"table": Shard(0)})

    model = nn.Module()
    model.table = nn.Parameter(torch.zeros(4, 2))
    assert TensorParallelMode(Rows()).of({"": model}).parameters == {"table": (Shard(0), torch.Size((4, 2)))}
