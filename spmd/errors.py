"""Every exception of spmd, one meaning each. docs/errors.md has a section for each class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Offence:
    """One thing that is wrong: what it is, where it is, what was tried, and what to do about it."""

    what: str
    where: str = ""  # "file.py:12 in train_step: loss = ..."
    fqn: str = ""  # the tensor's name, where it has one
    tried: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("tensor", self.fqn), ("at", self.where), ("tried", self.tried), ("fix", self.remedy)):
            if text:
                lines.append(f"    {label}: {text}")
        return "\n".join(lines)


class SpmdError(Exception):
    """Base of all. `offences` lists everything that is wrong, not only the first."""

    summary = "the step can't be compiled"

    def __init__(self, offences: Offence | str | Iterable[Offence | str]) -> None:
        if isinstance(offences, (Offence, str)):
            offences = [offences]
        self.offences = tuple(Offence(o) if isinstance(o, str) else o for o in offences)
        super().__init__(self.offences)  # args stay picklable: errors cross process boundaries

    def __str__(self) -> str:
        head = f"{self.summary} (docs/errors.md#{type(self).__name__.lower()})"
        return "\n".join([head, *(f"  - {o!s}" for o in self.offences)])


class CaptureError(SpmdError):
    """The step does something that one graph can't hold: control flow on values, data-dependent shapes, LBFGS."""

    summary = "the step can't be captured as one graph"


class SideEffectError(SpmdError):
    """The step changes Python state (counters, schedulers, random generators) that a compiled call would not."""

    summary = "the step has Python side effects that a compiled call would not repeat"


class InputError(SpmdError):
    """The arguments of a call can't be a share of one global batch."""

    summary = "the step's arguments can't be placed on the mesh"


class StateError(SpmdError):
    """Modules, optimizers and their tensors don't belong together, or live on another device than the mesh."""

    summary = "the model's or the optimizer's state can't be placed on the mesh"


class StaleError(SpmdError):
    """An object from before compilation, or a parameter that is sharded now, was used as if it were whole."""

    summary = "this tensor no longer holds the model's values"


class AgreementError(SpmdError):
    """The ranks don't agree: on the program, the batch, the state they start from, or whether to go on."""

    summary = "the ranks disagree"


class PlacementError(SpmdError):
    """No exact placement exists for a tensor under the mode's constraints."""

    summary = "a tensor can't be placed exactly"


class PassError(SpmdError):
    """A graph pass is unknown, misordered, or broke the graph."""

    summary = "the pass pipeline is broken"


class VerifyError(SpmdError):
    """A graph breaks an invariant of its kind: a defect of spmd, of a mode or of a pass."""

    summary = "the graph breaks an invariant"
