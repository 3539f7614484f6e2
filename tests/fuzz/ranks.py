"""All ranks of a compiled step in this process: captured once, cut into one program a rank, rewritten by passes, run in lockstep.

What the runtime does with storage is done here on whole tensors that are cut and joined, so this tries all before the runtime.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.api import local_graph
from spmd.capture import Capture, Slot, capture, flatten_leaves
from spmd.counter.keys import key_of
from spmd.counter.rewrite import number
from spmd.debug import run_lockstep
from spmd.graph.local import Layouts, LocalGraph
from spmd.graph.step import STORED, Input, Role, StepGraph
from spmd.graph.verify import verify_local
from spmd.modes import DataParallelMode
from spmd.passes import PassPipeline
from spmd.runtime.storage import part, real_part
from spmd.runtime.world import World
from spmd.sharding.layout import Partial, buffer_shape, join

Parts = list[Tensor]  # one a rank
Lie = list[Layouts]  # how a tensor lies, as each rank sees it


class Ranks:
    """Runs a step on the ranks of a mesh.

    Attributes:
        stored: padded buffers of parameters, buffers and states, by name.
        gradients: parts of what lies in `.grad` between calls, by parameter.
        written: numbers that the step itself has changed, such as a learning rate.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        mode: DataParallelMode,
        mesh: tuple[int, ...],
        batch: int,
        passes: str = "default",
        captured: Capture | None = None,
        seed: int | None = None,
    ) -> None:
        """`args` are the first rank's: model, optimizer and its share of the batch. Nothing is run but what makes states.

        seed: of counter-based random numbers; None: eager's.
        captured: the step as other ranks have captured it, at the same global batch, of objects that are equal to these.
        """
        self.step, self.args, self.mode, self.mesh, self.batch = step, tuple(args), mode, mesh, batch
        self.passes = PassPipeline.of(passes)
        self.seed, self.calls = seed, 0
        self.keys: dict[str, Tensor] = {}  # of random numbers, by device
        places = list(itertools.product(*map(range, mesh)))
        self.worlds = [World(None, None, mesh, place, None, tuple(range(len(places))), 0.0) for place in places]
        self.stored: dict[str, Parts] = {}
        self.layouts: dict[str, tuple[Lie, tuple[int, ...]]] = {}
        self.gradients: dict[str, Parts] = {}
        self.written: dict[str, Any] = {}
        self.settle(captured or self.capture())

    def capture(self) -> Capture:
        captured = capture(
            self.step,
            self.args,
            batch_dim=self.mode.input_batch_dim,
            replicated=self.mode.replicated_inputs,
            global_batch=lambda local: local * math.prod(self.mesh),
        )
        if self.seed is not None:
            number(captured, self.keys)
        return captured

    def settle(self, captured: Capture) -> None:
        self.captured, self.stale = captured, False
        self.programs = []
        for program in self.compile(self.captured.step):
            verify_local(program)
            self.programs.append(self.passes.run(program))
        for i, slot in enumerate(self.captured.slots):
            name, tensor = slot.input.name, slot.tensor
            if slot.input.role in STORED and tensor is not None and name not in self.stored:
                lie = [x for program in self.programs if (x := program.inputs[i]) is not None]
                if lie:
                    self.put(name, tensor.detach(), lie)
            elif slot.input.role is Role.GRADIENT and tensor is not None and slot.input.owner not in self.gradients:
                lie = [x for program in self.programs if (x := program.inputs[i]) is not None]
                self.gradients[slot.input.owner] = [
                    part(tensor.detach(), x, w).clone() for x, w in zip(lie, self.worlds, strict=True)
                ]
                self.layouts[name] = (lie, ())
        if self.captured.init is not None:
            self.make_states(self.captured.init)

    def compile(self, step: StepGraph) -> list[LocalGraph]:
        return [local_graph(step, self.captured, self.batch, self.mode, world.view) for world in self.worlds]

    def put(self, name: str, whole: Tensor, lie: Lie) -> None:
        parts = []
        for layouts, world in zip(lie, self.worlds, strict=True):
            padded = whole.new_zeros(buffer_shape(whole.shape, layouts, self.mesh, world.coordinate))
            real_part(padded, whole.shape, layouts, world).copy_(part(whole, layouts, world))
            parts.append(padded)
        self.stored[name], self.layouts[name] = parts, (lie, tuple(whole.shape))

    def whole(self, parts: Parts, lie: Lie) -> Tensor:
        """The whole tensor. The first axis cuts last, so it's joined first."""
        for axis, ranks in enumerate(self.mesh):
            rest = len(parts) // ranks
            parts = [join(parts[j::rest], lie[j][axis]) for j in range(rest)]
        return parts[0]

    def make_states(self, init: StepGraph) -> None:
        programs = self.compile(init)
        outputs = run_lockstep(programs, [self.inputs(program, [], rank) for rank, program in enumerate(programs)])
        for i, out in enumerate(init.outputs):
            if out.name not in self.stored:
                lie = lies(programs, i)
                assert lie is not None
                self.put(out.name, self.whole([o[i] for o in outputs], lie), lie)

    def add_state(self, name: str, whole: Tensor, lie: Lie) -> None:
        """A state that the step itself has made: the next call is another program."""
        model, optimizer = self.args[:2]
        owner, _, key = name.rpartition(".")
        optimizer.state[model.get_parameter(owner)][key] = whole
        self.put(name, whole, lie)
        self.stale = True

    # ---- one call

    def __call__(self, *args: Any) -> tuple[list[Any], list[Layouts | None]]:
        """What the user's function returns, whole, and how each of it lies on the ranks. `args` are the global arguments."""
        if self.stale:
            self.settle(self.capture())
        leaves = flatten_leaves(args, {})
        for key in self.keys.values():
            key.fill_(key_of(self.seed or 0, self.calls))
        self.calls += 1
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
                found.append(self.value(spec, slots[spec.name], node.meta["val"], layouts, leaves, rank))
        return found

    def value(
        self, spec: Input, slot: Slot, val: Any, layouts: Layouts | None, leaves: Sequence[Any], rank: int
    ) -> Any:
        if slot.container is not None:
            found = slot.container[slot.key]
        else:
            found = leaves[slot.leaf] if slot.leaf is not None else slot.tensor
        if isinstance(val, Tensor) and not isinstance(found, Tensor):
            return torch.tensor(found, dtype=val.dtype)
        return found if layouts is None else part(found.detach(), layouts, self.worlds[rank]).clone()

    def deliver(self, outputs: list[tuple[Any, ...]]) -> tuple[list[Any], list[Layouts | None]]:
        returned: list[Any] = []
        returned_lie: list[Layouts | None] = []
        for i, out in enumerate(self.captured.step.outputs):
            parts, lie = [o[i] for o in outputs], lies(self.programs, i)
            if out.role is Role.GRADIENT:
                assert lie is not None
                owner = out.parameter
                self.gradients[owner] = parts
                self.layouts[f"{owner}.grad"] = (lie, ())
            elif out.role is Role.STATE and out.updates is None:
                assert lie is not None
                self.add_state(out.name, self.whole(parts, lie), lie)
            elif out.role is Role.HYPER and out.updates is not None:
                self.written[self.captured.step.inputs[out.updates].name] = parts[0]
            elif out.role is Role.USER and out.updates is None:
                assert lie is None or not any(isinstance(x, Partial) for x in lie[0]), "a partial value is returned"
                returned.append(parts[0] if lie is None else self.whole(parts, lie))
                returned_lie.append(None if lie is None else lie[0])
        for owner in self.captured.cleared:
            self.gradients.pop(owner, None)
        return returned, returned_lie

    def state(self) -> Mapping[str, Tensor]:
        """Parameters, buffers, states and gradients, whole and by name."""
        found = {}
        for name, padded in self.stored.items():
            lie, shape = self.layouts[name]
            parts = [real_part(x, shape, mine, w) for x, mine, w in zip(padded, lie, self.worlds, strict=True)]
            found[name] = self.whole(parts, lie).clone()
        for owner, parts in self.gradients.items():
            found[f"{owner}.grad"] = self.whole(parts, self.layouts[f"{owner}.grad"][0])
        return found

    def give_back(self) -> None:
        """Put what the ranks hold into the objects that were captured, where the plain step would have left it."""
        values, made = self.state(), False
        tensors = {slot.input.name: slot.tensor for slot in self.captured.slots}
        for slot in self.captured.slots:
            spec = slot.input
            if spec.name in self.written and slot.container is not None:
                slot.container[slot.key] = self.written[spec.name]
            if spec.role is Role.STATE and slot.tensor is None:  # made by the program that makes states
                slot.tensor, made = values[spec.name], True
                self.captured.optimizers[spec.root].state[tensors[spec.owner]][spec.key] = slot.tensor
            elif spec.name in self.stored and slot.tensor is not None:
                slot.tensor.detach().copy_(values[spec.name])
            if spec.role is Role.PARAMETER and (spec.name in self.gradients or spec.name in self.captured.cleared):
                assert slot.tensor is not None
                slot.tensor.grad = values.get(f"{spec.name}.grad")
        if made:
            self.captured.guards.rebind({})


def lies(programs: Sequence[LocalGraph], output: int) -> Lie | None:
    """How an output lies, as each rank sees it; None for constants and numbers."""
    found = [x for program in programs if (x := program.outputs[output]) is not None]
    return found or None
