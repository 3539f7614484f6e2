"""Session fixtures: the pool of gloo workers."""

import os
from collections.abc import Iterator

import pytest

from tests.oracle.world import World

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs only in `make test-all`")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    pool = World()
    yield pool
    pool.close()
