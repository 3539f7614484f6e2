"""The modes that a name can stand for: the data parallel styles, and those of installed plugins. Looked up when asked for; nothing is kept."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from spmd.errors import Offence, PlacementError
from spmd.modes.base import ParallelMode
from spmd.modes.data_parallel import DataParallelMode, DataParallelStyle

GROUP = "spmd.modes"  # entry points: `name = "package.module:Class"`; the class is called without arguments


def known() -> dict[str, Callable[[], object]]:
    """What makes each mode, by name.

    Raises:
        PlacementError: two have one name.
    """
    found: dict[str, Callable[[], object]] = {s.value: partial(DataParallelMode, s) for s in DataParallelStyle}
    for entry in entry_points(group=GROUP):
        if entry.name in found:
            package = entry.dist.name if entry.dist else "?"
            what = f"two modes are called {entry.name!r}; one is {entry.value} of the package {package}"
            raise PlacementError(Offence(what, remedy="uninstall one of the packages, or rename its entry point"))
        found[entry.name] = partial(make, entry)
    return found


def make(entry: EntryPoint) -> object:
    return entry.load()()


def mode(name: str) -> ParallelMode:
    """The mode with this name.

    Raises:
        PlacementError: there's none, or what the name stands for is no mode.
    """
    modes = known()
    if name not in modes:
        close = difflib.get_close_matches(name, modes, 1)
        remedy = (f"did you mean {close[0]!r}? " if close else "") + f"there are {', '.join(sorted(modes))}"
        raise PlacementError(Offence(f"no parallel mode is called {name!r}", remedy=remedy))
    made = modes[name]()
    if not isinstance(made, ParallelMode):
        raise PlacementError(f"the entry point {name!r} of {GROUP} makes {made!r}, which is no ParallelMode")
    return made
