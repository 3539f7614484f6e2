"""How long a GPT step takes to compile, stage by stage.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/compile_time.py --layers 12 --width 768
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from workloads import GPT, train_step

import spmd
from spmd.modes import DataParallelMode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--style", default="fully_shard")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(options.layers, options.width, 64)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = spmd.compile(train_step, parallel_mode=DataParallelMode(options.style))
    tokens = torch.randint(0, 512, (2, 65))
    wall, cpu = time.perf_counter(), time.process_time()
    step(model, optim, tokens[:, :-1], tokens[:, 1:])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if os.environ.get("RANK", "0") == "0":
        nodes = len(step.program().splitlines())
        print(
            f"{options.layers} layers of {options.width}, {options.style}: first call {wall:.1f} s, {cpu:.1f} s of CPU time; {nodes} nodes"
        )


if __name__ == "__main__":
    main()
