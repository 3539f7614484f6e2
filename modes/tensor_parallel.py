"""Tensor parallel: a plan says how the modules' parameters are split; all ranks along the axis have the same batch."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.fx as fx
from torch import nn
from torch.distributed.tensor import Partial, Placement, Shard

from spmd.capture.objects import joined
from spmd.errors import Offence, PlacementError
from spmd.graph.axis import Axis
from spmd.graph.step import ENTERS, LEAVES, StepGraph
from spmd.modes.base import ParallelMode
from spmd.modes.override import Override
from spmd.modes.plan import Plan, lie, patterns, read
from spmd.modes.styles import Description
from spmd.sharding.constraints import Constraints, by_owner
from spmd.sharding.layout import Layout, R, Sharded, shard
from spmd.sharding.propagate import batch_shard
from spmd.sharding.rule import Call, op_name
from spmd.sharding.table import ATTENTION


@dataclass(frozen=True)
class TensorParallelMode(ParallelMode):
    """Split parameters by a plan, the one that `parallelize_module` takes. What follows from it, forward and backward, the engine works out.

    plan: FQN patterns to ParallelStyles.
    axis: name of the mesh axis, for compose().
    input_batch_dim, replicated_inputs, overrides: see ParallelMode. Every rank along the axis passes the same batch.

    Example:
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        @spmd.compile(parallel_mode=TensorParallelMode(plan))
        def train_step(model, optim, x, y): ...
    """

    plan: Plan
    axis: str | None = None
    input_batch_dim: int = 0
    replicated_inputs: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
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
        values = {node.name: layout(wanted, node, axis) for node, wanted in self.pinned(step)}
        spread = {fqn: d.context for fqn, d in self.described.items() if d.context}
        values |= {node.name: shard(2, node.meta["val"].shape[2]) for node in attended(step, spread)}
        exchanging = {fqn for fqn, context in spread.items() if context == "heads"}
        prefer = partial(by_heads, modules=exchanging) if exchanging else None
        return replace(by_owner(step, axis, self.at_rest), values=values, prefer=prefer)

    def at_rest(self, owner: str, val: torch.Tensor, whole: torch.Size) -> Layout:
        """States of a parameter's shape lie as it does; all else is whole."""
        placement, shape = self.parameters.get(owner, (None, None))
        return lie(placement, val) if whole == shape else R

    def pinned(self, step: StepGraph) -> Iterator[tuple[fx.Node, Placement]]:
        """Values at the borders of described modules that lie as their style wants. What a module's own parameters bring about needs no word."""
        for node in step.graph.nodes:
            if node.op == "output" or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            wanted: list[Placement] = []
            for fqn, place in node.meta.get(ENTERS, ()):
                found = self.described.get(fqn, Description())
                given = found.kwargs.get(place, (None, None))[1] if isinstance(place, str) else None
                if (want := given or at(found.desired_inputs, place)) is not None and (
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


def at(layouts: tuple[Placement | None, ...], place: int | str) -> Placement | None:
    return layouts[place] if isinstance(place, int) and place < len(layouts) else None


def layout(placement: Placement | None, node: fx.Node, axis: Axis) -> Layout:
    """A Shard of the dim that carries the batch is each rank's share of it, where the axis splits the batch."""
    found, share = lie(placement, node.meta["val"]), batch_shard(node, axis.blocks)
    if isinstance(found, Sharded) and share is not None and share.dim == found.dim:
        return share.canonical(axis.world)
    return found


def inside(node: fx.Node, modules: Collection[str]) -> bool:
    fqn = str(node.meta.get("module", ""))
    return any(fqn == m or fqn.startswith(f"{m}.") or not m for m in modules)


def attended(step: StepGraph, modules: Collection[str]) -> Iterator[fx.Node]:
    """What attention in these modules gives, and the gradients of what it takes."""
    for node in step.graph.find_nodes(op="call_function", target=operator.getitem):
        call = node.all_input_nodes[0]
        name = op_name(call.target)
        results = (0, 1, 2) if name.endswith("backward") else (0,)
        if name in ATTENTION and inside(call, modules) and node.args[1] in results:
            yield node


def by_heads(call: Call, current: Sequence[Layout], modules: Collection[str]) -> list[Layout] | None:
    """Attention in these modules takes parts of the heads."""
    if call.name not in ATTENTION or not inside(call.node, modules):
        return None
    heads = call.inputs[1][1]  # of the queries in backward, of the keys else
    return [shard(1, heads) if len(s) > 2 and s[1] == heads else R for s in call.inputs]


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
            context=first.context or d.context,
        )
    return first
