"""Architectures as people train them are equal to one device, and their activations stay where they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.oracle.oracle import has
from tests.zoo.check import Report, check
from tests.zoo.models import ZOO

pytestmark = [
    pytest.mark.skipif(not has("transformers"), reason="needs transformers"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and of what it imports
]

ONE_OF_EACH = ("mixtral", "dit")  # 3 ranks, fully_shard: seconds each


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_one_of_each_kind(name: str) -> None:
    holds(check(ZOO[name], [3], ["fully_shard"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_architecture(name: str) -> None:
    holds(check(ZOO[name]))


def holds(report: Report) -> None:
    if report.architecture.refused:
        assert report.result == "refused" and report.architecture.refused in report.detail, report.detail
        return
    assert report.result == "equal", report.detail
    assert report.fallback_share < 0.01, report.fallbacks
    assert report.architecture.mixes or not report.gathers, "\n".join(report.gathers)
