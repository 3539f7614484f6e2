"""What random numbers cost: counter-based ones against torch's, each compiled as a step of its own. CPU time, by turns in one process.

OMP_NUM_THREADS=1 python benchmarks/randomness.py
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/randomness.py    # a rank's time for its share of the same batch
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import spmd

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.1),
    "rand": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn_like(x),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "randint": lambda x: torch.randint(0, 1000, x.shape),
}


def compiled(op: Callable[[Tensor], Tensor], randomness: str) -> Callable[[Tensor], Tensor]:
    step = spmd.compile(lambda x: op(x), randomness=randomness, seed=0)  # type: ignore[call-overload]
    return lambda x: step(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256, 2048])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0:
        print(
            f"{'op':12} {'elements':>9} {'torch ms':>9} {'eager':>6} {'counter':>8}   CPU time of a rank; in units of torch's for all"
        )
    for name, op in OPS.items():
        for rows in options.rows:
            x = torch.randn(rows, 1024)
            mine = x.chunk(world)[rank]
            turns = [(op, x), (compiled(op, "eager"), mine), (compiled(op, "counter"), mine)]
            best = [float("inf")] * len(turns)
            for _ in range(options.rounds):
                for i, (run, given) in enumerate(turns):
                    start = time.process_time()
                    run(given)
                    best[i] = min(best[i], time.process_time() - start)
            if rank == 0:
                native, eager, counter = best
                print(f"{name:12} {x.numel():9} {native * 1e3:9.2f} {eager / native:6.2f} {counter / native:8.2f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
