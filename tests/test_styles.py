"""Styles and plans: what they say, and what they refuse. One process."""

from __future__ import annotations

import warnings
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
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
from spmd.modes.plan import match, matches, patterns

LINEAR, TABLE, NORM = nn.Linear(4, 6), nn.Embedding(8, 4), nn.LayerNorm(4)
STYLES = [ColwiseParallel(), RowwiseParallel(), SequenceParallel(), PrepareModuleInput(Shard(1), Replicate())]


@pytest.mark.parametrize(
    ("style", "module", "parameters", "output"),
    [
        (ColwiseParallel(), LINEAR, {"weight": Shard(0), "bias": Shard(0)}, (Shard(-1), Shard(-1))),
        (ColwiseParallel(output_layouts=Replicate()), TABLE, {"weight": Shard(1)}, (Shard(-1), Replicate())),
        (RowwiseParallel(), LINEAR, {"weight": Shard(1), "bias": Replicate()}, (Partial(), Replicate())),
        (RowwiseParallel(output_layouts=Shard(1)), TABLE, {"weight": Shard(0)}, (Partial(), Shard(1))),
        (SequenceParallel(), NORM, {}, (Shard(1), Shard(1))),
    ],
)
def test_what_a_style_says(style: ParallelStyle, module: nn.Module, parameters: Any, output: Any) -> None:
    found = style.describe(module)
    assert found.parameters == parameters
    assert (found.outputs, found.desired_outputs) == ((output[0],), (output[1],))


@pytest.mark.parametrize("style", STYLES)
def test_styles_are_immutable_and_tell_what_they_are(style: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        style.use_local_output = True
    assert repr(style).startswith(type(style).__name__ + "(")


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
        found = list(
            match({"layers.*.upp": ColwiseParallel(), "head": RowwiseParallel()}, {"": LINEAR, "head": LINEAR})
        )
    assert [fqn for fqn, _, _ in found] == ["head"]
    (warning,) = caught
    assert "'layers.*.upp'" in str(warning.message) and warning.filename == __file__


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
