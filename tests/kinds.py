"""A step of any kind held to the oracle on all ranks in this process: captured once, cut for every style and number of ranks, run in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spmd.modes import DataParallelMode
from tests.fuzz.check import state_of
from tests.fuzz.ranks import Ranks
from tests.oracle.oracle import distance, mismatch

Step = Callable[..., Any]
BATCH = 6  # samples, on 2 ranks and on 3
STYLES = ("replicate", "fully_shard", "default", "zero1", "zero2")
ALL = tuple((style, W) for style in STYLES for W in (2, 3))
SOME = (("replicate", 2), ("fully_shard", 3), ("default", 2), ("zero1", 3))  # each number of ranks in two styles
ENDS = (("replicate", 3), ("fully_shard", 2))


def regression(turn: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + turn)
    return tuple(torch.randn(BATCH, n, generator=generator, dtype=torch.float64) for n in (5, 3))  # type: ignore[return-value]


def hold(
    build: Callable[[], tuple[nn.Module, Optimizer]],
    step: Step,
    batch: Callable[[int], tuple[Any, ...]] = regression,
    layouts: Iterable[tuple[str, int]] = SOME,
    turns: int = 3,
    tolerance: float = 1e-9,
) -> None:
    """The compiled step, on every (style, ranks) of `layouts`, gives what the plain one gives: outputs, parameters, buffers, states, gradients.

    build: a model and an optimizer, equal at every call.
    """
    torch.set_default_dtype(torch.float64)
    try:
        expected = plain(build, step, batch, turns)
        captured = None
        for style, W in layouts:
            mode = DataParallelMode(style, min_numel=20 if style == "default" else None)
            model, optimizer = build()
            shares = [x.chunk(W)[0] if isinstance(x, Tensor) and x.dim() else x for x in batch(0)]
            ranks = Ranks(step, (model, optimizer, *shares), mode, (W,), BATCH, "none", captured)
            captured = ranks.captured
            torch.manual_seed(5)
            outputs = [ranks(model, optimizer, *batch(turn))[0] for turn in range(turns)]
            compare(expected, outputs, ranks.state(), f"{style}, {W} ranks", tolerance)
    finally:
        torch.set_default_dtype(torch.float32)


def plain(build: Any, step: Step, batch: Any, turns: int) -> tuple[list[Any], dict[str, Tensor]]:
    """The oracle: outputs of each turn, and the state afterwards by the names that `Ranks` gives it."""
    model, optimizer = build()
    torch.manual_seed(5)
    outputs = []
    for turn in range(turns):
        leaves = torch.utils._pytree.tree_leaves(step(model, optimizer, *batch(turn)))
        outputs.append([x.detach().clone() if isinstance(x, Tensor) else x for x in leaves])
    return outputs, state_of(model, optimizer)


def compare(expected: Any, outputs: list[Any], state: Any, title: str, tolerance: float) -> None:
    pairs = {
        f"turn {turn} output {i}": pair
        for turn, (a, b) in enumerate(zip(expected[0], outputs, strict=True))
        for i, pair in enumerate(zip(a, b, strict=True))
    }
    pairs |= {name: (x, state[name]) for name, x in expected[1].items()}
    wrong = [f"{name}: {text}" for name, pair in pairs.items() if (text := mismatch(*pair))]
    assert not wrong, f"{title}: {wrong}"
    off = {name: distance(a, b, 0.02) for name, (a, b) in pairs.items() if isinstance(a, Tensor)}
    assert all(x <= tolerance for x in off.values()), f"{title}: {[(k, x) for k, x in off.items() if x > tolerance]}"
