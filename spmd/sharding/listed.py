"""A rule as a list: which dims of the inputs may be split together, and how the outputs lie then. What discovery and DTensor's strategies yield."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spmd.sharding.layout import Layout, R, Sharded
from spmd.sharding.rule import Call, Rule, Shape, Transfer, has_empty


@dataclass(frozen=True)
class Move:
    """One way to run an op in parts. Outputs are layouts in which `n` is the size of the split dim."""

    inputs: tuple[int | None, ...]  # per input the dim that is split; None: replicated
    outputs: tuple[Layout, ...]
    strided: bool = False  # it holds for any choice of positions, not only for contiguous parts

    @property
    def split(self) -> tuple[int, int]:
        """The first input that is split, and its dim."""
        return next((i, d) for i, d in enumerate(self.inputs) if d is not None)

    def __str__(self) -> str:
        ins = ",".join("R" if d is None else f"S({d})" for d in self.inputs)
        return f"{ins}->{','.join(map(describe, self.outputs))}"


def describe(layout: Layout) -> str:
    if not isinstance(layout, Sharded) or layout.outer == layout.inner == 1:
        return str(layout)
    return f"S({layout.dim}|{layout.outer},n,{layout.inner})"


@dataclass(frozen=True)
class ListedRule(Rule):
    moves: tuple[Move, ...] = ()

    def transfer(self, i: int, s: Sharded, world: int) -> Transfer | None:
        if self.nonempty and has_empty(s, world):
            return None
        plain = s.outer == s.inner == 1
        for move in self.moves:
            if move.inputs[i] == s.dim and (plain or move.strided):
                outs = [placed(out, s, world) for out in move.outputs]
                if None not in outs:
                    return [R if d is None else replace(s, dim=d) for d in move.inputs], outs  # type: ignore[return-value]
        return None


def placed(out: Layout, s: Sharded, world: int) -> Layout | None:
    """The output layout where the split dim is cut as `s`; None where one name for both can't be given."""
    if not isinstance(out, Sharded):
        return out
    if out.outer == out.inner == 1:
        return replace(s, dim=out.dim)
    return replace(out, n=s.n).canonical(world) if s.outer == s.inner == 1 else None


def listed(call: Call, moves: Iterable[Move], linear: Iterable[tuple[int, ...]] = ()) -> ListedRule:
    """The rule of `call` that allows just these moves. Nobody has tried them on empty parts, so they don't run on one."""
    inputs = tuple((None,) * len(s) for s in call.inputs)
    outputs = tuple(None if o is None else (None,) * len(o) for o in call.outputs)
    return ListedRule(inputs, outputs, linear=tuple(linear), nonempty=True, moves=tuple(moves))


def resized(move: Move, inputs: list[Shape], outputs: list[Shape | None]) -> Move | None:
    """`move`, found at smaller sizes, for these. Where the split dim lies inside a larger one, what is around it may have grown."""
    i, d = move.split
    n = inputs[i][d]
    outs: list[Layout] = []
    for out, shape in zip(move.outputs, outputs, strict=True):
        if isinstance(out, Sharded) and shape is not None:
            around, rest = divmod(shape[out.dim], n)
            outer = out.outer if out.inner > 1 else around
            inner = around // outer if outer else 0
            if rest or outer * inner != around or (outer > 1) > (out.outer > 1) or (inner > 1) > (out.inner > 1):
                return None
            outs.append(Sharded(out.dim, outer, n, inner))
        else:
            outs.append(out)
    return replace(move, outputs=tuple(outs))
