"""The mesh and its axes, as one rank sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """world: ranks along it. rank: this rank's place among them. group: name of their process group; unused where world is 1.

    blocks: into how many blocks the axes before this one cut the batch, of which this one cuts each; None: every rank along it has the same samples.
    """

    world: int
    rank: int = 0
    group: str = ""
    index: int = 0  # in the mesh
    blocks: int | None = 1
    device: str = "cpu"  # type of its devices


@dataclass(frozen=True)
class Mesh:
    """shape: ranks along each axis. coordinate: this rank's place. groups: names of its process groups. names: of the axes, where they have any."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: tuple[str, ...]
    names: tuple[str, ...] = ()
    device: str = "cpu"  # type of its devices

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def axes(self, splits: Sequence[bool]) -> list[Axis]:
        """`splits`: for each axis, whether it splits the batch."""
        found, blocks = [], 1
        for i, (ranks, split) in enumerate(zip(self.shape, splits, strict=True)):
            found.append(Axis(ranks, self.coordinate[i], self.groups[i], i, blocks if split else None, self.device))
            blocks *= ranks if split else 1
        return found
