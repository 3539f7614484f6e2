"""What all tests have: the pool of gloo workers, and numbers of their own that are the same in every run."""

import gc
import importlib
import os
import sys
import tomllib
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.oracle.world import World

os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.set_threshold(
    100_000, 20, 20
)  # tracing makes many objects that live on: looking through them all the time is a tenth of the run
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


SAMPLE = Path(__file__).parent / "plugins" / "sample"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The sample package, installed as far as importlib can tell: on the path, with the metadata that its pyproject declares. Yields the metadata's folder."""
    project = tomllib.loads((SAMPLE / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]
    folder = tmp_path / "spmd_sample-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: spmd-sample\nVersion: 1.0\n")
    lines = [
        line for group, names in points.items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(SAMPLE))
    importlib.invalidate_caches()
    yield folder
    for module in project["tool"]["setuptools"]["py-modules"]:
        sys.modules.pop(module, None)
