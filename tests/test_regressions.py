"""Programs that once failed: found by the fuzzer, made small, kept. One alone: `python -m pytest tests/test_regressions.py -k NAME`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fuzz.check import check
from tests.fuzz.program import Program, do

LINEAR = do("linear", 0, out=4, bias=True)

FIXED: dict[str, Program] = {
    "one_sample_split_then_std": Program((4,), (LINEAR, do("std", 1, dims=(1,), correction=1)), samples=1, parts=2),
    "cholesky_of_an_inner_batch": Program((2, 5, 4), (LINEAR, do("cholesky", 1)), samples=1, dim=1),
}

# name: (what is wrong, the program). Once it's right it moves up; strict marks see to that.
OPEN: dict[str, tuple[str, Program]] = {
    "batch_norm_recomputed": (
        "a checkpoint region's updates of buffers happen once, eager's twice",
        Program((5,), (LINEAR, do("batch_norm", 1, running=True, affine=True)), recompute=True),
    ),
}


def _programs() -> Iterator[Any]:
    for name, program in FIXED.items():
        yield pytest.param(program, id=name)
    for name, (reason, program) in OPEN.items():
        yield pytest.param(program, id=name, marks=pytest.mark.xfail(strict=True, reason=reason))


@pytest.mark.parametrize("program", list(_programs()))
def test_equals_one_device(program: Program) -> None:
    finding = check(program)
    assert finding.kind == "equal", finding
