"""The compiled step equals the undecorated one on one device: every case, both styles, W = 1, 2, 3, 4.

One case alone, in the foreground: `python -m tests.oracle.run CASE STYLE W`.
"""

from collections.abc import Iterator

import pytest

from tests.oracle import oracle
from tests.oracle.cases import CASES, REPRESENTATIVE
from tests.oracle.world import World

WORLDS = (1, 2, 3, 4)
UNEVEN = 3  # the world size at which every case runs


def _matrix() -> Iterator[object]:
    """W=3 for all, the other sizes and one sample a rank for a few; the rest only in `make test-all`."""
    for W in (UNEVEN, 1, 2, 4):
        for name in CASES:
            usual = W == UNEVEN or name in REPRESENTATIVE
            yield pytest.param(name, W, None, id=f"{name}-{W}", marks=() if usual else pytest.mark.slow)
    for name, case in CASES.items():
        for W in WORLDS:
            if case.samples == (2,):  # other numbers of samples are the point of their case
                usual = W == 2 and name in REPRESENTATIVE
                yield pytest.param(name, W, 1, id=f"{name}-{W}-single", marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize("style", oracle.STYLES)
@pytest.mark.parametrize(("name", "W", "samples"), list(_matrix()))
def test_equals_one_device(world: World, name: str, W: int, samples: int | None, style: str) -> None:
    needs = CASES[name].needs
    if needs and not oracle.has(needs):
        pytest.skip(f"needs {needs}")
    world.run(oracle.check, W, name, style, W, samples)
