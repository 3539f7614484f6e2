"""Batch norm by the two policies: statistics of the whole batch, or of each rank's own share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spmd.errors import PlacementError
from spmd.modes import DataParallelMode
from tests.oracle import oracle, steps, tools
from tests.oracle import world as ranks

train = steps.basic(F.mse_loss)


class Normalized(nn.Module):
    """Two batch norms, one without running statistics. In training each works on `parts` pieces of the batch, and the running statistics are averaged."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.norm, self.bare = nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pieces(self.norm, self.first(x))
        return self.last(self.pieces(self.bare, torch.tanh(h)))

    def pieces(self, norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
        if self.parts == 1 or not self.training:
            return norm(x)
        outs, ends = [], []
        for part in x.chunk(self.parts):
            end = [None if v is None else v.clone() for v in (norm.running_mean, norm.running_var)]
            outs.append(F.batch_norm(part, *end, norm.weight, norm.bias, training=True))
            ends.append(end)
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked += 1
            for buffer, found in zip((norm.running_mean, norm.running_var), zip(*ends, strict=True), strict=True):
                buffer.copy_(sum(found) / self.parts)  # type: ignore[union-attr, arg-type]
        return torch.cat(outs)


@pytest.mark.parametrize("style", oracle.STYLES)
@pytest.mark.parametrize("W", [2, 3])
def test_local_statistics_are_each_ranks_own(world: ranks.World, style: str, W: int) -> None:
    world.run(_local, W, style)


def _local(style: str) -> None:
    W = ranks.size()
    expected = tools.continue_alone(*tools.setup(build=lambda: Normalized(W)), train, range(3), W)
    model, optimizer = tools.setup(build=lambda: Normalized(1))
    step = tools.compile(train, style, buffers="local")
    for seed in range(3):
        step(model, optimizer, *tools.batch(seed=seed))
    tools.assert_equal(expected, tools.state_of(model, optimizer))
    moved = [c for c in step.explain(model, optimizer, *tools.batch()).collectives if c.role == "value"]
    assert all(c.value.startswith(("getitem", "sum", "mse", "mean", "div")) or c.nbytes < 64 for c in moved)


def test_evaluation_is_the_same_by_both(world: ranks.World) -> None:
    world.run(_evaluates, 2)


def _evaluates() -> None:
    found = []
    for buffers in ("global", "local"):
        model, _ = tools.setup(build=lambda: Normalized(1))
        model.norm.running_mean.fill_(0.5)  # type: ignore[union-attr, operator]
        model.eval()
        model.bare.train()
        model.bare.eval()
        found.append(
            tools.compile(lambda model, x: model.first(x) + model.norm(model.first(x)).sum(1, True), buffers=buffers)(
                model, tools.batch()[0]
            )
        )
    torch.testing.assert_close(*found)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(PlacementError, match="'mine' is unknown"):
        DataParallelMode(buffers="mine")  # type: ignore[arg-type]
