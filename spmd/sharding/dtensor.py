"""DTensor's registered strategies as candidates for rules. Some are wrong, so only those of ops that the audit has confirmed are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as DTensorPartial
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.fx.node import map_arg

from spmd._torch import DTensorSpec, OpOverload, OpSchema, OpStrategy, TensorMeta, sharding_propagator
from spmd.sharding.audited import CONFIRMED, TORCH
from spmd.sharding.layout import Layout, Partial, R, Sharded, shard
from spmd.sharding.listed import Move
from spmd.sharding.rule import Call

RANKS = 3  # of the mesh that strategies are asked about; any number: none is told apart
Placements = tuple[list[Placement], list[Placement | None]]  # of the inputs and of the outputs


def confirmed(op: OpOverload) -> bool:
    """Whether the audit has found DTensor's strategies for `op` true, in this release of torch."""
    return str(op) in CONFIRMED and torch.__version__.startswith(TORCH)


def candidates(call: Call) -> tuple[list[Move], list[tuple[int, ...]]]:
    """What DTensor's strategies say of `call`: moves, the most inputs split first, and sets of inputs in which it's linear."""
    moves: dict[Move, None] = {}
    linear: dict[tuple[int, ...], None] = {}
    for ins, outs in strategies(call):
        move, group = move_of(call, ins, outs), partials(ins, outs)
        if move is not None:
            moves[move] = None
        if group:
            linear[group] = None
    return sorted(moves, key=lambda m: m.inputs.count(None)), sorted(linear)


def preferred(call: Call, current: Sequence[Layout], world: int) -> list[Layout] | None:
    """The layouts in which DTensor would take the inputs that lie as `current`; None where it has no strategy, or these layouts no placement."""
    lie = [placement_of(p) for p in current]
    if not isinstance(call.target, OpOverload) or None in lie:
        return None
    try:
        chosen = sharding_propagator.propagate_op_sharding_non_cached(schema_of(call, call.target, lie, world))
    except Exception:  # it can't be told from a strategy that fails
        return None
    specs = chosen.redistribute_schema.args_spec if chosen.redistribute_schema is not None else None
    if specs is None:
        return list(current)
    if len(specs) != len(current):
        return None
    wants = [s.placements[0] for s in specs]
    found = [R if type(p) is Replicate else layout_of(p, shape) for p, shape in zip(wants, call.inputs, strict=True)]
    return None if None in found else found  # type: ignore[return-value]


@cache
def mesh(world: int = RANKS) -> DeviceMesh:
    """A mesh without process groups: strategies look at its size alone."""
    return DeviceMesh("cpu", torch.arange(world), _init_backend=False, _rank=0)


def schema_of(call: Call, op: OpOverload, placements: Sequence[Any], world: int = RANKS) -> OpSchema:
    given = iter(placements)

    def spec(node: Any) -> Any:
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            raise TypeError("a number of run time")
        return DTensorSpec(mesh(world), (next(given),), TensorMeta(val.shape, val.stride(), val.dtype))

    args, kwargs = map_arg((call.node.args, call.node.kwargs), spec)
    return OpSchema(op, tuple(args), dict(kwargs), sharding_propagator.op_to_schema_info.get(op))


def strategies(call: Call) -> Iterator[Placements]:
    """Every strategy that DTensor has for `call`, whichever input is split, on a mesh of one axis."""
    count = len(call.inputs)
    yielded = set()
    for asked in questions(call):
        try:
            answers = ask(call, asked)
        except Exception:  # a strategy that doesn't take these arguments has no answer
            continue
        for ins, outs in answers:
            key = tuple(map(str, (*ins, *outs)))
            if key not in yielded and len(ins) == count and len(outs) == len(call.outputs):
                yielded.add(key)
                yield ins, outs


def questions(call: Call) -> Iterator[list[Placement]]:
    """Placements of the inputs to ask about: one split alone, and with it all that can be split alike."""
    for i, shape in enumerate(call.inputs):
        for d, size in enumerate(shape):
            if size > 1:
                alone: list[Placement] = [Shard(d) if j == i else Replicate() for j in range(len(call.inputs))]
                alike: list[Placement] = [Shard(d) if s[d : d + 1] == (size,) else Replicate() for s in call.inputs]
                yield alone
                if alike != alone:
                    yield alike
    yield [DTensorPartial() for _ in call.inputs]


def ask(call: Call, placements: Sequence[Placement]) -> list[Placements]:
    op = call.target
    if not isinstance(op, OpOverload):
        return []
    single, several = (
        sharding_propagator.op_single_dim_strategy_funcs.get(op),
        sharding_propagator.op_strategy_funcs.get(op),
    )
    if single is None and several is None:
        return []
    wrapped = sharding_propagator._wrap_with_op_strategy(schema_of(call, op, placements))
    if single is not None:
        rows = single.func(op, wrapped.args_meta, wrapped.kwargs_meta)
        n = len(call.outputs)
        return [([*map(concrete, row[n:])], [*map(concrete, row[:n])]) for row in rows]
    found = several(wrapped) if several is not None else None
    return [answer(s, len(call.outputs)) for s in found.strategies] if isinstance(found, OpStrategy) else []


def answer(strategy: Any, outputs: int) -> Placements:
    specs = strategy.output_specs
    outs = list(specs) if isinstance(specs, (tuple, list)) else [specs] * outputs
    ins = strategy.input_specs if strategy.input_specs is not None else [specs]
    return [s.placements[0] for s in ins], [None if s is None else s.placements[0] for s in outs]


def concrete(placement: Any) -> Any:
    """A placeholder for any kind of shard, as a plain one."""
    plain = placement is None or isinstance(placement, Placement)
    return placement if plain else Shard(placement.dim)


def move_of(call: Call, ins: Sequence[Placement], outs: Sequence[Placement | None]) -> Move | None:
    """A strategy that splits inputs as a Move; None for one that holds partial inputs, splits nothing, or means something of DTensor's own."""
    if not all(type(p) in (Replicate, Shard) for p in ins) or not any(isinstance(p, Shard) for p in ins):
        return None
    dims = tuple(
        p.dim % max(len(s), 1) if isinstance(p, Shard) else None for p, s in zip(ins, call.inputs, strict=True)
    )
    layouts = [layout_of(p, shape) for p, shape in zip(outs, call.outputs, strict=True)]
    return Move(dims, tuple(x for x in layouts if x is not None)) if None not in layouts else None


def layout_of(p: Placement | None, shape: tuple[int, ...] | None) -> Layout | None:
    if p is None or shape is None:
        return R
    if isinstance(p, Shard) and type(p) is Shard:
        return shard(p.dim % max(len(shape), 1), shape[p.dim]) if shape else None
    if type(p) is DTensorPartial and p.reduce_op in ("sum", "max", "min"):
        return Partial(p.reduce_op)
    return None  # replicated though an input is split, masked partials, averages


def placement_of(layout: Layout) -> Placement | None:
    """None for what only has an approximate name in DTensor."""
    if isinstance(layout, Sharded):
        return Shard(layout.dim) if layout.outer == layout.inner == 1 else None
    return DTensorPartial(layout.op) if isinstance(layout, Partial) else Replicate()


def partials(ins: Sequence[Placement], outs: Sequence[Placement | None]) -> tuple[int, ...] | None:
    """The inputs in which a strategy carries partial sums to partial sums."""
    summed = lambda p: type(p) is DTensorPartial and p.reduce_op == "sum"  # noqa: E731
    if not all(summed(p) or type(p) is Replicate for p in ins) or not all(p is None or summed(p) for p in outs):
        return None
    return tuple(i for i, p in enumerate(ins) if summed(p)) or None
