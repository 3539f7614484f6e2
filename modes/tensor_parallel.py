"""Tensor parallel: a plan says how the modules' parameters are split; all ranks along the axis have the same batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx
from torch import nn
from torch.distributed.tensor import Partial, Placement, Shard

from spmd.errors import Offence, PlacementError
from spmd.graph.axis import Axis
from spmd.graph.step import ENTERS, LEAVES, StepGraph
from spmd.modes.base import ParallelMode
from spmd.modes.plan import Plan, joined, patterns, read
from spmd.modes.styles import Description
from spmd.sharding.constraints import Constraints, by_owner
from spmd.sharding.layout import Layout, R, shard


@dataclass(frozen=True)
class TensorParallelMode(ParallelMode):
    """Split parameters by a plan, the one that `parallelize_module` takes. What follows from it, forward and backward, the engine works out.

    plan: FQN patterns to ParallelStyles.
    axis: name of the mesh axis, for compose().
    input_batch_dim, replicated_inputs: see ParallelMode. Every rank along the axis passes the same batch.

    Example:
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        @spmd.compile(parallel_mode=TensorParallelMode(plan))
        def train_step(model, optim, x, y): ...
    """

    plan: Plan
    axis: str | None = None
    input_batch_dim: int = 0
    replicated_inputs: tuple[str, ...] = ()
    described: Mapping[str, Description] = field(default_factory=dict, repr=False)  # by FQN of the module
    parameters: Mapping[str, tuple[Placement, torch.Size]] = field(
        default_factory=dict, repr=False
    )  # by FQN; with the shape

    splits_batch = False

    def __post_init__(self) -> None:
        patterns(self.plan)  # complains where the plan is written
        object.__setattr__(self, "replicated_inputs", tuple(self.replicated_inputs))

    def of(self, modules: Mapping[str, nn.Module]) -> TensorParallelMode:
        found = read(self.plan, modules)
        if eager := [m for m in found if m.description is None]:
            remedy = "override describe(module), which serves both ways"
            raise PlacementError(
                Offence(f"{type(m.style).__name__} only has apply", fqn=m.fqn, remedy=remedy) for m in eager
            )
        described: dict[str, list[Description]] = {}
        for m in found:
            described.setdefault(m.fqn, []).append(m.description or Description())
        held = {
            id(tensor): placement for m in found for _, tensor, placement in m.places()
        }  # a tied one has several names
        parameters = {
            joined(fqn, name): (held[id(tensor)], tensor.shape)
            for fqn, module in modules.items()
            for name, tensor in module._parameters.items()
            if tensor is not None and id(tensor) in held
        }
        merge = {fqn: merged(iter(several)) for fqn, several in described.items()}
        return replace(self, described=merge, parameters=parameters)

    def constraints(self, step: StepGraph, axis: Axis) -> Constraints:
        values = {node.name: layout(wanted, node.meta["val"]) for node, wanted in self.pinned(step)}
        return replace(by_owner(step, axis, self.at_rest), values=values)

    def at_rest(self, owner: str, val: torch.Tensor) -> Layout:
        """States of a parameter's shape lie as it does; all else is whole."""
        placement, shape = self.parameters.get(owner, (None, None))
        return layout(placement, val) if val.shape == shape else R

    def pinned(self, step: StepGraph) -> Iterator[tuple[fx.Node, Placement]]:
        """Values at the borders of described modules that lie as their style wants. What a module's own parameters bring about needs no word."""
        for node in step.graph.nodes:
            if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            wanted: list[Placement] = []
            for fqn, place in node.meta.get(ENTERS, ()):
                found = self.described.get(fqn, Description())
                if (want := at(found.desired_inputs, place)) is not None and (
                    isinstance(want, Shard) or not found.parameters
                ):
                    wanted.append(want)
            for fqn, place in node.meta.get(LEAVES, ()):
                found = self.described.get(fqn, Description())
                want, has = at(found.desired_outputs, place), at(found.outputs, place)
                if want is not None and (isinstance(want, Shard) or not isinstance(has, Partial)):
                    wanted.append(want)
            if wanted:
                yield node, next((p for p in wanted if isinstance(p, Shard)), wanted[0])


def at(layouts: tuple[Placement | None, ...], place: int) -> Placement | None:
    return layouts[place] if place < len(layouts) else None


def layout(placement: Placement | None, val: torch.Tensor) -> Layout:
    if not isinstance(placement, Shard) or not val.dim():
        return R
    dim = placement.dim % val.dim()
    return shard(dim, val.shape[dim])


def merged(descriptions: Iterator[Description]) -> Description:
    """Of a module that several patterns match: each says what the ones before don't."""
    first, *rest = descriptions
    for d in rest:
        first = replace(
            first,
            parameters={**d.parameters, **first.parameters},
            inputs=first.inputs or d.inputs,
            desired_inputs=first.desired_inputs or d.desired_inputs,
            kwargs={**d.kwargs, **first.kwargs},
            outputs=first.outputs or d.outputs,
            desired_outputs=first.desired_outputs or d.desired_outputs,
        )
    return first
