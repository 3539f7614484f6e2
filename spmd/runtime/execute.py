"""Executor: runs a local graph as generated Python. Storage is bound once; a call fills in the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from spmd._torch import below_autograd, pytree
from spmd.capture.objects import successor
from spmd.capture.result import Slot
from spmd.errors import InputError, Offence
from spmd.graph.local import Layouts, LocalGraph
from spmd.graph.memory import roots, written
from spmd.graph.step import STORED, Input, Output, Role
from spmd.runtime.binding import Binding
from spmd.runtime.generate import generate
from spmd.runtime.storage import Misplaced, local_part, part_shape, placements_of
from spmd.runtime.world import World

Fill = Callable[[Sequence[Any]], Any]  # today's value of an argument, from the leaves of the call; local to this rank


class Settle(Protocol):
    def __call__(self, moved: str = "") -> None: ...


class Executor:
    """One program of one rank, bound to its storage.

    `local` is the step's program or the one that makes its optimizer state: inputs are found by name.
    """

    def __init__(self, local: LocalGraph, binding: Binding, out_spec: pytree.TreeSpec | None = None) -> None:
        """`out_spec` is the structure of the user's return value; None for a program that makes state."""
        self.local, self.binding, self.out_spec = local, binding, out_spec
        self.run = generate(local.graph, local.module)
        self.takes_settle = any(n.target == "settle" for n in local.graph.find_nodes(op="placeholder"))
        self.arguments: list[Any] = []
        self.fills: list[tuple[int, Fill]] = []
        self.checks: list[tuple[int, torch.Size, str]] = []  # argument, its shape on this rank, its name
        self.slots = slots = {slot.input.name: slot for slot in binding.capture.slots}
        for spec, node, layouts in zip(local.step.inputs, local.step.placeholders, local.inputs, strict=True):
            if spec.role in STORED:
                self.arguments.append(binding.storages[spec.name].buffer)
            else:
                self.arguments.append(None)
                self.fills.append(
                    (len(self.arguments) - 1, self._fill(spec, slots.get(spec.name), node.meta["val"], layouts))
                )
        root = roots(local.graph)
        changed = {root[x] for node in local.graph.nodes for x in written(node)}
        placeholders = local.graph.find_nodes(op="placeholder", sort=True)
        self.written = [x for x, node in zip(self.arguments, placeholders, strict=False) if node in changed]
        self.outputs = tuple(zip(local.step.outputs, local.step.results, local.outputs, strict=True))
        self.cleared = binding.capture.cleared if out_spec is not None else ()

    def __call__(self, leaves: Sequence[Any] = (), settle: Settle = lambda moved="": None) -> Any:
        """Run one step on this rank.

        Args:
            leaves: the flattened arguments of the call, as `capture.arguments.flatten_leaves` gives them.
            settle: waits until all ranks are known to run this program, and to redistribute the same inputs first.
        Returns:
            What the user's function returns, on this rank.
        Raises:
            InputError: a tensor doesn't have the shape of this rank's share.
        """
        with torch.no_grad():
            arguments = self.arguments.copy()
            for i, fill in self.fills:
                arguments[i] = fill(leaves)
            self._move(arguments, settle)
            self._check(arguments)
            if self.takes_settle:
                arguments.append(settle)
            with below_autograd():  # nothing here needs it, and it costs each op a dispatch
                results = list(self.run(*arguments))
            increment_version(self.written)
            return self._deliver(results, leaves)

    # ------------------------------------------------------------------------------------------------- inputs

    def _fill(self, spec: Input, slot: Slot | None, val: Any, layouts: Layouts | None) -> Fill:
        binding, world = self.binding, self.binding.world
        if spec.role is Role.GRADIENT:
            return lambda leaves: binding.gradient(spec.owner)
        assert slot is not None, f"no slot for {spec.name}"
        if slot.container is not None:
            container, key = slot.container, slot.key
            return _number(lambda leaves: container[key], val)
        if slot.leaf is None:
            free = slot.tensor  # closed over: no module holds it
            assert free is not None
            return lambda leaves: local_part(successor(free).detach(), layouts, world) if layouts is not None else free
        leaf = slot.leaf
        if not isinstance(val, torch.Tensor):
            return lambda leaves: leaves[leaf]
        if layouts is None:
            return _number(lambda leaves: leaves[leaf], val)
        self.checks.append((len(self.arguments) - 1, torch.Size(part_shape(val.shape, layouts, world)), spec.name))
        return _local_of(leaf, layouts, world)

    def _move(self, arguments: list[Any], settle: Settle) -> None:
        """Redistribute what lies elsewhere than the program takes it: collective, so the ranks agree on it first."""
        inputs = self.local.step.inputs
        elsewhere = [i for i, _ in self.fills if isinstance(arguments[i], Misplaced)]
        if elsewhere:
            settle(", ".join(f"{inputs[i].name} comes as {arguments[i].value.placements}" for i in elsewhere))
        for i in elsewhere:
            arguments[i] = arguments[i].moved(self.binding.world)

    def _check(self, arguments: Sequence[Any]) -> None:
        world = self.binding.world
        wrong = [(arguments[i], shape, name) for i, shape, name in self.checks if arguments[i].shape != shape]
        if wrong:
            raise InputError(
                Offence(
                    f"its shape is {tuple(x.shape)}, not {tuple(shape)} as for rank {world.rank} of {world.size}",
                    fqn=name,
                    remedy="pass each rank its own share of the batch, cut as torch.chunk cuts the whole",
                )
                for x, shape, name in wrong
            )

    # ------------------------------------------------------------------------------------------------- outputs

    def _deliver(self, results: list[Any], leaves: Sequence[Any]) -> Any:
        """Put gradients and new states where they belong; what the user returns is the return value."""
        binding, inputs = self.binding, self.local.step.inputs
        returned: list[Any] = []
        for i, (out, node, layouts) in enumerate(self.outputs):
            value, results[i] = results[i], None  # new states are copied into their storage: hold one at a time
            if out.role is Role.GRADIENT:
                binding.set_gradient(owner_of(out, inputs), value)
            elif out.role is Role.STATE and out.updates is None:
                binding.add_state(out.name, value, layouts or (), node.meta["val"])
            elif out.updates is not None and out.role in (Role.USER, Role.HYPER):
                self._write_to(inputs[out.updates].name, value, node, layouts, leaves)
            elif out.role is Role.USER:
                returned.append((out, value))
        for owner in self.cleared:
            binding.set_gradient(owner, None)
        if self.out_spec is None:
            return None
        return pytree.tree_unflatten([self._user(out, value) for out, value in returned], self.out_spec)

    def _write_to(self, name: str, value: Any, node: Any, layouts: Layouts | None, leaves: Sequence[Any]) -> None:
        """An argument, an outer tensor or a hyper-parameter that the step wrote to gets its new value: tensors in place."""
        slot = self.slots[name]
        if not isinstance(value, torch.Tensor):
            slot.container[slot.key] = value  # type: ignore[index]
            return
        target: Any = leaves[slot.leaf] if slot.leaf is not None else slot.tensor
        if slot.container is not None:
            target = slot.container[slot.key]
        if isinstance(target, DTensor):
            target = successor(target)
            lies = placements_of(name, layouts or (), target.shape, self.binding.world)
            if target.placements != lies:
                whole = node.meta["val"]
                new = DTensor.from_local(
                    value, target.device_mesh, lies, run_check=False, shape=whole.shape, stride=whole.stride()
                )
                value = new.redistribute(placements=target.placements).to_local()
            target = target.to_local()
        target.detach().copy_(value)

    def _user(self, out: Output, value: Any) -> Any:
        storages = self.binding.storages
        if out.alias_of:
            return storages[out.alias_of].tensor
        if not out.grad_of or not isinstance(value, torch.Tensor) or storages[out.grad_of].mesh is None:
            return value
        live = storages[out.grad_of].tensor.grad
        if isinstance(live, DTensor) and live.to_local() is value:
            return live
        return storages[out.grad_of].like(value)


def owner_of(out: Output, inputs: Sequence[Input]) -> str:
    """The parameter that a GRADIENT output belongs to."""
    if out.grad_of:
        return out.grad_of
    return inputs[out.updates].owner if out.updates is not None else out.name.removesuffix(".grad")


def _local_of(leaf: int, layouts: Layouts, world: World) -> Fill:
    def local(leaves: Sequence[Any]) -> Any:
        value = leaves[leaf]
        if isinstance(value, DTensor):
            return local_part(value.detach(), layouts, world)
        return value.detach() if value.requires_grad else value

    return local


def _number(read: Fill, val: Any) -> Fill:
    """A number as the graph takes it: a tensor of `val`'s type, made anew only when the number changes."""
    if not isinstance(val, torch.Tensor):
        return read
    last: list[Any] = [None, None]

    def tensor(leaves: Sequence[Any]) -> torch.Tensor:
        value = read(leaves)
        if isinstance(value, torch.Tensor):
            return value.detach()
        if last[1] is None or value != last[0]:
            last[:] = value, torch.tensor(value, dtype=val.dtype, device=val.device)
        return last[1]

    return tensor
