"""compose: one mode for each axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from spmd.errors import PlacementError
from spmd.graph.axis import Axis
from spmd.graph.step import Role, StepGraph
from spmd.modes.base import ParallelMode
from spmd.modes.tensor_parallel import TensorParallelMode
from spmd.passes import PassPipeline
from spmd.sharding.constraints import Constraints, kept


def compose(*modes: ParallelMode) -> ParallelMode:
    """Modes that share the mesh, each on the axis that it names: `compose(DataParallelMode(axis="dp"), TensorParallelMode(plan, axis="tp"))`.

    The order of the mesh's axes counts, not that of the modes: a tensor is cut along the last axis first. So data parallel axes come before those of
    tensor parallel, and a parameter that both split on one dim has a strided placement on the first.

    A plan may share an axis with a mode that splits the batch: the modules that it names lie as it says, and samples come to them, as in
    `compose(DataParallelMode(axis="dp"), TensorParallelMode({"layers.*.experts": ExpertParallel()}, axis="dp"))`.

    Raises:
        PlacementError: a mode names no axis, two of a kind name one, or modes that split the batch differ about `input_batch_dim`.
    """
    return Composed(modes)


@dataclass(frozen=True)
class Planned(ParallelMode):
    """A mode for one axis, but for the parameters that a plan places: those are used where they lie, and samples come to them."""

    others: ParallelMode
    plan: TensorParallelMode

    @classmethod
    def joined(cls, a: ParallelMode, b: ParallelMode) -> Planned:
        plan, others = (a, b) if isinstance(a, TensorParallelMode) else (b, a)
        assert isinstance(plan, TensorParallelMode)
        return cls(others, plan)

    @property
    def splits_batch(self) -> bool:  # type: ignore[override]
        return self.others.splits_batch

    def constraints(self, step: StepGraph, axis: Axis) -> Constraints:
        base, own, placed = self.others.constraints(step, axis), self.plan.constraints(step, axis), self.plan.parameters
        mine = [(spec.owner or spec.name) in placed for spec in step.inputs]
        inputs = tuple(q if m else p for p, q, m in zip(base.inputs, own.inputs, mine, strict=True))
        outputs = (
            q if out.role is Role.STATE and out.owner in placed else p
            for out, p, q in zip(step.outputs, base.outputs, own.outputs, strict=True)
        )
        gradients = {name: (own if name in placed else base).gradients[name] for name in base.gradients}
        return replace(
            base,
            inputs=inputs,
            outputs=kept(step, inputs, outputs),
            gradients=gradients,
            values={**base.values, **own.values},
            prefer=own.prefer or base.prefer,
            stays=tuple(placed),
            reasons={name: reason for name, reason in base.reasons.items() if name not in placed},
        )


@dataclass(frozen=True)
class Composed(ParallelMode):
    """What `compose` makes."""

    modes: tuple[ParallelMode, ...]

    def __post_init__(self) -> None:
        if unnamed := [type(mode).__name__ for mode in self.modes if not axes(mode)]:
            raise PlacementError(f'{", ".join(unnamed)} in compose() needs the name of its mesh axis: axis="dp"')
        splitting = [mode for mode in self.modes if mode.splits_batch]
        plans = [mode for mode in self.modes if isinstance(mode, TensorParallelMode)]
        for kind in (plans, [mode for mode in self.modes if mode not in plans]):
            names = [name for mode in kind for name in axes(mode)]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise PlacementError(f"compose() has several modes for the axis {', '.join(map(repr, twice))}")
        if len({mode.input_batch_dim for mode in splitting}) > 1:
            dims = ", ".join(f"{mode.input_batch_dim} on {axes(mode)}" for mode in splitting)
            raise PlacementError(
                f"modes in compose() split the batch on different dims: {dims}; there is one input_batch_dim"
            )
        object.__setattr__(self, "input_batch_dim", next((mode.input_batch_dim for mode in splitting), 0))
        shared = dict.fromkeys(path for mode in self.modes for path in mode.replicated_inputs)
        object.__setattr__(self, "replicated_inputs", tuple(shared))
        object.__setattr__(self, "overrides", tuple(override for mode in self.modes for override in mode.overrides))

    def over(self, shape: Sequence[int], names: Sequence[str] = ()) -> tuple[ParallelMode, ...]:
        sizes = dict(zip(names, shape, strict=False))
        found: dict[str, ParallelMode] = {}
        for mode in self.modes:
            mine = axes(mode)
            if missing := [name for name in mine if name not in sizes]:
                raise PlacementError(
                    f"{type(mode).__name__} is for the axis {missing[0]!r}, the mesh has {tuple(names) or 'no named axes'}"
                )
            for name, own in zip(mine, mode.over([sizes[name] for name in mine], mine), strict=True):
                found[name] = Planned.joined(found[name], own) if name in found else own
        if free := [name for name in names if name not in found]:
            raise PlacementError(
                f"no mode of compose() is for the mesh axis {free[0]!r}; it has modes for {tuple(found)}"
            )
        splits = [found[name].splits_batch for name in names]
        if splits != sorted(splits, reverse=True):
            raise PlacementError(
                f"axes that split the batch come first in the mesh, those of tensor parallel last; here they are {tuple(names)}"
            )
        return tuple(found[name] for name in names)

    def of(self, modules: Mapping[str, nn.Module]) -> Composed:
        return Composed(tuple(mode.of(modules) for mode in self.modes))

    def passes(self) -> PassPipeline:
        """The first mode's."""
        return self.modes[0].passes() if self.modes else super().passes()

    def constraints(self, step: StepGraph, axis: Axis) -> Constraints:
        raise AssertionError("each axis has a mode of its own")


def axes(mode: ParallelMode) -> tuple[str, ...]:
    """Names of the mesh axes that a mode is for."""
    found = getattr(mode, "axis", None) or ()
    return (found,) if isinstance(found, str) else tuple(found)
