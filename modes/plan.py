"""Plans: which style is for which module, by FQN pattern."""

from __future__ import annotations

import fnmatch
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import style as torchs

from spmd.capture.provenance import is_user_file
from spmd.errors import PlacementError
from spmd.modes.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

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
        return style
    if ours is SequenceParallel:
        return SequenceParallel(style.sequence_sharding[0].dim, style.use_local_output)
    if ours is PrepareModuleInputOutput:
        into, out = translated(style.prepare_module_input), translated(style.prepare_module_output)
        return PrepareModuleInputOutput(**{**vars(into), "use_local_input": into.use_local_output, **vars(out)})
    if ours in (ColwiseParallel, RowwiseParallel):
        into, out = single(style.input_layouts), single(style.output_layouts)
        return ours(into, out, style.use_local_output)
    read = {name: getattr(style, name, None) for name in ours.__dataclass_fields__}
    return ours(**{name: value for name, value in read.items() if value is not None})


def single(layouts: Any) -> Any:
    return layouts[0] if isinstance(layouts, tuple) else layouts


def match(plan: Plan, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """(FQN, module, style) for each of `modules` that a pattern matches, token by token. Warns, at the user's line, of patterns that match none."""
    for pattern, style in patterns(plan).items():
        fits = [fqn for fqn in modules if matches(pattern, fqn)]
        if not fits:
            warn(
                f"the pattern {pattern!r} of the parallelize plan matches no module; there are {', '.join(map(repr, list(modules)[:12]))}{' and more' * (len(modules) > 12)}"
            )
        yield from ((fqn, modules[fqn], style) for fqn in fits)


def matches(pattern: str, fqn: str) -> bool:
    if not pattern or not fqn:
        return pattern == fqn
    tokens, parts = pattern.split("."), fqn.split(".")
    return len(tokens) == len(parts) and all(map(fnmatch.fnmatchcase, parts, tokens))


def warn(text: str) -> None:
    """A warning at the innermost line of the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)
