"""Holds an architecture to the plain step on one device: captured once, cut for two and three ranks, both styles, run in lockstep."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import AdamW, Optimizer

from spmd.capture import capture
from spmd.errors import SpmdError
from spmd.graph.local import LocalGraph
from spmd.modes import DataParallelMode
from tests.fuzz.check import Run, differences, state_of
from tests.fuzz.ranks import Ranks
from tests.zoo.models import Architecture

WORLDS, STYLES = (2, 3), ("replicate", "fully_shard")
BATCH = 6  # samples over all ranks
STEPS = 2
SEED = 3


@dataclass
class Report:
    """What a check found. `result` is "equal", "refused", "crash" or "wrong"."""

    architecture: Architecture
    result: str = "equal"
    detail: str = ""
    nodes: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)  # ops that ran on replicated inputs for want of a rule
    gathers: list[str] = field(default_factory=list)  # activations that were gathered, and why
    trace: float = 0.0  # seconds
    ways: int = 0  # worlds and styles that were equal
    total: float = 0.0

    @property
    def fallback_share(self) -> float:
        """The most of any program."""
        return self.fallbacks.total() / max(self.nodes, 1)


def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """The train step."""
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def contrast(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """The train step of a model of pairs, whose loss is computed where it's asked for."""
    return step(_Asking(model), optimizer, batch)


class _Asking(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch, return_loss=True)


def check(a: Architecture, worlds: Sequence[int] = WORLDS, styles: Sequence[str] = STYLES) -> Report:
    """The architecture in all worlds and styles; the first failure ends it."""
    report, began = Report(a), time.time()
    torch.set_default_dtype(a.dtype)
    try:
        compiled(a, plain(a), report, [(world, style) for world in worlds for style in styles])
    finally:
        torch.set_default_dtype(torch.float32)
    report.total = time.time() - began
    return report


def objects(a: Architecture) -> tuple[Callable[..., Tensor], nn.Module, Optimizer]:
    torch.manual_seed(SEED)
    model = a.build().to(a.dtype)
    # Biases of keys have no true gradient: with a small eps Adam would make noise of it
    optimizer = AdamW(model.parameters(), lr=0.02, eps=1e-4, fused=True)
    return contrast if a.kind == "multimodal" else step, model, optimizer


def arguments(a: Architecture, index: int) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(100 + index)
        return a.batch(BATCH)


def plain(a: Architecture) -> Run:
    """The undecorated step, on one device over the global batch."""
    run, model, optimizer = objects(a)
    torch.manual_seed(5)
    losses = [[run(model, optimizer, arguments(a, index)).clone()] for index in range(STEPS)]
    return Run(losses, state_of(model, optimizer))


def compiled(a: Architecture, reference: Run, report: Report, ways: Sequence[tuple[int, str]]) -> None:
    captured, world = None, ways[0][0]
    way = f"W={world}"
    try:
        began = time.time()
        run, model, optimizer = objects(a)
        captured = capture(run, (model, optimizer, share(a, world)), global_batch=lambda samples: samples * world)
        report.trace = time.time() - began
        for world, style in ways:
            way = f"W={world} {style}"
            ranks = Ranks(
                run, (model, optimizer, share(a, world)), DataParallelMode(style), (world,), BATCH, "none", captured
            )
            measure(ranks, report)
            torch.manual_seed(5)
            losses = [ranks(model, optimizer, arguments(a, index))[0] for index in range(STEPS)]
            if wrong := differences(reference, Run(losses, ranks.state()), a.tolerance):
                report.result, report.detail = "wrong", "\n".join([f"{way}:", *wrong])
                return
            report.ways += 1
    except SpmdError as error:
        report.result, report.detail = "refused", f"{way}: {error}"
    except Exception:
        report.result, report.detail = "crash", f"{way}: {traceback.format_exc(limit=-8)}"


def share(a: Architecture, world: int) -> dict[str, Tensor]:
    return {name: value.chunk(world)[0] for name, value in arguments(a, 0).items()}


def measure(ranks: Ranks, report: Report) -> None:
    program = ranks.programs[0]
    nodes = sum(n.op == "call_function" for n in ranks.captured.step.graph.nodes)
    report.nodes = max(report.nodes, nodes)
    fallbacks = Counter(str(node.target) for node in ranks.programs[0].fallbacks)
    report.fallbacks = max(report.fallbacks, fallbacks, key=Counter.total)
    report.gathers = max(report.gathers, gathered(program), key=len)


def gathered(program: LocalGraph) -> list[str]:
    """The activations that move, but for sums."""
    values = {node.name: node for node in program.step.graph.nodes}
    moves = [c for c in program.collectives if c.role == "value" and c.before.startswith("S")]
    moves = [c for c in moves if carries_batch(values[c.value])]
    return [f"{c.value} {c.before} -> {c.after}: {c.reason} ({c.source})" for c in moves]


def carries_batch(node: fx.Node) -> bool:
    """What doesn't is made of parameters, or a sum. Nodes of decompositions are told by their sizes: of several dims, none else is a multiple of the batch."""
    shape = node.meta["val"].shape
    varies = node.meta.get("varies") or [(len(shape) > 1 and size % BATCH == 0) or None for size in shape]
    return any(scale is not None for scale in varies)
