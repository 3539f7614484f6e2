"""Modules that are traced in the place of submodules, and put away after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from spmd.capture.objects import Objects, joined
from spmd.errors import InputError, Offence

Replacement = Callable[[str, nn.Module], nn.Module]


@dataclass
class StandIns:
    """For each: the module that holds it, under which key, and what's traced instead."""

    places: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        before = [(parent, key, parent._modules[key]) for parent, key, _ in self.places]
        try:
            for parent, key, new in self.places:
                parent._modules[key] = new
            yield
        finally:
            for parent, key, old in before:
                parent._modules[key] = old


def stand_ins(objects: Objects, replacements: Sequence[Replacement]) -> StandIns:
    """Ask `replacements` about every submodule, from the outside in; not about what is within one that's replaced.

    Raises:
        InputError: a replacement isn't a module, or has parameters or buffers that the model doesn't have.
    """
    found, offences, seen = StandIns(), list[Offence](), set[int]()

    def visit(fqn: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        for key, child in module._modules.items():
            if child is None:
                continue
            name = joined(fqn, key)
            new = next((new for r in replacements if (new := r(name, child)) is not child), child)
            if new is child:
                visit(name, child)
            elif problem := unfit(objects, new):
                offences.append(
                    Offence(f"its replacement {problem}", fqn=name, remedy="build it of the module's own tensors")
                )
            else:
                new.training = child.training
                found.places.append((module, key, new))

    if replacements:
        for root, module in objects.modules.items():
            visit(objects.qualify(root, ""), module)
    if offences:
        raise InputError(offences)
    return found


def unfit(objects: Objects, new: Any) -> str:
    """What is wrong with a replacement; "" if nothing is."""
    if not isinstance(new, nn.Module):
        return f"is no module but {new!r}"
    held = [*new.named_parameters(), *new.named_buffers()]
    own = [name for name, tensor in held if objects.named(tensor) is None]
    return f"has {', '.join(own)}, which the model doesn't have" if own else ""
