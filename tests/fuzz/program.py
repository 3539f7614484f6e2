"""Program: the plain description of a train step. It prints as code to paste into a regression test, and builds the step and all it works on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from tests.fuzz import layers, words
from tests.fuzz.losses import LOSSES
from tests.fuzz.optimizers import build
from tests.fuzz.vocabulary import OPS

assert layers and words  # they fill the vocabulary


@dataclass(frozen=True)
class Do:
    """One instruction: a word, the values it reads (0 is the input, i is what the i-th instruction yields), its options."""

    word: str
    reads: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            ", ".join([f"do({self.word!r}", *map(str, self.reads), *(f"{k}={v!r}" for k, v in self.options.items())])
            + ")"
        )


def do(word: str, *reads: int, **options: Any) -> Do:
    return Do(word, reads, options)


@dataclass(frozen=True)
class Program:
    """A train step.

    Attributes:
        shape: of one sample.
        body: the instructions; the loss is of the last one's value.
        dim: the dim of the arguments that carries the batch.
        samples: samples a rank.
        extra: a value whose mean is added to the loss.
        clip: largest norm and order, or a largest value.
        counter: random numbers are made from seed, step and place, not eager's.
        parts: the step runs on this many chunks of the batch, and adds up their gradients.
        zero: when gradients are cleared.
        tie: the last two parameters of one shape are one.
        freeze: the first parameter doesn't train.
        unused: the model has a parameter that nothing reads.
        recompute: the body runs under torch.utils.checkpoint.
        returns: the last value is returned with the loss.
    """

    shape: tuple[int, ...]
    body: tuple[Do, ...]
    loss: str = "squares"
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=dict)
    world: int = 2
    samples: int = 3
    style: str = "fully_shard"
    passes: str = "default"
    counter: bool = False
    dim: int = 0
    steps: int = 2
    extra: int | None = None
    clip: tuple[float, float] | None = None
    parts: int = 1
    zero: str = "last"
    groups: bool = False
    tie: bool = False
    freeze: bool = False
    unused: bool = False
    recompute: bool = False
    returns: bool = False

    def __repr__(self) -> str:
        body = ", ".join(map(repr, self.body))
        rest = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.name not in ("shape", "body") and getattr(self, f.name) != default_of(f)
        ]
        return f"Program({', '.join([repr(self.shape), f'({body},)' if len(self.body) == 1 else f'({body})', *rest])})"

    @property
    def batch(self) -> int:
        return self.world * self.samples

    @property
    def mesh(self) -> tuple[int, ...]:
        return (2, self.world // 2) if self.style == "hybrid_shard" else (self.world,)

    def arguments(self, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, two targets and two labels a sample, for one step."""
        generator = torch.Generator().manual_seed(seed)
        carry = lambda t: t.movedim(0, self.dim)  # noqa: E731
        return (
            carry(torch.randn(batch, *self.shape, generator=generator)),
            carry(torch.randn(batch, 2, generator=generator)),
            carry(torch.randint(0, 60, (batch, 2), generator=generator)),
        )

    def model(self, seed: int = 3) -> Model:
        random.seed(seed)
        torch.manual_seed(seed)
        return Model(self)

    def optim(self, model: nn.Module) -> optim.Optimizer:
        return build(self.optimizer, [p for p in model.parameters() if p.requires_grad], self.options, self.groups)

    def step(self) -> Callable[..., Any]:
        """The train step, as a user would write it."""
        loss_of, dim = LOSSES[self.loss], self.dim

        def objective(model: Model, x: Tensor, y: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            values = model(x)
            loss = loss_of(values[-1], y.movedim(dim, 0), k.movedim(dim, 0))
            if self.extra is not None:
                loss = loss + 0.3 * values[self.extra].mean()
            return loss, values[-1]

        def step(model: Model, optimizer: optim.Optimizer, x: Tensor, y: Tensor, k: Tensor) -> Any:
            if self.zero == "first":
                optimizer.zero_grad()
            total, last = torch.zeros(()), None
            for part in zip(x.chunk(self.parts, dim), y.chunk(self.parts, dim), k.chunk(self.parts, dim), strict=True):
                loss, last = objective(model, *part)
                (loss / self.parts).backward()
                total = total + loss.detach() / self.parts
            norm = None
            if self.clip is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), *self.clip)
            optimizer.step()
            if self.zero == "last":
                optimizer.zero_grad()
            return total, norm, (last.detach() if self.returns and last is not None else None)

        return step


def default_of(f: Any) -> Any:
    return f.default if f.default is not dataclasses.MISSING else f.default_factory()


class Model(nn.Module):
    """The body as a module. Layers are made in the first forward pass, here on an example."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleDict()
        with torch.no_grad(), torch.random.fork_rng():
            self(program.arguments(program.batch, 1)[0])
        for buffer_owner in self.layers.values():
            _reset_buffers(buffer_owner)
        if program.freeze:
            next(iter(self.parameters())).requires_grad_(False)
        if program.tie:
            _tie(self)
        if program.unused:
            self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> list[Tensor]:
        if self.program.recompute and len(self.layers) and torch.is_grad_enabled():
            return list(checkpoint(self.body, x, use_reentrant=False))
        return self.body(x)

    def body(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for index, instruction in enumerate(self.program.body):
            values.append(self.perform(index, instruction, [values[i] for i in instruction.reads]))
        return values

    def perform(self, index: int, instruction: Do, operands: Sequence[Tensor]) -> Tensor:
        entry = OPS[instruction.word]
        if entry.module is None:
            return entry.body(*operands, **instruction.options)
        key = f"{index}_{instruction.word}"
        if key not in self.layers:
            self.layers[key] = entry.module(tuple(operands[0].shape), **instruction.options)
        return entry.body(self.layers[key], *operands, **instruction.options)


def _reset_buffers(module: nn.Module) -> None:
    """What the example has left in running statistics goes."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.reset_running_stats()
        if isinstance(part, layers.Running):
            part.average.zero_()
            part.count.zero_()


def _tie(model: nn.Module) -> None:
    """Two modules of one class share a weight, if there are two of one shape."""
    seen: dict[tuple[Any, ...], nn.Parameter] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(weight, nn.Parameter):
            key = (type(module), tuple(weight.shape))
            if key in seen:
                module.register_parameter("weight", seen[key])
                return
            seen[key] = weight
