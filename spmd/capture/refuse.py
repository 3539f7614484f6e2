"""Turns what goes wrong while tracing into our errors, with the user's line and a remedy."""

from __future__ import annotations

from spmd._torch import DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode
from spmd.capture.objects import Objects
from spmd.capture.provenance import user_line
from spmd.errors import CaptureError, Offence, SpmdError

_BRANCH = "compute both sides and choose with torch.where, or move the decision out of the step"


def explain(error: BaseException, objects: Objects, local_batch: int | None, batch: int | None) -> SpmdError:
    """The error to raise for an exception that the user's step raised while traced."""
    if isinstance(error, SpmdError):
        return error
    line = str(user_line(error) or "")
    if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)):
        return CaptureError(
            Offence(
                "Python control flow depends on the value of a traced tensor (.item(), bool(), float(), .tolist())",
                where=line,
                remedy=_BRANCH,
            )
        )
    if isinstance(error, DynamicOutputShapeException):
        return CaptureError(
            Offence(
                f"{error.func}: the shape of its result depends on values",
                where=line,
                remedy="use torch.where or a mask",
            )
        )
    held = [
        t.name
        for t in objects.tensors.values()
        if local_batch is not None and local_batch in tuple(t.tensor.shape) and local_batch != batch
    ]
    remedy = "run the undecorated step on the global batch: what fails there fails here"
    if held:
        remedy = f"{', '.join(held[:3])} has a dim of size {local_batch}, this rank's batch; the step is traced at the global batch {batch}: size it by the global batch"
    return CaptureError(
        Offence(
            f"the step raises {type(error).__name__} while traced: {str(error).strip()[:600]}",
            where=line,
            remedy=remedy,
        )
    )
