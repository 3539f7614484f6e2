"""Counter-based randomness in steps: equal numbers on any number of ranks, in parts, under recomputation and after a restart."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import spmd
from spmd.errors import CaptureError, StateError
from spmd.modes import DataParallelMode
from tests.oracle import models, steps
from tests.oracle.world import World, rank, size

GLOBAL = 12  # the least batch that 1, 2, 3 and 4 ranks share evenly
STYLES = ("replicate", "fully_shard")
Found = dict[str, Tensor]


def share(x: Tensor, dim: int = 0) -> Tensor:
    return x.chunk(size(), dim)[rank()]


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def train(model: nn.Module, step: Callable[..., Any], data: tuple[Tensor, ...], style: str, dim: int = 0) -> Found:
    """Losses of two steps, and the parameters after them."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mode = DataParallelMode(style, input_batch_dim=dim)
    mesh = init_device_mesh("cpu", (2, 2)) if style == "hybrid_shard" else None
    compiled = spmd.compile(step, parallel_mode=mode, mesh=mesh, seed=5, randomness="counter")
    local = [share(x, dim) for x in data]
    found = {f"loss {i}": whole(compiled(model, optim, *local)) for i in range(2)}
    return found | {name: whole(p) for name, p in model.named_parameters()}


def alone(job: Callable[..., Found], *args: str) -> Found:
    """What one process computes: the reference."""
    return _alone(job, *args)


@functools.cache
def _alone(job: Callable[..., Found], *args: str) -> Found:
    with torch.random.fork_rng():
        try:
            return job(*args)
        finally:
            torch.set_default_dtype(torch.float32)


def close(got: Found, want: Found) -> None:
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


# ---- training


def mlps() -> Found:
    """Both styles."""
    found: Found = {}
    for style in STYLES:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        data = torch.randn(GLOBAL, 5), torch.randn(GLOBAL, 3)
        model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Tanh(), nn.Linear(7, 3), nn.Dropout(0.2))
        found |= {f"{style} {k}": v for k, v in train(model, steps.basic(), data, style).items()}
    return found


def gpt(style: str, recompute: str) -> Found:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = models.GPT(dropout=0.2, recompute=recompute)
    data = torch.randint(0, 13, (GLOBAL, 7)), torch.randint(0, 13, (GLOBAL, 7))
    return train(model, steps.basic(steps.tokens), data, style)


def sequence_first(style: str) -> Found:
    """[T, B, D]: the batch is the second dim, and inside one after flattening, so parts are strided."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    data = torch.randn(5, GLOBAL, 8), torch.randn(5, GLOBAL, 8)

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(model(x), 0.3).flatten(0, 1)
        loss = F.mse_loss(F.dropout(h, 0.5) + 0.1 * torch.randn_like(h), y.flatten(0, 1))
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return train(nn.TransformerEncoderLayer(8, 2, dim_feedforward=13, dropout=0.2), step, data, style, dim=1)


@pytest.mark.parametrize("ranks", (3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))))
def test_dropout_is_equal_on_any_number_of_ranks(world: World, ranks: int) -> None:
    for found in world.run(mlps, ranks):
        close(found, alone(mlps))


def test_dropout_in_gpt_with_checkpointing(world: World) -> None:
    """Recomputed regions drop out the same elements: the results are those without checkpointing."""
    for found in world.run(gpt, 2, "fully_shard", "free"):
        close(found, alone(gpt, "fully_shard", ""))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recompute", ("", "free", "reentrant"))
def test_dropout_in_gpt(world: World, style: str, ranks: int, recompute: str) -> None:
    for found in world.run(gpt, ranks, style, recompute):
        close(found, alone(gpt, "fully_shard", ""))


def test_parts_may_be_strided(world: World) -> None:
    for found in world.run(sequence_first, 2, "fully_shard"):
        close(found, alone(sequence_first, "fully_shard"))


def test_parts_of_parts(world: World) -> None:
    """Two mesh axes split the batch: each draws its part of the other's."""
    for found in world.run(sequence_first, 4, "hybrid_shard"):
        close(found, alone(sequence_first, "fully_shard"))


# ---- every op


def draws(x: Tensor) -> dict[str, Tensor]:
    """One draw of each kind, with the batch in front."""
    B, n = x.shape
    like = torch.empty_like(x)
    p = torch.sigmoid(x.detach())
    return {
        "rand": torch.rand(B, n, dtype=torch.float64),
        "rand_like": torch.rand_like(x),
        "randn": torch.randn(B, 3),
        "randn_like": torch.randn_like(x.t()).t(),
        "randint": torch.randint(3, 9, (B, 2)),
        "normal": torch.normal(p, 0.5),
        "normal_": like.clone().normal_(1, 2),
        "uniform_": like.clone().uniform_(-1, 2),
        "exponential_": like.clone().exponential_(2.0),
        "cauchy_": like.clone().cauchy_(),
        "log_normal_": like.clone().log_normal_(),
        "geometric_": like.clone().geometric_(0.3),
        "random_": like.clone().random_(-2, 5),
        "random_ to": like.clone().random_(7),
        "bernoulli": torch.bernoulli(p),
        "bernoulli p": torch.bernoulli(p, 0.25),
        "bernoulli_": like.clone().bernoulli_(p),
        "randperm": torch.randperm(B),
        "multinomial": torch.multinomial(p, 2),
        "multinomial with replacement": torch.multinomial(p, 5, replacement=True),
        "poisson": torch.poisson(p * 5),
        "binomial": torch.binomial(torch.full_like(p, 9), p),
        "gamma": torch._standard_gamma(p * 3),
        "rrelu": F.rrelu(x, training=True).detach(),
        "dropout": F.dropout(x).detach(),
        "alpha_dropout": F.alpha_dropout(x, 0.2, True).detach(),
        "gumbel_softmax": F.gumbel_softmax(x).detach(),
    }


def every_op() -> Found:
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    @spmd.compile(seed=1, randomness="counter")
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor) -> dict[str, Tensor]:
        h = model(x)
        h.square().mean().backward()
        optim.step()
        optim.zero_grad()
        return draws(h)

    found = step(model, optim, share(torch.randn(GLOBAL, 4)))
    before = torch.get_rng_state()
    again = step(model, optim, share(torch.randn(GLOBAL, 4, generator=torch.Generator().manual_seed(0))))
    assert all(not torch.equal(found[name], again[name]) for name in found)  # another step, other numbers
    assert torch.equal(torch.get_rng_state(), before)  # torch's generators aren't used
    return {k: whole(v) for k, v in found.items()}


def test_every_op_draws_the_same_on_any_number_of_ranks(world: World) -> None:
    """Numbers, and what's chosen by them."""
    want = alone(every_op)
    parts = world.run(every_op, 3)
    for name, x in want.items():
        torch.testing.assert_close(
            torch.cat([part[name] for part in parts]), x, msg=lambda text, name=name: f"{name}: {text}"
        )


def noisy_parameters() -> Found:
    """Langevin dynamics: noise of the parameters' shapes, 7 rows of which 3 ranks hold unevenly."""
    torch.manual_seed(0)
    model = nn.Linear(4, 7).double()
    mode = DataParallelMode("fully_shard")

    @spmd.compile(parallel_mode=mode, seed=1, randomness="counter")
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.1 * p.grad + 0.01 * torch.randn_like(p))
                p.grad = None
        return loss.detach()

    x = share(torch.randn(GLOBAL, 4, dtype=torch.float64))
    loss = step(model, x)
    if size() > 1:
        text = step.program(model, x)
        lines = re.findall(r"i32.*= spmd.random_bits.*", text)
        assert lines and all("start(7)" in line for line in lines), text
    return {"loss": whole(loss)} | {name: whole(p) for name, p in model.named_parameters()}


def test_noise_of_sharded_parameters_is_drawn_in_uneven_parts(world: World) -> None:
    for ranks in (2, 3):
        for found in world.run(noisy_parameters, ranks):
            close(found, alone(noisy_parameters))


# ---- what a rank draws


def program() -> tuple[str, int]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 1))

    @spmd.compile(randomness="counter")
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    x = torch.randn(4, 5)
    told = step.explain(model, x)
    assert not told.fallbacks
    return step.program(model, x), sum(c.role == "value" for c in told.collectives)


def test_a_rank_draws_its_own_part_alone(world: World) -> None:
    """Of dropout on 8 x 7 elements, rank 1 of 2 draws those from the 28th on; no activation moves for it."""
    first, second = world.run(program, 2)
    for text, values in (first, second):
        (line,) = re.findall(r"i32.*= spmd.random_bits.*", text)
        assert "i32[4,7]" in line and "start(8)*7" in line
        assert values == 1  # the loss
        assert "bernoulli" not in text


# ---- seeds and states


@spmd.compile(seed=3, randomness="counter")
def seeded(x: Tensor) -> Tensor:
    return F.dropout(x)


def test_a_state_brings_back_the_numbers() -> None:
    x = torch.ones(64)
    start = seeded.state_dict()
    assert start == {"seed": 3, "step": 0}
    first, second = seeded(x), seeded(x)
    assert not torch.equal(first, second)
    saved = seeded.state_dict()
    third = seeded(x)
    seeded.load_state_dict(saved)
    assert torch.equal(seeded(x), third)
    other = spmd.compile(seeded.fn, seed=77, randomness="counter")
    other.load_state_dict(start)
    assert torch.equal(other(x), first) and torch.equal(other(x), second)
    with pytest.raises(StateError, match="randomness"):
        other.load_state_dict({})


def test_dcp_takes_a_step(tmp_path: Path) -> None:
    x = torch.ones(64)
    first, second = (spmd.compile(seeded.fn, seed=seed, randomness="counter") for seed in (3, 4))
    first(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a group
        dcp.save({"step": first}, checkpoint_id=tmp_path)
        dcp.load({"step": second}, checkpoint_id=tmp_path)
    assert torch.equal(second(x), first(x))


def test_a_seed_of_eager_randomness_has_a_state_too() -> None:
    x = torch.ones(64)
    step = spmd.compile(seeded.fn, seed=3)
    step(x)
    saved = step.state_dict()
    second = step(x)
    other = spmd.compile(seeded.fn, seed=4)
    other.load_state_dict(saved)
    assert torch.equal(other(x), second)
    assert spmd.compile(seeded.fn).state_dict() == {}


def test_a_failed_call_is_repeated_with_the_same_numbers() -> None:
    step = spmd.compile(seeded.fn, seed=3, randomness="counter")
    first = step(torch.ones(64))
    with pytest.raises(Exception, match="traced"):
        step("no tensor")  # type: ignore[arg-type]
    assert step.state_dict()["step"] == 1
    seeded_again = spmd.compile(seeded.fn, seed=3, randomness="counter")
    assert torch.equal(seeded_again(torch.ones(64)), first)
    assert torch.equal(step(torch.ones(64)), seeded_again(torch.ones(64)))


def test_without_a_seed_torchs_decides() -> None:
    """manual_seed makes a run repeatable; two functions draw differently."""
    x, found = torch.ones(64), []
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(9)
            found.append([spmd.compile(seeded.fn, randomness="counter")(x) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


def ranks_that_differ() -> list[Tensor]:
    """Other seeds of torch's, then another state on one rank: the first rank's holds."""
    torch.manual_seed(rank())
    step = spmd.compile(seeded.fn, randomness="counter")
    x = torch.ones(32)
    out = [step(x)]
    if rank() == 1:
        step.load_state_dict({"seed": 1, "step": 40})
    out += [step(x), step(x)]
    assert step.state_dict()["step"] == 3
    torch.manual_seed(0)
    alone = spmd.compile(seeded.fn, randomness="counter", seed=step.state_dict()["seed"])
    return [*out, alone(x)]


def test_ranks_follow_the_first(world: World) -> None:
    first, second = world.run(ranks_that_differ, 2)
    for a, b in zip(first[:3], second[:3], strict=True):
        assert not torch.equal(a, b)  # each has its part
    assert torch.equal(first[0], first[3]) and torch.equal(second[0], second[3])


# ---- refusals


def test_a_generator_of_the_steps_own_is_refused() -> None:
    generator = torch.Generator()

    @spmd.compile(randomness="counter")
    def step(x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=generator)

    with pytest.raises(CaptureError, match="generator"):
        step(torch.ones(3))


def test_unknown_randomness_is_refused() -> None:
    with pytest.raises(ValueError, match="counter"):
        spmd.compile(seeded.fn, randomness="philox")  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", (torch.float32, torch.int8, torch.int64))
def test_random_between_bounds_is_eagers(dtype: torch.dtype) -> None:
    """With eager randomness `random_(from, to)` is captured as a draw from 0 that's moved."""

    def step(x: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=dtype).random_(-2, 5)

    x, found = torch.ones(50), []
    for run in (step, spmd.compile(step)):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            found.append(torch.cat([run(x).double(), torch.rand(1).double()]))
    assert torch.equal(*found)
