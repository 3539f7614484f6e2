"""Train a byte-level GPT on the source files of Python's own standard library, on any number of ranks.

    python docs/examples/train_gpt.py                                   # one process
    torchrun --nproc-per-node 2 docs/examples/train_gpt.py              # two ranks, parameters and states sharded
    torchrun --nproc-per-node 2 docs/examples/train_gpt.py --style replicate
    python docs/examples/train_gpt.py --plain                           # without spmd: the meaning of all of the above

Every line gives the same losses, dropout included, for as long as rounding lets two float runs stay together.
"""

import argparse
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import spmd
from spmd.modes import DataParallelMode

# model: 0.4M parameters, which two CPU cores train in half a minute
block, layers, heads, width = 64, 2, 4, 128
dropout = 0.1  # on, since random numbers are a part of what must come out equal
# data
corpus_bytes = 4_000_000  # the same start of the same files on every machine with this Python
batch = 12  # sequences a step, all ranks together: 12 splits evenly over 1 to 4 ranks
val_batches = 8
# optimizer
peak_lr, warmup = 3e-3, 20  # warmed up, since Adam's first steps are little more than signs; then down to a tenth
betas, weight_decay, clip = (0.9, 0.95), 0.1, 1.0
seed = 1337


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.drop, self.norm, self.head = nn.Dropout(dropout), nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.08) if isinstance(m, nn.Linear | nn.Embedding) else None)
        self.head.weight = self.token.weight  # tied: one tensor, read twice, updated once

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.token(x) + self.position(torch.arange(x.shape[1], device=x.device)))
        return self.head(self.norm(self.blocks(h)))


def train_step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optim.step()
    optim.zero_grad()
    return loss.detach()


def eval_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--style", default="fully_shard", help="or replicate")
    parser.add_argument("--plain", action="store_true", help="the steps as they stand, in this one process")
    parser.add_argument("--float64", action="store_true", help="for comparing runs: leaves rounding nothing to hide")
    parser.add_argument("--losses", type=Path, help="write the losses to this JSON file")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"

    train, evaluate = train_step, eval_step
    if not args.plain:  # all that makes it parallel; `@spmd.compile(...)` above the functions does the same
        mode = DataParallelMode(args.style)
        train, evaluate = spmd.compile(train_step, parallel_mode=mode), spmd.compile(eval_step, parallel_mode=mode)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)[:corpus_bytes]), dtype=torch.uint8)
    train_text, val_text = text.tensor_split([len(text) * 9 // 10])

    def share(source: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """This rank's part of global batch `number`: all ranks choose the same places, each reads its own."""
        places = torch.randint(len(source) - block, (batch,), generator=torch.Generator().manual_seed(seed + number))
        rows = torch.stack([source[p : p + block + 1] for p in places.chunk(ranks)[rank]]).long().to(device)
        return rows[:, :-1], rows[:, 1:]

    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    torch.manual_seed(seed)  # the initial weights, and then dropout
    model = GPT().to(device)
    optim = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=betas, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda i: min((i + 1) / warmup, 1.1 - i / args.steps))

    def advance(number: int) -> float:
        loss = train(model, optim, *share(train_text, number))
        schedule.step()  # outside of the step: lr is an input of the compiled program
        return loss.item()

    losses = [advance(0)]  # the first call compiles and says how far it is, so neither bar nor clock runs yet
    began, bar = time.perf_counter(), Progress(disable=rank != 0 or not sys.stdout.isatty())
    with bar:
        for number in bar.track(range(1, args.steps)):
            losses.append(advance(number))
            bar.update(bar.task_ids[0], description=f"loss {losses[-1]:.3f}")
            if number % 25 == 0 and rank == 0 and bar.disable:
                print(f"step {number:4}  loss {losses[-1]:.4f}", flush=True)
    speed = (args.steps - 1) * batch * block / (time.perf_counter() - began)

    model.eval()
    val_loss = sum(evaluate(model, *share(val_text, number)).item() for number in range(val_batches)) / val_batches
    if rank == 0:
        print(*curve(losses), f"validation loss {val_loss:.4f}, {speed:,.0f} tokens/s, {ranks} rank(s)", sep="\n")
        if args.losses:
            args.losses.write_text(json.dumps({"losses": losses, "validation": val_loss}))


def curve(losses: list[float], columns: int = 60, rows: int = 8) -> list[str]:
    """The lines of a plot, each dot the mean of its column's steps."""
    dots = [part.mean().item() for part in torch.tensor(losses).tensor_split(min(columns, len(losses)))]
    low, high = min(dots), max(dots)
    heights = [round((d - low) / (high - low or 1.0) * (rows - 1)) for d in dots]
    lines = ["".join("•" if h == r else " " for h in heights) for r in reversed(range(rows))]
    return [f"{high:5.2f} ┤{lines[0]}", *(f"      ┤{line}" for line in lines[1:-1]), f"{low:5.2f} ┤{lines[-1]}"]


if __name__ == "__main__":
    main()
