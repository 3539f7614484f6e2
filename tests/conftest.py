"""Session fixtures: the pool of gloo workers."""

import os
from collections.abc import Iterator

import pytest

from tests.oracle.world import World

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    pool = World()
    yield pool
    pool.close()
