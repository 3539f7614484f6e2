"""Axis: one axis of the mesh, as one rank sees it."""

from __future__ import annotations

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
