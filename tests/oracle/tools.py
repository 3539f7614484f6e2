"""What tests that write their own steps share. All of it runs on a rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from tests.oracle import models, oracle, steps, world
from tests.oracle.case import Parts

train = steps.basic()


def setup(
    seed: int = 1, build: Callable[[], nn.Module] = models.mlp, **options: Any
) -> tuple[nn.Module, optim.Optimizer]:
    """A float64 model and an AdamW over it, equal on every rank for equal seeds."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    model = build()
    return model, optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def batch(samples: int = 2, seed: int = 11) -> tuple[Tensor, Tensor]:
    """This rank's share of a global batch of `samples` a rank."""
    x, y = global_batch(samples * world.size(), seed)
    own = slice(world.rank() * samples, (world.rank() + 1) * samples)
    return x[own].clone(), y[own].clone()


def global_batch(B: int, seed: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, 5, generator=generator), torch.randn(B, 3, generator=generator)


def compile(step: Callable[..., Any], style: str = "fully_shard", **options: Any) -> Any:
    """`spmd.compile` with a DataParallelMode; mode options by their own names."""
    import spmd
    from spmd.modes import DataParallelMode

    mode = {key: options.pop(key) for key in ("input_batch_dim", "replicated_inputs", "buffers") if key in options}
    return spmd.compile(step, parallel_mode=DataParallelMode(style, **mode), **options)


def state_of(*objects: Any) -> oracle.Record:
    """Everything that models and optimizers hold now, whole. Collective."""
    trained = tuple(thing for thing in objects if isinstance(thing, nn.Module))
    optims = tuple(thing for thing in objects if isinstance(thing, optim.Optimizer))
    return oracle.Record(state=oracle.snapshot(Parts(trained, optims)), lr=0.01)


def assert_equal(expected: oracle.Record, found: oracle.Record, tolerance: float = 1e-9) -> None:
    """Two states are equal by the oracle's metric; exactly with tolerance 0."""
    oracle.compare_state(expected, found, tolerance or 1e-300)


def continue_alone(
    model: nn.Module, optimizer: optim.Optimizer, step: Callable[..., Any], seeds: range, W: int
) -> oracle.Record:
    """The oracle: the undecorated step over the global batches of `seeds`, then the state."""
    for seed in seeds:
        step(model, optimizer, *global_batch(2 * W, seed))
    return state_of(model, optimizer)


def refusal(step: Callable[..., Any], *args: Any, style: str = "fully_shard", **options: Any) -> str:
    """The message with which the compiled step refuses these arguments.

    Checks that nothing has changed by it: parameters, states, the random state, the objects themselves; and that the same
    model and optimizer then train in another step.
    """
    from spmd.errors import SpmdError

    trained = [thing for thing in args if isinstance(thing, (nn.Module, optim.Optimizer))]
    before, random = state_of(*trained), torch.get_rng_state()
    held = [[id(p) for p in thing.parameters()] for thing in trained if isinstance(thing, nn.Module)]
    try:
        compile(step, style, **options)(*args)
    except SpmdError as error:
        message = str(error)
    else:
        raise AssertionError("it ran")
    assert held == [[id(p) for p in thing.parameters()] for thing in trained if isinstance(thing, nn.Module)]
    assert torch.equal(random, torch.get_rng_state())
    assert_equal(before, state_of(*trained), tolerance=0)
    return message


def line(step: Callable[..., Any], text: str) -> str:
    """ "file.py:12", the place of the one line of a function that contains `text`."""
    source, first = inspect.getsourcelines(step)
    (offset,) = [offset for offset, source_line in enumerate(source) if text in source_line]
    return f"{inspect.getsourcefile(step)}".rsplit("/", 1)[-1] + f":{first + offset}"


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of a parameter or state."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stored(model: nn.Module, *optims: optim.Optimizer) -> dict[str, Tensor]:
    """This rank's storage of all parameters and states, by name."""
    found = {name: local(p) for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optims:
        for p, entries in optimizer.state.items():
            found |= {f"{names[id(p)]} {key}": local(v) for key, v in entries.items() if isinstance(v, Tensor)}
    return found
