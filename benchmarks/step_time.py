"""Step time beside DDP and FSDP2: strategies take turns in the same processes, losses are compared, CPU time is a rank's own.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/step_time.py --layers 4 --width 128 --length 64 --batch 2
"""

from __future__ import annotations

import argparse
import copy
import resource
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workloads import GPT, train_step

import spmd
from spmd.modes import DataParallelMode

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def strategies(base: GPT) -> dict[str, Step]:
    """Each over its own copy of the model."""
    found: dict[str, Step] = {}

    def add(name: str, model: nn.Module, step: Callable[..., torch.Tensor] = train_step) -> None:
        optim = adamw(model)
        found[name] = lambda x, y: step(model, optim, x, y)

    add("DDP", DistributedDataParallel(copy.deepcopy(base), gradient_as_bucket_view=True))
    for reshard in (True, False):
        model = copy.deepcopy(base)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        add(f"FSDP2 reshard={reshard}", fully_shard(model, reshard_after_forward=reshard))
    for style in ("replicate", "fully_shard"):
        add(f"spmd {style}", copy.deepcopy(base), spmd.compile(train_step, parallel_mode=DataParallelMode(style)))
    return found


def cpu() -> float:
    """Seconds of CPU time of this process, communication threads included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("width", 128), ("length", 64), ("batch", 2), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    steps = strategies(GPT(options.layers, options.width, options.length))
    walls: dict[str, list[float]] = {name: [] for name in steps}
    cpus: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds):
        torch.manual_seed(turn)
        tokens = torch.randint(0, 512, (world * options.batch, options.length + 1)).chunk(world)[rank]
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            wall, used = time.perf_counter(), cpu()
            loss = steps[name](tokens[:, :-1], tokens[:, 1:])
            walls[name].append(time.perf_counter() - wall)
            cpus[name].append(cpu() - used)
            if not name.startswith("spmd"):
                dist.all_reduce(loss, dist.ReduceOp.AVG) if dist.get_backend() != "gloo" else dist.all_reduce(
                    loss.div_(world)
                )
            losses[name].append(loss.item())
    if rank == 0:
        reference = losses["DDP"]
        print(
            f"{'strategy':20} {'cpu ms min':>10} {'cpu ms med':>10} {'wall ms med':>11} {'largest loss difference':>24}"
        )
        for name in steps:
            late = slice(2, None)  # the first two rounds warm up
            difference = max(abs(a - b) for a, b in zip(losses[name], reference, strict=True))
            figures = (min(cpus[name][late]), statistics.median(cpus[name][late]), statistics.median(walls[name][late]))
            print(
                f"{name:20} {figures[0] * 1e3:10.1f} {figures[1] * 1e3:10.1f} {figures[2] * 1e3:11.1f} {difference:24.2e}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
