"""What a mode decides on one mesh axis; the engine chooses the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.fx as fx

from spmd.graph.axis import Axis
from spmd.graph.step import Input, Role, StepGraph
from spmd.sharding.layout import Layout, R
from spmd.sharding.rule import Call


@dataclass(frozen=True)
class Constraints:
    """Layouts on one mesh axis that propagation must keep.

    inputs: one for each input of the step; None for numbers.
    outputs: one for each output; None lets the engine choose (whole values come back whole, values that carry the batch stay split).
    gradients: where the gradient of a parameter lies once it's reduced, by parameter name; replicated by default.
    blocks: see Axis; None where this axis doesn't split the batch.
    stays: names of stored inputs that are used where they lie, though the axis splits the batch: samples come to them.
    values: layouts in which single values are kept, by node name: the engine moves them there as they appear.
    prefer: the layouts in which an op should take its inputs, given those in which they lie; None where it has no opinion. What isn't exact isn't done.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    gradients: Mapping[str, Layout] = field(default_factory=dict)
    blocks: int | None = 1
    stays: Collection[str] = ()
    values: Mapping[str, Layout] = field(default_factory=dict)
    prefer: Callable[[Call, Sequence[Layout]], Sequence[Layout] | None] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)  # why an input lies as it does, by name; for reports
    buffers: Literal["global", "local"] = "global"  # whose statistics batch norm takes: the batch's, or each rank's own


def by_owner(
    step: StepGraph,
    axis: Axis,
    at_rest: Callable[[str, torch.Tensor, torch.Size], Layout],
    user: Callable[[Input, torch.Tensor], Layout] = lambda spec, val: R,
) -> Constraints:
    """Constraints by the name of a parameter or buffer.

    at_rest: (its name, a value, its shape before other axes cut it) -> layout of the tensor itself, of its gradient or of a state, whatever its shape.
    user: the layout of an argument.
    """

    def place(spec: Input, val: object) -> Layout | None:
        if not isinstance(val, torch.Tensor):
            return None
        if spec.role is Role.USER:
            return user(spec, val)
        return at_rest(spec.owner or spec.name, val, step.shapes.get(spec.name, val.shape))

    inputs = tuple(place(spec, ph.meta["val"]) for spec, ph in zip(step.inputs, step.placeholders, strict=True))
    made = (  # by this very step: "<parameter>.<key>"
        at_rest(out.owner, x.meta["val"], step.shapes[out.name])
        if out.role is Role.STATE and isinstance(x, fx.Node)
        else None
        for out, x in zip(step.outputs, step.results, strict=True)
    )
    lies = zip(step.inputs, inputs, strict=True)
    gradients = {spec.name: p for spec, p in lies if spec.role is Role.PARAMETER and p is not None}
    return Constraints(inputs, kept(step, inputs, made), gradients=gradients, blocks=axis.blocks)


def pin(constraints: Constraints, step: StepGraph, placed: Mapping[str, Layout]) -> Constraints:
    """`constraints` with the layouts that tensors have already, by input name: what another compiled function has placed stays where it is."""
    inputs = tuple(placed.get(spec.name, layout) for spec, layout in zip(step.inputs, constraints.inputs, strict=True))
    wanted = zip(step.inputs, constraints.inputs, inputs, strict=True)
    moved = {
        spec.name: now
        for spec, meant, now in wanted
        if spec.role is Role.PARAMETER and now != meant and now is not None
    }
    lies = {spec.name: now for spec, now in zip(step.inputs, inputs, strict=True) if spec.role is Role.PARAMETER}
    inputs = tuple(lies[x.owner] if x.role is Role.GRADIENT else p for x, p in zip(step.inputs, inputs, strict=True))
    outputs = kept(step, inputs, constraints.outputs)
    return replace(constraints, inputs=inputs, outputs=outputs, gradients={**constraints.gradients, **moved})


def kept(
    step: StepGraph, inputs: Sequence[Layout | None], others: Iterable[Layout | None]
) -> tuple[Layout | None, ...]:
    """Layouts of the outputs: what updates an input lies as it does, a gradient as its parameter, and `others` as they say."""
    lies = {spec.name: p for spec, p in zip(step.inputs, inputs, strict=True) if spec.role is Role.PARAMETER}
    return tuple(
        inputs[out.updates] if out.updates is not None else lies.get(out.parameter, layout)
        for out, layout in zip(step.outputs, others, strict=True)
    )
