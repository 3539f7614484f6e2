"""Plans: which style is for which module, by FQN pattern."""

from __future__ import annotations

import fnmatch
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor import parallel as torchs

from spmd.capture.objects import joined
from spmd.capture.provenance import is_user_file
from spmd.errors import Offence, PlacementError
from spmd.modes.styles import (
    ColwiseParallel,
    Description,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    beyond,
)
from spmd.sharding.layout import Layout, R, shard

Style = ParallelStyle | torchs.ParallelStyle
Plan = Mapping[str, Style] | Style
OURS: dict[type, type[Any]] = {
    torchs.ColwiseParallel: ColwiseParallel,
    torchs.RowwiseParallel: RowwiseParallel,
    torchs.SequenceParallel: SequenceParallel,
    torchs.PrepareModuleInput: PrepareModuleInput,
    torchs.PrepareModuleOutput: PrepareModuleOutput,
    torchs.PrepareModuleInputOutput: PrepareModuleInputOutput,
}


@dataclass(frozen=True)
class TorchStyle(ParallelStyle):
    """A style written for torch's `parallelize_module`, of which it isn't known what it means: for eager use only."""

    style: torchs.ParallelStyle

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        from spmd.modes.parallelize import CALL  # it stands above: a style is used by it

        return torchs.parallelize_module(module, mesh, self.style, src_data_rank=CALL.get().src_data_rank)


@dataclass(frozen=True)
class Match:
    """A module that a pattern fits, and what the style says of it: None where it only has `apply`."""

    pattern: str
    fqn: str
    module: nn.Module
    style: ParallelStyle
    description: Description | None

    @property
    def named(self) -> Mapping[str, Placement]:
        return self.description.parameters if self.description else {}

    def places(self) -> Iterator[tuple[str, torch.Tensor, Placement]]:
        """(FQN, parameter, placement) of what the style names."""
        for name, placement in self.named.items():
            if (tensor := self.module._parameters.get(name)) is not None:
                yield joined(self.fqn, name), tensor, normal(placement, tensor.dim())


def read(plan: Plan, modules: Mapping[str, nn.Module]) -> list[Match]:
    """What the plan says of `modules`, by FQN, in its order.

    Raises:
        PlacementError: something in it isn't a style, or isn't for its module; two styles place the same parameters. All of that at once.
    """
    found: list[Match] = []
    offences: list[Offence] = []
    for pattern, fqn, module, style in match(plan, modules):
        try:
            described = style.describe(module) if style.describes else None
            found.append(Match(pattern, fqn, module, style, described))
        except PlacementError as error:
            offences += [replace(offence, fqn=offence.fqn or fqn) for offence in error.offences]
    offences += [*misplaced(found), *disputed(found), *tied(found)]
    if offences:
        raise PlacementError(offences)
    return found


def misplaced(matches: list[Match]) -> Iterator[Offence]:
    """Parameters that are named and aren't there, misspelt or computed by a parametrization; dims that they don't have."""
    for m in matches:
        own = m.module._parameters
        if names := [name for name in m.named if name not in own]:
            what = f"{m.style!r} places {names}, {type(m.module).__name__} has {list(own)} of its own"
            yield Offence(what, fqn=m.fqn, remedy="parallelize before parametrizing, or describe the module's own")
        for name, placement in m.named.items():
            if (tensor := own.get(name)) is not None and beyond(placement, tensor.dim()):
                yield Offence(
                    f"{m.style!r} places it as {placement}, it has {tensor.dim()} dims", fqn=joined(m.fqn, name)
                )


def disputed(matches: list[Match]) -> Iterator[Offence]:
    """Modules whose parameters two different styles place."""
    first: dict[int, Match] = {}
    for m in matches:
        if m.named and (before := first.setdefault(id(m.module), m)).style != m.style:
            what = f"{before.pattern!r} gives it {before.style!r}, {m.pattern!r} gives it {m.style!r}"
            yield Offence(what, fqn=m.fqn, remedy="let one pattern match it")


def tied(matches: list[Match]) -> Iterator[Offence]:
    """Parameters under several names that want different placements."""
    first: dict[int, tuple[str, Placement]] = {}
    for name, tensor, placement in (place for m in matches for place in m.places()):
        known, before = first.setdefault(id(tensor), (name, placement))
        if before != placement and known != name:
            what = f"the plan wants it as {placement}, and as {before} where it's called {known}"
            yield Offence(what, fqn=name, remedy="give tied parameters the same placement")


def patterns(plan: Plan) -> dict[str, ParallelStyle]:
    """The plan as a dict; a style alone is for the module itself.

    Raises:
        PlacementError: something in it isn't a style.
    """
    given = dict(plan) if isinstance(plan, Mapping) else {"": plan}
    found = {pattern: translated(style) for pattern, style in given.items()}
    wrong = {pattern: style for pattern, style in found.items() if not isinstance(style, ParallelStyle)}
    if wrong:
        raise PlacementError(
            f"a plan maps FQN patterns to ParallelStyles; {', '.join(f'{p!r} has {s!r}' for p, s in wrong.items())}"
        )
    return found


def translated(style: Any) -> Any:
    """One of torch's own styles as ours."""
    if (ours := OURS.get(type(style))) is None:
        return TorchStyle(style) if isinstance(style, torchs.ParallelStyle) else style
    if ours is SequenceParallel:
        return SequenceParallel(style.sequence_sharding[0].dim, style.use_local_output)
    if ours is PrepareModuleInputOutput:
        into, out = translated(style.prepare_module_input), translated(style.prepare_module_output)
        return PrepareModuleInputOutput(**{**vars(into), "use_local_input": into.use_local_output, **vars(out)})
    if ours in (ColwiseParallel, RowwiseParallel):
        return ours(style.input_layouts[0], style.output_layouts[0], style.use_local_output)
    return ours(**{name: getattr(style, name) for name in ours.__dataclass_fields__})


def match(plan: Plan, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, nn.Module, ParallelStyle]]:
    """(pattern, FQN, module, style) for each of `modules` that a pattern matches, token by token. Warns, at the user's line, of patterns that match none."""
    for pattern, style in patterns(plan).items():
        fits = [fqn for fqn in modules if matches(pattern, fqn)]
        if not fits:
            warn(
                f"the pattern {pattern!r} of the parallelize plan matches no module; there are {', '.join(map(repr, list(modules)[:12]))}{' and more' * (len(modules) > 12)}"
            )
        yield from ((pattern, fqn, modules[fqn], style) for fqn in fits)


def matches(pattern: str, fqn: str) -> bool:
    if not pattern or not fqn:
        return pattern == fqn
    tokens, parts = pattern.split("."), fqn.split(".")
    return len(tokens) == len(parts) and all(map(fnmatch.fnmatchcase, parts, tokens))


def lie(placement: Placement | None, val: torch.Tensor) -> Layout:
    """The layout of `val` that a Shard means; anything else, and what has no dim to split, is whole."""
    if not isinstance(placement, Shard) or not val.dim():
        return R
    dim = placement.dim % val.dim()
    return shard(dim, val.shape[dim])


def normal(placement: Placement, rank: int) -> Placement:
    return Shard(placement.dim % rank) if isinstance(placement, Shard) and rank else placement


def warn(text: str) -> None:
    """A warning at the innermost line of the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)
