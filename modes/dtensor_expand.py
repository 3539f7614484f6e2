"""DTensorExpandMode: placements by DTensor's own propagation, from the placements of what a step starts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from spmd.capture.arguments import matches as within
from spmd.capture.objects import joined
from spmd.errors import Offence, PlacementError
from spmd.graph.axis import Axis
from spmd.graph.step import Role, StepGraph
from spmd.modes.base import ParallelMode
from spmd.modes.data_parallel import batch_share
from spmd.modes.override import Override
from spmd.modes.plan import lie, matches, warn
from spmd.modes.styles import beyond
from spmd.sharding.constraints import Constraints, by_owner
from spmd.sharding.dtensor import preferred
from spmd.sharding.layout import Layout, R


@dataclass(frozen=True)
class Schema:
    """How a tensor lies, in DTensor's terms: one Shard or Replicate for each axis of `mesh`."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", tuple(self.placements))
        if len(self.placements) != self.mesh.ndim:
            raise PlacementError(f"{self} has {len(self.placements)} placements for a mesh of {self.mesh.ndim} axes")
        if odd := [p for p in self.placements if type(p) not in (Shard, Replicate)]:
            raise PlacementError(f"a Schema places what a step starts with: by Shard and Replicate, not by {odd[0]}")

    def __str__(self) -> str:
        return f"Schema({tuple(self.mesh.shape)}, {self.placements})"


@dataclass(frozen=True)
class Placed:
    """A parameter or buffer, of global `shape`."""

    schema: Schema
    shape: torch.Size


@dataclass(frozen=True)
class DTensorExpandMode(ParallelMode):
    """Start from the placements of parameters, buffers and arguments, and take each op's inputs as DTensor would.

    An op for which DTensor has no strategy, or none that is exact, is placed by the engine.

    schemas: FQN patterns of parameters and buffers to Schemas; all others are replicated. Gradients and states lie as their parameter does.
    inputs: argument paths (such as "batch.tokens") to Schemas; all others are split on `input_batch_dim`, along every axis that splits the batch:
        each, or those along which some Schema in `inputs` splits it. Along an axis that doesn't, all ranks pass the same tensor, whatever its Schema.
    overrides: Overrides of submodules.
    axis: name of the mesh axis, or names of several, for compose().

    Raises:
        PlacementError: a Schema is for another mesh or for dims that its tensor doesn't have, or arguments are split along different axes.

    Example:
        mode = DTensorExpandMode({"embed.weight": Schema(mesh, (Shard(0),))})
    """

    schemas: Mapping[str, Schema] = field(default_factory=dict)
    inputs: Mapping[str, Schema] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    input_batch_dim: int = 0
    axis: str | tuple[str, ...] | None = None
    along: int = field(default=0, repr=False)  # the axis of the Schemas' mesh that `constraints` speaks of
    placed: Mapping[str, Placed] = field(default_factory=dict, repr=False)  # by name; `of` finds them

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", tuple(self.overrides))

    @property
    def replicated_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(path for path, schema in self.inputs.items() if self.batch not in schema.placements)

    @property
    def batch(self) -> Placement:
        return Shard(self.input_batch_dim)

    @property
    def splits_batch(self) -> bool:  # type: ignore[override]
        placed = [schema.placements for schema in self.inputs.values() if self.batch in schema.placements]
        if len({tuple(p == self.batch for p in placements) for placements in placed}) > 1:
            raise PlacementError(f"arguments are split into samples along different axes: {self.inputs}")
        return not placed or placed[0][self.along] == self.batch

    def over(self, shape: Sequence[int], names: Sequence[str] = ()) -> tuple[ParallelMode, ...]:
        for key, schema in {**self.schemas, **self.inputs}.items():
            if tuple(schema.mesh.shape) != tuple(shape):
                raise PlacementError(f"the Schema of {key!r} is for another mesh than {tuple(shape)}: {schema}")
        return tuple(replace(self, along=i) for i in range(len(shape)))

    def of(self, modules: Mapping[str, nn.Module]) -> DTensorExpandMode:
        held = {
            joined(fqn, key): tensor
            for fqn, module in modules.items()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        placed: dict[str, Placed] = {}
        for pattern, schema in self.schemas.items():
            fits = [name for name in held if matches(pattern, name)]
            if not fits:
                there = ", ".join(list(held)[:12])
                warn(f"the pattern {pattern!r} of the schemas matches no parameter or buffer; there are {there}")
            placed.update((name, Placed(schema, held[name].shape)) for name in fits)
        offences = [
            Offence(f"{p.schema} splits a dim that it doesn't have: its shape is {tuple(p.shape)}", fqn=name)
            for name, p in placed.items()
            if any(beyond(placement, len(p.shape)) for placement in p.schema.placements)
        ]
        first: dict[int, str] = {}
        for name in placed:
            before = first.setdefault(id(held[name]), name)
            if placed[before].schema.placements != placed[name].schema.placements:
                offences.append(
                    Offence(
                        f"it's {placed[name].schema}, and {placed[before].schema} where it's called {before}", fqn=name
                    )
                )
        if offences:
            raise PlacementError(offences)
        ties = {name: placed[first[id(tensor)]] for name, tensor in held.items() if id(tensor) in first}
        return replace(self, placed=ties)

    def constraints(self, step: StepGraph, axis: Axis) -> Constraints:
        values = {
            ph.name: lie(schema.placements[self.along], ph.meta["val"])
            for spec, ph in zip(step.inputs, step.placeholders, strict=True)
            if spec.role is Role.USER and (axis.blocks is None or spec.batch_dim is None)
            for path, schema in self.inputs.items()
            if within(spec.name, (path,))
        }
        user = lambda spec, val: R if spec.batch_dim is None else batch_share(val, spec.batch_dim, axis)  # noqa: E731
        found = by_owner(step, axis, self.at_rest, user)
        return replace(found, values=values, prefer=partial(preferred, world=axis.world))

    def at_rest(self, owner: str, val: torch.Tensor, whole: torch.Size) -> Layout:
        found = self.placed.get(owner)
        return lie(found.schema.placements[self.along], val) if found is not None and found.shape == whole else R
