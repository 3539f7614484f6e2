"""Programs that once failed: found by the fuzzer, made small, kept. One alone: `python -m pytest tests/test_regressions.py -k NAME`."""

from __future__ import annotations

import pytest

from tests.fuzz.check import check
from tests.fuzz.program import Program, do

LINEAR = do("linear", 0, out=4, bias=True)

FIXED: dict[str, Program] = {
    "one_sample_split_then_std": Program((4,), (LINEAR, do("std", 1, dims=(1,), correction=1)), samples=1, parts=2),
    "cholesky_of_an_inner_batch": Program((2, 5, 4), (LINEAR, do("cholesky", 1)), samples=1, dim=1),
}

# Refused, for a reason that the message has to give.
REFUSED: dict[str, tuple[str, Program]] = {
    "batch_norm_recomputed": (
        "recomputing it would write again",
        Program((5,), (LINEAR, do("batch_norm", 1, running=True, affine=True)), recompute=True),
    ),
}


@pytest.mark.parametrize("program", FIXED.values(), ids=list(FIXED))
def test_equals_one_device(program: Program) -> None:
    finding = check(program)
    assert finding.kind == "equal", finding


@pytest.mark.parametrize(("reason", "program"), REFUSED.values(), ids=list(REFUSED))
def test_is_refused(reason: str, program: Program) -> None:
    finding = check(program)
    assert finding.kind == "refused" and reason in str(finding)
