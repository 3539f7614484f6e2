"""The modes that a name can stand for: the data parallel styles, and those of installed plugins."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from spmd import plugins
from spmd.errors import PlacementError
from spmd.modes.base import ParallelMode
from spmd.modes.data_parallel import DataParallelStyle

GROUP = "spmd.modes"  # entry points: `name = "package.module:Class"`; the class is called without arguments
STYLES = {s.value: EntryPoint(s.value, "spmd.modes.data_parallel:DataParallelMode", GROUP) for s in DataParallelStyle}


def mode(name: str) -> ParallelMode:
    """The mode with this name.

    Raises:
        PlacementError: there's none, two have the name, or what it stands for is no mode.
    """
    entries = plugins.known(GROUP, STYLES, "modes", PlacementError)
    if name not in entries:
        raise PlacementError(plugins.unknown(name, entries, "parallel mode"))
    cls = entries[name].load()
    made = cls(name) if name in STYLES else cls()
    if not isinstance(made, ParallelMode):
        raise PlacementError(f"the entry point {name!r} of {GROUP} makes {made!r}, which is no ParallelMode")
    return made
