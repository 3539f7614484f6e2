"""What has a name: our own, and what installed packages add by an entry point. Looked up when asked for; nothing is kept."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from spmd.errors import Offence, SpmdError


def known(group: str, own: Mapping[str, EntryPoint], kinds: str, error: type[SpmdError]) -> dict[str, EntryPoint]:
    """Where each name comes from. `kinds`: what they are, for messages.

    Raises:
        error: two have one name.
    """
    found = dict(own)
    for entry in entry_points(group=group):
        if entry.name in found and found[entry.name].value != entry.value:
            raise error(
                Offence(
                    f"two {kinds} are called {entry.name!r}: {found[entry.name].value} and {entry.value}",
                    tried=f"the latter is of the package {entry.dist.name if entry.dist else '?'}",
                    remedy="uninstall one of the packages, or rename its entry point",
                )
            )
        found[entry.name] = entry
    return found


def unknown(name: str, names: Iterable[str], kind: str) -> Offence:
    """That nothing of this kind has the name, and what may have been meant."""
    close = difflib.get_close_matches(name, names, 1)
    remedy = (f"did you mean {close[0]!r}? " if close else "") + f"there are {', '.join(sorted(names))}"
    return Offence(f"no {kind} is called {name!r}", remedy=remedy)
