"""What all tests have: the pool of gloo workers, and numbers of their own that are the same in every run."""

import os
import zlib
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.oracle.world import World

os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile(
    "same", derandomize=True
)  # a run that fails by chance tells nobody anything: searches are `tests.fuzz`
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    pool = World()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
