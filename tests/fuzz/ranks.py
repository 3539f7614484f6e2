"""All ranks of a compiled step in this process: captured once, cut into one program a rank, run in lockstep.

What the runtime does with storage is done here on whole tensors that are cut and joined, so this tries capture, placement and partition alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.capture import Capture, Slot, capture, flatten_leaves
from spmd.debug import run_lockstep
from spmd.graph.axis import Axis
from spmd.graph.concrete import at
from spmd.graph.local import LocalGraph
from spmd.graph.step import STORED, Input, Role, StepGraph
from spmd.graph.verify import verify_local, verify_step
from spmd.modes import DataParallelMode
from spmd.sharding.layout import Layout, Partial, join, local_shape, padded_shape, take
from spmd.sharding.partition import partition
from spmd.sharding.plan import Plan
from spmd.sharding.propagate import propagate

Parts = list[Tensor]  # one a rank


class Ranks:
    """Runs a step on the ranks of `world`.

    Attributes:
        stored: padded buffers of parameters, buffers and states, by name.
        gradients: parts of what lies in `.grad` between calls, by parameter.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        mode: DataParallelMode,
        world: int,
        batch: int,
        captured: Capture | None = None,
    ) -> None:
        """`args` are the first rank's: model, optimizer and its share of the batch. Nothing is run but what makes states.

        captured: the step as other ranks have captured it, at the same global batch, of objects that are equal to these.
        """
        self.step, self.args, self.mode, self.world, self.batch = step, tuple(args), mode, world, batch
        self.stored: dict[str, Parts] = {}
        self.layouts: dict[str, tuple[Layout, tuple[int, ...]]] = {}
        self.gradients: dict[str, Parts] = {}
        self.settle(captured or self.capture())

    def capture(self) -> Capture:
        return capture(
            self.step,
            self.args,
            batch_dim=self.mode.input_batch_dim,
            replicated=self.mode.replicated_inputs,
            global_batch=lambda local: local * self.world,
        )

    def settle(self, captured: Capture) -> None:
        self.captured, self.stale = captured, False
        self.programs, self.plan = self.compile(self.captured.step)
        for slot, layouts in zip(self.captured.slots, self.programs[0].inputs, strict=True):
            name, tensor = slot.input.name, slot.tensor
            if slot.input.role in STORED and tensor is not None and layouts is not None and name not in self.stored:
                self.put(name, tensor.detach(), layouts[0])
        if self.captured.init is not None:
            self.make_states(self.captured.init)

    def compile(self, step: StepGraph) -> tuple[list[LocalGraph], Plan]:
        concrete = at(step, self.batch)
        verify_step(concrete)
        plan = propagate(concrete, self.mode.constraints(concrete, Axis(self.world)), self.world)
        programs = [partition(concrete, plan, Axis(self.world, rank)) for rank in range(self.world)]
        for program in programs:
            verify_local(program)
        return programs, plan

    def put(self, name: str, whole: Tensor, layout: Layout) -> None:
        parts = [whole.new_zeros(padded_shape(whole.shape, layout, self.world)) for _ in range(self.world)]
        for rank, part in enumerate(parts):
            self.real(part, whole.shape, layout, rank).copy_(take(whole, layout, self.world, rank))
        self.stored[name], self.layouts[name] = parts, (layout, tuple(whole.shape))

    def real(self, padded: Tensor, shape: Sequence[int], layout: Layout, rank: int) -> Tensor:
        for dim, length in enumerate(local_shape(shape, layout, self.world, rank)):
            padded = padded.narrow(dim, 0, int(length))
        return padded

    def make_states(self, init: StepGraph) -> None:
        programs, _ = self.compile(init)
        outputs = run_lockstep(programs, [self.inputs(program, [], rank) for rank, program in enumerate(programs)])
        for i, (out, layouts) in enumerate(zip(init.outputs, programs[0].outputs, strict=True)):
            assert layouts is not None
            if out.name not in self.stored:
                self.put(out.name, join([o[i] for o in outputs], layouts[0]), layouts[0])

    def add_state(self, name: str, whole: Tensor, layout: Layout) -> None:
        """A state that the step itself has made: the next call is another program."""
        model, optimizer = self.args[:2]
        owner, _, key = name.rpartition(".")
        optimizer.state[model.get_parameter(owner)][key] = whole
        self.put(name, whole, layout)
        self.stale = True

    # ---- one call

    def __call__(self, *args: Any) -> tuple[list[Any], list[Layout | None]]:
        """What the user's function returns, whole, and how each of it lies on the ranks. `args` are the global arguments."""
        if self.stale:
            self.settle(self.capture())
        leaves = flatten_leaves(args, {})
        with torch.no_grad():
            inputs = [self.inputs(program, leaves, rank) for rank, program in enumerate(self.programs)]
            outputs = run_lockstep(self.programs, inputs)
        return self.deliver(outputs)

    def inputs(self, program: LocalGraph, leaves: Sequence[Any], rank: int) -> list[Any]:
        slots = {slot.input.name: slot for slot in self.captured.slots}
        found = []
        for spec, node, layouts in zip(program.step.inputs, program.step.placeholders, program.inputs, strict=True):
            if spec.role in STORED:
                found.append(self.stored[spec.name][rank])
            elif spec.role is Role.GRADIENT:
                found.append(self.gradients[spec.owner][rank])
            else:
                layout = layouts[0] if layouts is not None else None
                found.append(self.value(spec, slots[spec.name], node.meta["val"], layout, leaves, rank))
        return found

    def value(self, spec: Input, slot: Slot, val: Any, layout: Layout | None, leaves: Sequence[Any], rank: int) -> Any:
        if slot.container is not None:
            found = slot.container[slot.key]
        else:
            found = leaves[slot.leaf] if slot.leaf is not None else slot.tensor
        if isinstance(val, Tensor) and not isinstance(found, Tensor):
            return torch.tensor(found, dtype=val.dtype)
        return found if layout is None else take(found.detach(), layout, self.world, rank).clone()

    def deliver(self, outputs: list[tuple[Any, ...]]) -> tuple[list[Any], list[Layout | None]]:
        returned: list[Any] = []
        lie: list[Layout | None] = []
        for i, (out, layouts) in enumerate(zip(self.captured.step.outputs, self.programs[0].outputs, strict=True)):
            parts = [o[i] for o in outputs]
            if out.role is Role.GRADIENT:
                assert layouts is not None
                owner = out.parameter
                self.gradients[owner] = parts
                self.layouts[f"{owner}.grad"] = (layouts[0], ())
            elif out.role is Role.STATE and out.updates is None:
                assert layouts is not None
                self.add_state(out.name, join(parts, layouts[0]), layouts[0])
            elif out.role is Role.USER and out.updates is None:
                assert layouts is None or not isinstance(layouts[0], Partial), "a partial value is returned"
                returned.append(parts[0] if layouts is None else join(parts, layouts[0]))
                lie.append(None if layouts is None else layouts[0])
        for owner in self.captured.cleared:
            self.gradients.pop(owner, None)
        return returned, lie

    def state(self) -> Mapping[str, Tensor]:
        """Parameters, buffers, states and gradients, whole and by name."""
        found = {}
        for name, padded in self.stored.items():
            layout, shape = self.layouts[name]
            found[name] = join([self.real(x, shape, layout, rank) for rank, x in enumerate(padded)], layout).clone()
        for owner, parts in self.gradients.items():
            found[f"{owner}.grad"] = join(parts, self.layouts[f"{owner}.grad"][0])
        return found
