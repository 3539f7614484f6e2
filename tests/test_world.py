"""The test world itself: results, failures, deaths and hangs, each without harm to the next job."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.oracle import world as world_module
from tests.oracle.world import RanksFailed, World


def _sum_of_ranks(scale: int) -> float:
    total = torch.tensor(float(world_module.rank()))
    if world_module.size() > 1:
        dist.all_reduce(total)
    torch.set_default_dtype(torch.float64)
    return float(total) * scale


def _one_raises() -> None:
    if world_module.rank() == 1:
        raise KeyError("only here")
    dist.all_reduce(torch.ones(1))


def _one_dies() -> None:
    if world_module.rank() == 1:
        os.kill(os.getpid(), signal.SIGFPE)
    dist.all_reduce(torch.ones(1))


def _one_sleeps() -> None:
    if world_module.rank() == 1:
        print("going to sleep")
        time.sleep(1000)


def _default_dtype() -> torch.dtype:
    return torch.get_default_dtype()


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_each_rank_returns_its_result(world: World, W: int) -> None:
    assert world.run(_sum_of_ranks, W, 2) == [float(W * (W - 1))] * W


def test_nothing_is_left_of_a_job(world: World) -> None:
    world.run(_sum_of_ranks, 2, 1)
    assert world.run(_default_dtype, 2) == [torch.float32] * 2


def test_a_raising_rank_is_reported_and_releases_its_peers(world: World) -> None:
    with pytest.raises(RanksFailed, match=r"^--- rank 1: KeyError[\s\S]*only here") as caught:
        world.run(_one_raises, 2)
    assert "_one_raises" in caught.value.failures[-1].details
    assert world.run(_sum_of_ranks, 2, 1) == [1.0, 1.0]


def test_a_dying_rank_is_reported_with_its_signal(world: World) -> None:
    results = world.run(_one_dies, 3, catch=True)
    assert results[1].is_a("Lost") and "SIGFPE" in results[1].message
    assert world.run(_sum_of_ranks, 3, 1) == [3.0] * 3


def test_a_hanging_rank_is_stopped_and_its_stack_shown(world: World) -> None:
    results = world.run(_one_sleeps, 2, catch=True, timeout=2.0)
    assert results[0] is None
    assert "still running" in results[1].message
    assert "going to sleep" in results[1].details and "_one_sleeps" in results[1].details
    assert world.run(_sum_of_ranks, 2, 1) == [1.0, 1.0]
