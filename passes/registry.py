"""The passes that spec strings can name: our own, and those of installed plugins. Looked up when asked for; nothing is kept."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from spmd.errors import Offence, PassError
from spmd.passes.base import GraphPass

GROUP = "spmd.passes"  # entry points: `name = "package.module:Class"`
OWN = {
    name: EntryPoint(name, f"spmd.passes.{module}:{cls}", GROUP)
    for name, module, cls in (
        ("dedup", "dedup", "Dedup"),
        ("regather", "regather", "Regather"),
        ("bucket", "bucket", "Bucket"),
        ("overlap", "overlap", "Overlap"),
        ("fuse", "fuse", "Fuse"),
    )
}
DEFAULT = ("dedup", "regather", "bucket", "fuse", "overlap")


def known() -> Mapping[str, EntryPoint]:
    """Where each pass comes from, by name.

    Raises:
        PassError: two have one name.
    """
    found = dict(OWN)
    for entry in entry_points(group=GROUP):
        if entry.name in found and found[entry.name].value != entry.value:
            raise PassError(
                Offence(
                    f"two passes are called {entry.name!r}: {found[entry.name].value} and {entry.value}",
                    tried=f"the latter is of the package {entry.dist.name if entry.dist else '?'}",
                    remedy="uninstall one of the packages, or rename its entry point",
                )
            )
        found[entry.name] = entry
    return found


def load(name: str, entries: Mapping[str, EntryPoint] | None = None) -> type[GraphPass]:
    """The class of the pass with this name.

    Raises:
        PassError: there's none, or it isn't a pass.
    """
    entries = known() if entries is None else entries
    if name not in entries:
        close = difflib.get_close_matches(name, entries, 1)
        raise PassError(
            Offence(
                f"no pass is called {name!r}",
                remedy=(f"did you mean {close[0]!r}? " if close else "") + f"there are {', '.join(sorted(entries))}",
            )
        )
    entry = entries[name]
    module, _, attribute = entry.value.partition(":")
    cls = getattr(import_module(module), attribute)
    if not (isinstance(cls, type) and issubclass(cls, GraphPass) and hasattr(cls, "__dataclass_fields__")):
        raise PassError(f"{entry.value}, the entry point {name!r}, is no dataclass derived from GraphPass")
    if cls.name != name:
        raise PassError(f"{entry.value} calls itself {cls.name!r}, its entry point {name!r}")
    return cls
