"""Discovery: what running an op on parts finds, what it must not find, and what a crash means. And that the audit's result is current."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd._torch import OpOverload
from spmd.sharding import discover
from spmd.sharding.apart import Failed, run_apart
from spmd.sharding.discover import Found
from spmd.sharding.example import Example
from spmd.sharding.layout import Sharded, shard
from spmd.sharding.listed import Move, listed
from spmd.sharding.rule import Call
from spmd.sharding.table import TABLE
from tests import audit
from tests.parts import ints, rand, step_graph


def custom(fn: Callable[..., Any], fake: Callable[..., Any] = torch.empty_like) -> Any:
    """`fn` as a custom op of its own name."""
    op = torch.library.custom_op(f"spmd_discovery::{fn.__name__}", fn, mutates_args=())
    op.register_fake(fake)
    return op


def window(x: Tensor) -> Tensor:
    """All but the first 64 rows are zero: at small sizes each row looks independent of its position."""
    return torch.where(torch.arange(x.shape[0])[:, None] < 64, x, 0.0)


def blocks(x: Tensor, size: int) -> Tensor:
    """Softmax over blocks of rows."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % size), value=-torch.inf)
    return padded.unflatten(0, (-1, size)).softmax(1).flatten(0, 1)[: x.shape[0]]


def crashing(x: Tensor) -> Tensor:
    if x.shape[0] < 7:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x * 2


def counting(x: Tensor) -> Tensor:
    COUNT.append(len(COUNT))
    return x + len(COUNT)


def large(x: Tensor) -> Tensor:
    return (x > 2.5).any()


def invalid(x: Tensor) -> Tensor:
    """The number of NaNs: none in any trial."""
    return x.isnan().sum()


def mean(x: Tensor) -> Tensor:
    return x.mean(0)


def heads(x: Tensor, count: int) -> Tensor:
    """[n, heads * size] -> [n * heads, size], each head normalised."""
    return torch.nn.functional.normalize(x.unflatten(1, (count, -1)), dim=-1).flatten(0, 1)


COUNT: list[int] = []
OPS = {
    "window": custom(window),
    "blocks": custom(blocks, lambda x, size: torch.empty_like(x)),
    "crashing": custom(crashing),
    "counting": custom(counting),
    "large": custom(large, lambda x: x.new_empty((), dtype=torch.bool)),
    "invalid": custom(invalid, lambda x: x.new_empty((), dtype=torch.int64)),
    "mean": custom(mean, lambda x: x.new_empty(x.shape[1])),
    "heads": custom(heads, lambda x, count: x.new_empty(x.shape[0] * count, x.shape[1] // count)),
}


def found(fn: Callable[..., Any], *args: Tensor) -> Found:
    return discover.discover(call_of(fn, *args))


def call_of(fn: Callable[..., Any], *args: Tensor) -> Call:
    nodes = step_graph(fn, args).graph.nodes
    return Call([n for n in nodes if isinstance(n.target, OpOverload)][-1])


def moves(result: Found) -> set[str]:
    return {str(m) for m in result.moves}


ATEN: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], set[str], set[tuple[int, ...]]]] = {
    "mm, square": (
        torch.mm,
        (rand(12, 12), rand(12, 12)),
        {"S(0),R->S(0)", "S(1),S(0)->P(sum)", "R,S(1)->S(1)"},
        {(0,), (1,)},
    ),
    "softmax": (lambda x: torch.softmax(x, 0), (rand(12, 7),), {"S(1)->S(1)"}, set()),
    "sum": (lambda x: x.sum(0), (rand(12, 7),), {"S(0)->P(sum)", "S(1)->S(0)"}, {(0,)}),
    "amax of integers": (lambda x: x.amax(0), (ints(5, 12, 7),), {"S(0)->P(max)", "S(1)->S(0)"}, set()),
    "cumsum": (lambda x: x.cumsum(0), (rand(12, 7),), {"S(1)->S(1)"}, {(0,)}),
    "equal columns": (lambda x, y: x == y, (rand(12, 7), rand(12, 7)), {"S(0),S(0)->S(0)", "S(1),S(1)->S(1)"}, set()),
    "embedding": (
        lambda w, i: torch.ops.aten.embedding.default(w, i),
        (rand(9, 4), ints(4, 7, 3)),
        {"S(1),R->S(2)", "R,S(0)->S(0)", "R,S(1)->S(1)"},
        {(0,)},
    ),
    "add": (lambda x, y: x + y, (rand(5, 4), rand(4)), {"S(0),R->S(0)", "S(1),S(0)->S(1)"}, {(0, 1)}),
    "where": (
        lambda c, x, y: torch.where(c, x, y),
        (rand(7) > 0, rand(7), rand(7)),
        {"S(0),S(0),S(0)->S(0)"},
        {(1, 2)},
    ),
    "downward cast": (lambda x: x.to(torch.float32), (rand(7, 4),), {"S(0)->S(0)", "S(1)->S(1)"}, set()),
    "as many as there are": (lambda x: torch.full_like(x, 2.0), (rand(7, 4),), set(), set()),
    "random": (torch.bernoulli, (rand(7, 4).sigmoid(),), set(), set()),
}


@pytest.mark.parametrize("name", ATEN)
def test_known_ops(name: str) -> None:
    fn, args, expected, linear = ATEN[name]
    result = found(fn, *args)
    assert moves(result) == expected and set(result.linear) == linear


def test_mean_of_uneven_parts_is_no_partial() -> None:
    assert moves(found(lambda x: OPS["mean"](x), rand(12, 7))) == {"S(1)->S(0)"}


@pytest.mark.parametrize("rows", [128, 4096])
def test_a_constant_inside_an_op_shows_at_the_calls_own_size(rows: int) -> None:
    assert moves(found(lambda x: OPS["window"](x), rand(rows, 10))) == {"S(1)->S(1)"}


def test_sizes_stay_above_the_numbers_of_a_call() -> None:
    assert moves(found(lambda x: OPS["blocks"](x, 32), rand(3000, 10))) == {"S(1)->S(1)"}


def test_one_survivor_or_none() -> None:
    """A rare event looks like a maximum, and like the same everywhere, until it occurs in one part alone; NaNs never occur."""
    assert moves(found(lambda x: OPS["large"](x), rand(12, 12))) == {"S(0)->P(max)", "S(1)->P(max)"}
    assert not found(lambda x: OPS["invalid"](x), rand(12, 12)).moves


def test_a_crash_is_no_rule() -> None:
    result = found(lambda x: OPS["crashing"](x), rand(12, 5))
    assert result == Found(reason="it crashed: SIGSEGV")


def test_an_op_that_counts_its_calls_has_no_rule() -> None:
    result = found(lambda x: OPS["counting"](x), rand(12, 5))
    assert not result.moves and "other results" in result.reason and not COUNT


def test_a_call_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(discover, "run_apart", lambda work, seconds: runs.append(1) or Found())
    for number in (2.0, 2.0, 3.0):
        found(partial(torch.clamp, max=number), rand(11, 13))
    assert len(runs) == 2


def test_a_split_inside_a_flattened_dim() -> None:
    """Found at small sizes, given at the call's own."""
    call = call_of(lambda x: OPS["heads"](x, 4), rand(300, 20))
    (move,) = discover.discover(call).moves
    assert move.outputs == (Sharded(0, 1, 300, 4),)
    rule = listed(call, [move])
    assert rule.transfer(0, shard(0, 300), 4) == ([shard(0, 300)], [Sharded(0, 1, 300, 4).canonical(4)])
    assert rule.transfer(0, Sharded(0, 3, 100, 1), 4) is None


def test_a_strided_shard_needs_interleaved_parts() -> None:
    call = call_of(torch.relu, rand(12, 5))
    strided = Sharded(0, 3, 4, 1)
    assert listed(call, [Move((0,), (shard(0, 12),), True)]).transfer(0, strided, 2) == ([strided], [strided])
    assert listed(call, [Move((0,), (shard(0, 12),), False)]).transfer(0, strided, 2) is None
    assert listed(call, [Move((0,), (shard(0, 12),), True)]).transfer(0, shard(0, 12), 13) is None  # an empty part


def test_sizes_are_cut_and_integers_follow() -> None:
    example = Example.of(call_of(lambda x: x.view(4096, 12, 64), rand(4096, 768)))
    assert example is not None
    small = example.cut(100)
    assert small is not None and small.shapes == [(101, 100)] and small.outputs == ((101, 12, 64),)
    assert small.leaves[1:] == (101, 12, 64)
    assert example.cut(5000) is None


# ---------------------------------------------------------------------------------------------------- the child


def test_work_apart_returns_or_says_why() -> None:
    assert run_apart(lambda: torch.ones(3).sum().item(), 20) == 3.0
    with pytest.raises(Failed, match="ValueError: no"):
        run_apart(lambda: fail("no"), 20)
    with pytest.raises(Failed, match="crashed: SIGFPE"):
        run_apart(lambda: os.kill(os.getpid(), signal.SIGFPE), 20)
    with pytest.raises(Failed, match="left no result"):
        run_apart(lambda: os._exit(3), 20)
    clock = time.monotonic()
    with pytest.raises(Failed, match=r"more than 0.2 s"):
        run_apart(lambda: time.sleep(60), 0.2)
    assert time.monotonic() - clock < 20


def fail(message: str) -> None:
    raise ValueError(message)


def test_no_file_of_the_parent_is_open_in_the_child() -> None:
    """Not its sockets and not its devices: what a process group or a driver would answer to is out of reach."""
    reader, writer = os.pipe()

    def open_there() -> list[bool]:
        return [can_write(fd) for fd in (reader, writer)]

    assert run_apart(open_there, 20) == [False, False]
    os.write(writer, b"still here")
    assert os.read(reader, 20) == b"still here"
    os.close(reader)
    os.close(writer)


def can_write(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------- the audit


def test_the_audit_is_of_this_table() -> None:
    """Written for this torch and these rows, with nothing wrong in it. `python -m tests.audit --write NAME ...` adds rows."""
    result = json.loads(audit.RESULT.read_text())
    assert set(TABLE) == set(result["table"]), f"to be audited: {set(TABLE) ^ set(result['table'])}"
    assert torch.__version__.startswith(result["torch"].rsplit(".", 1)[0])
    assert not [op for op, verdict in result["ops"].items() if verdict.get("wrong")]
    assert audit.PAGE.read_text() == audit.page(result)
    assert audit.SOURCE.read_text() == audit.source(result)


SAMPLE = {"add", "mm", "sum", "_softmax", "embedding", "index_put", "special_i1", "diag_embed"}


@pytest.mark.slow
def test_a_sample_of_the_audit_comes_out_the_same() -> None:
    """Op calls of the database alone, so fewer than the audit has seen: nothing wrong, and nothing new."""
    known = json.loads(audit.RESULT.read_text())["ops"]
    for op, verdict in audit.run(SAMPLE, with_steps=False)["ops"].items():
        for key in ("wrong", "missing", "dtensor_wrong"):
            assert set(verdict.get(key, ())) <= set(known[op].get(key, ())), op


@pytest.mark.slow
def test_the_audit_comes_out_the_same() -> None:
    assert audit.run(set()) == json.loads(audit.RESULT.read_text())


def test_every_op_taken_from_dtensor_is_none_of_the_tables() -> None:
    from spmd.sharding.audited import CONFIRMED

    assert not {op for op in CONFIRMED if op.split(".")[1] in TABLE}
