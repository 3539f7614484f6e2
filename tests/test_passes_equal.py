"""Every pass, alone and in the usual pipeline, leaves what real steps compute, bit for bit where sums keep their order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from spmd.graph.verify import verify_ranks
from tests import programs
from tests.oracle import models

# In lockstep a sum over ranks adds in their order, whatever it is packed with: so rounding is the same too.
PASSES = (
    "dedup",
    "regather{keep_mb=0}",
    "bucket",
    "fuse",
    "overlap",
    "overlap{max_in_flight_mb=0}",
    "default",
    "dedup,regather{keep_mb=0},bucket{first_mb=0,cap_mb=0,gather_mb=0},fuse,overlap{prefetch=2}",
    "overlap,bucket,dedup,fuse",
)


def regression(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def classification(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def mlp() -> tuple[Any, ...]:
    model = models.mlp()  # 3 rows of 7: on 4 ranks it's split by columns
    optimizer = optim.AdamW(model.parameters(), 0.01, fused=True, amsgrad=True)
    return regression, (model, optimizer, torch.rand(2, 5), torch.rand(2, 3))


def momentum() -> tuple[Any, ...]:
    model = models.mlp(dropout=0.5)
    return regression, (model, optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.rand(2, 5), torch.rand(2, 3))


def gpt() -> tuple[Any, ...]:
    model = models.GPT()
    optimizer = optim.AdamW(model.parameters(), 0.01, fused=True)
    return classification, (model, optimizer, torch.randint(0, 4, (1, 4)), torch.randint(0, 4, (1, 4)))


def cnn() -> tuple[Any, ...]:
    model = models.CNN(batch_norm=True)
    optimizer = optim.Adam(model.parameters(), 0.01)
    return classification, (model, optimizer, torch.rand(2, 3, 8, 8), torch.randint(0, 3, (2,)))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("build", "style", "W"),
    [
        (mlp, "replicate", 3),
        (mlp, "fully_shard", 2),
        (momentum, "fully_shard", 3),
        (cnn, "fully_shard", 2),
        pytest.param(mlp, "fully_shard", 4, marks=SLOW),
        pytest.param(gpt, "fully_shard", 3, marks=SLOW),
        pytest.param(cnn, "fully_shard", 3, marks=SLOW),
        pytest.param(gpt, "replicate", 2, marks=SLOW),
        pytest.param(gpt, "fully_shard", 2, marks=SLOW),
        pytest.param(cnn, "replicate", 2, marks=SLOW),
        pytest.param(mlp, "fully_shard", 3, marks=SLOW),
        pytest.param(momentum, "replicate", 2, marks=SLOW),
    ],
)
def test_passes_leave_what_a_step_computes(build: Callable[[], tuple[Any, ...]], style: str, W: int) -> None:
    torch.manual_seed(0)
    step, args = build()
    plain = programs.programs(step, args, style, W)
    torch.manual_seed(1)
    expected = programs.results([programs.copied(g) for g in plain])
    for passes in PASSES:
        changed = programs.apply(passes, [programs.copied(g) for g in plain])
        verify_ranks(changed)
        torch.manual_seed(1)
        found = programs.results(changed)
        wrong = [
            i
            for i, (a, b) in enumerate(zip(expected, found, strict=True))
            if isinstance(a, Tensor) and not torch.equal(a, b)
        ]
        assert not wrong, (passes, wrong)
