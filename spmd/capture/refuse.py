"""Turns what goes wrong while tracing into our errors, with the user's line and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spmd._torch import DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode
from spmd.capture.objects import Objects
from spmd.capture.provenance import user_line
from spmd.errors import CaptureError, Offence, SpmdError

_BRANCH = (
    "compute both sides and choose with torch.where, say sizes as numbers (F.one_hot(y, num_classes)), "
    "or move the decision out of the step"
)

# Part of the message -> what it means, and the remedy.
_KNOWN = {
    "TorchScript": ("TorchScript functions can't be traced", "call the Python function that was scripted"),
    ".numpy()": (
        "a traced tensor has no values for numpy",
        "write it in torch, or do it outside the step and pass the result in",
    ),
    "FunctionalTensor on its own": (
        "torch.cond and the like can't be traced",
        "compute both sides and choose with torch.where",
    ),
    "NestedInt": ("nested tensors can't be traced", "pad the samples to one length and mask the rest"),
}


def explain(
    error: BaseException, objects: Objects, local_batch: int | None, batch: int | None, runs_at: Callable[[int], bool]
) -> SpmdError:
    """The error to raise for an exception that the user's step raised while traced.

    `runs_at` tells whether the step can be traced at another batch size.
    """
    if isinstance(error, SpmdError):
        return error
    line = str(user_line(error) or "")
    if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)):
        what = "the course of the step depends on the value of a traced tensor: Python control flow, .item(), bool(), float(), .tolist(), or a size that an op finds by itself"
        return CaptureError(Offence(what, where=line, remedy=_BRANCH))
    if isinstance(error, DynamicOutputShapeException):
        what = f"{error.func}: the shape of its result depends on values"
        return CaptureError(Offence(what, where=line, remedy="use torch.where or a mask"))
    text = str(error).strip()
    for part, (what, remedy) in _KNOWN.items():
        if part in text or part in type(error).__name__:
            return CaptureError(Offence(f"{what}: {text[:200]}", where=line, remedy=remedy))
    remedy = "run the undecorated step on the global batch: what fails there fails here"
    if local_batch is not None and batch is not None and local_batch != batch and runs_at(local_batch):
        held = [t.name for t in objects.tensors.values() if local_batch in tuple(t.tensor.shape)]
        which = f"{', '.join(held[:3])} has a dim of size {local_batch}; " if held else ""
        remedy = f"it runs at {local_batch}, this rank's batch, but is traced at the global batch {batch}: {which}size it by the global batch"
    return CaptureError(
        Offence(f"the step raises {type(error).__name__} while traced: {text[:600]}", where=line, remedy=remedy)
    )


def located(error: SpmdError) -> SpmdError:
    """`error` with the user's line where an offence has none."""
    line = str(user_line(error) or "")
    return type(error)(replace(o, where=o.where or line) for o in error.offences)
