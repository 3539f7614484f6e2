"""A program on real ranks: compiled by the whole of spmd, against the oracle of tests/oracle."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.program import Program
from tests.oracle import oracle
from tests.oracle.case import Case


def case(program: Program) -> Case:
    def batch(size: int) -> tuple[Any, ...]:
        return program.arguments(size, int(torch.randint(1 << 30, ())))

    return Case(
        name=repr(program),
        model=program.model,
        step=program.step(),
        batch=batch,
        optim=program.optim,
        samples=(program.samples,),
        steps=program.steps,
        dim=program.dim,
        outputs=(None, None, carried(program) if program.returns else None),  # the loss, the norm, the last value
    )


def carried(program: Program) -> int | None:
    """The dim of the last value that carries the batch, if it comes back as a rank's share: one dim alone, a multiple of the batch."""
    if program.parts > 1:  # of a micro-batch
        return None
    sizes = program.batch, 11 * program.world
    model = program.model()
    with torch.no_grad(), torch.random.fork_rng():
        here, there = (model(program.arguments(n, 1)[0])[-1].shape for n in sizes)
    dims = [d for d, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]
    if len(dims) != 1:
        return None
    (d,) = dims
    return d if here[d] * sizes[1] == there[d] * sizes[0] and here[d] % sizes[0] == 0 else None


def check_here(program: Program) -> float:
    """Runs on a rank. Raises AssertionError where the ranks differ from one device."""
    torch.set_default_dtype(torch.float64)
    return oracle.check_case(case(program), program.style, program.world)
