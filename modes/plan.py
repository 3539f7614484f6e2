"""Plans: which style is for which module, by FQN pattern."""

from __future__ import annotations

import fnmatch
import sys
import warnings
from collections.abc import Iterator, Mapping

from torch import nn

from spmd.capture.provenance import is_user_file
from spmd.errors import PlacementError
from spmd.modes.styles import ParallelStyle

Plan = Mapping[str, ParallelStyle] | ParallelStyle


def patterns(plan: Plan) -> dict[str, ParallelStyle]:
    """The plan as a dict; a style alone is for the module itself.

    Raises:
        PlacementError: something in it isn't a style.
    """
    found = {"": plan} if isinstance(plan, ParallelStyle) else dict(plan)
    wrong = {pattern: style for pattern, style in found.items() if not isinstance(style, ParallelStyle)}
    if wrong:
        raise PlacementError(
            f"a plan maps FQN patterns to ParallelStyles; {', '.join(f'{p!r} has {s!r}' for p, s in wrong.items())}"
        )
    return found


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
    tokens, parts = pattern.split("."), fqn.split(".")
    return len(tokens) == len(parts) and all(map(fnmatch.fnmatchcase, parts, tokens))


def warn(text: str) -> None:
    """A warning at the innermost line of the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)
