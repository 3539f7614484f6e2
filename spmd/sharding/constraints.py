"""What a mode decides on one mesh axis; the engine chooses the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spmd.sharding.layout import Layout


@dataclass(frozen=True)
class Constraints:
    """Layouts on one mesh axis that propagation must keep.

    inputs: one for each input of the step; None for numbers.
    outputs: one for each output; None lets the engine choose (whole values come back whole, values that carry the batch stay split).
    gradients: where the gradient of a parameter lies once it's reduced, by parameter name; default: as the parameter.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    gradients: Mapping[str, Layout] = field(default_factory=dict)
    axis: int = 0
