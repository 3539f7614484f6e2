"""The contract of a pass: what it's called, what it needs, and one method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import ClassVar

from spmd.graph.local import LocalGraph

SEPARATE = "separate"  # a fact that holds at first: each collective moves one tensor


class Numerics(StrEnum):
    """What a pass may do to numbers."""

    BITWISE = "bitwise"  # the same bits
    ROUNDING = "rounding"  # sums in another order


class GraphPass(ABC):
    """One rewrite of a rank's program. Implementations are frozen dataclasses; their fields are the options of a spec string.

    Every rank runs the same passes on its own program, and the results must be the same program again: decide by notes, formulas and padded
    shapes, never by what only this rank knows.

    name: in spec strings.
    requires, provides, invalidates: facts about the graph, for the order of passes. `separate` holds at first.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    invalidates: ClassVar[frozenset[str]] = frozenset()
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    @abstractmethod
    def run(self, graph: LocalGraph) -> LocalGraph:
        """Rewrite `graph` in place or make another. Nodes carry their metadata: `val`, and a note on each collective."""
