"""The passes that spec strings can name: our own, and those of installed plugins. Looked up when asked for; nothing is kept."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint

from spmd import plugins
from spmd.errors import PassError
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
    return plugins.known(GROUP, OWN, "passes", PassError)


def load(name: str, entries: Mapping[str, EntryPoint] | None = None) -> type[GraphPass]:
    """The class of the pass with this name.

    Raises:
        PassError: there's none, or it isn't a pass.
    """
    entries = known() if entries is None else entries
    if name not in entries:
        raise PassError(plugins.unknown(name, entries, "pass"))
    entry = entries[name]
    module, _, attribute = entry.value.partition(":")
    cls = getattr(import_module(module), attribute)
    if not (isinstance(cls, type) and issubclass(cls, GraphPass) and hasattr(cls, "__dataclass_fields__")):
        raise PassError(f"{entry.value}, the entry point {name!r}, is no dataclass derived from GraphPass")
    if cls.name != name:
        raise PassError(f"{entry.value} calls itself {cls.name!r}, its entry point {name!r}")
    return cls
