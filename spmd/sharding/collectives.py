"""Rules of the collectives that other mesh axes have put into a step: along this axis they are ops like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spmd.sharding.layout import Sharded
from spmd.sharding.rule import Call, Rule, Transfer, labelled


@dataclass(frozen=True)
class RowsRule(Rule):
    """Dim 0 of the output holds the input's rows `grow` times, or only each `shrink`th block of them."""

    grow: int = 1
    shrink: int = 1

    def transfer(self, i: int, s: Sharded, world: int) -> Transfer | None:
        if s.dim:
            return super().transfer(i, s, world)
        outer, rest = divmod(s.outer * self.grow, self.shrink)
        return None if rest else ([s], [replace(s, outer=outer).canonical(world)])


def reduce(call: Call) -> Rule:
    """All-reduce, and the wait for any collective."""
    dims = list(range(len(call.inputs[0])))
    return labelled([dims], [dims], linear=sums(call))


def gather(call: Call) -> Rule:
    dims = [None, *range(1, len(call.inputs[0]))]
    return labelled([dims], [dims], RowsRule, linear=((0,),), grow=int(call.arg("group_size")))


def scatter(call: Call) -> Rule:
    dims = [None, *range(1, len(call.inputs[0]))]
    return labelled([dims], [dims], RowsRule, linear=sums(call), shrink=int(call.arg("group_size")))


def sums(call: Call) -> tuple[tuple[int, ...], ...]:
    return ((0,),) if call.arg("reduce_op", "sum") == "sum" else ()


def exchange(call: Call) -> Rule:
    dims = [None, *range(1, len(call.inputs[0]))]
    return labelled([dims], [dims], linear=((0,),))


COLLECTIVES: dict[str, Callable[[Call], Rule]] = {
    "_c10d_functional::all_reduce": reduce,
    "_c10d_functional::wait_tensor": reduce,
    "_c10d_functional::all_gather_into_tensor": gather,
    "_c10d_functional::reduce_scatter_tensor": scatter,
    "_c10d_functional::all_to_all_single": exchange,
}
