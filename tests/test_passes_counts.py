"""How many collectives a step has under the default passes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from spmd.graph.local import LocalGraph
from spmd.modes import DataParallelMode
from tests import programs


def train(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def accumulate(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
        F.mse_loss(model(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()


class Twice(nn.Module):
    """Two calls of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).relu())


def optimized(
    step: Any, model: nn.Module, style: str, W: int = 2, passes: str = "default", samples: int = 6
) -> LocalGraph:
    width = next(model.parameters()).shape[-1]
    args = (model, optim.AdamW(model.parameters(), fused=True), torch.rand(samples, width), torch.rand(samples, width))
    return programs.apply(passes, [programs.first(DataParallelMode(style), step, args, W)])[0]


def ops(graph: LocalGraph) -> Counter[str]:
    return Counter(c.op for c in graph.collectives)


@pytest.mark.parametrize("W", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_fifty_tiny_parameters_are_reduced_at_once(W: int) -> None:
    """The loss goes with them."""
    graph = optimized(train, nn.Sequential(*(nn.Linear(4, 4) for _ in range(25))), "replicate", W)
    assert ops(graph) == Counter(all_reduce=1)
    (bucket,) = graph.collectives
    assert len(bucket.members) == 51


LARGE = (
    "dedup,regather{keep_mb=0},bucket{first_mb=0,cap_mb=0,gather_mb=0},fuse,overlap"  # no two blocks fit in a bucket
)


def deep(blocks: int) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    return nn.Sequential(*(block() for _ in range(blocks)))


@pytest.mark.parametrize("W", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_large_block_is_gathered_twice_and_reduced_once(W: int) -> None:
    graph = optimized(train, deep(12), "fully_shard", W, LARGE)
    blocks = [Counter(c.op for c in graph.collectives if c.fqn.startswith(f"{i}.")) for i in range(12)]
    assert all(b == Counter(all_gather=2, reduce_scatter=1) for b in blocks[:-1])
    assert blocks[-1]["reduce_scatter"] == 1 and blocks[-1]["all_gather"] <= 2
    assert ops(graph)["all_reduce"] == 1  # the loss


def test_small_blocks_share_their_collectives() -> None:
    assert ops(optimized(train, deep(12), "fully_shard")) == Counter(all_gather=1, reduce_scatter=1, all_reduce=1)


@pytest.mark.parametrize(
    ("style", "passes"), [("replicate", "default"), ("fully_shard", "default"), ("fully_shard", LARGE)]
)
def test_micro_batches_need_no_more(style: str, passes: str) -> None:
    once, thrice = (ops(optimized(step, deep(3), style, passes=passes)) for step in (train, accumulate))
    for op in ("all_gather", "reduce_scatter") if style == "fully_shard" else ("all_reduce",):
        assert 0 < thrice[op] <= once[op]


def test_a_module_called_twice_is_gathered_once() -> None:
    graph = optimized(train, Twice(), "fully_shard")
    assert ops(graph) == Counter(all_gather=1, reduce_scatter=1, all_reduce=1)


def test_equal_collectives_are_one() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return x.exp().sum() * 2, x.exp().sum() * 3  # type: ignore[return-value]

    graphs = programs.programs(step, (nn.Linear(2, 2), torch.rand(2, 2)), "replicate", 2)
    assert len(graphs[0].collectives) == 2 and len(programs.apply("bucket", graphs)[0].collectives) == 1
