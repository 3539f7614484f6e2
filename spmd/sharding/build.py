"""Build: writes a local graph node by node, each with its local fake value and the provenance of the step's node it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from spmd._torch import FakeTensorMode, tree_leaves, tree_map
from spmd.graph.provenance import step_name
from spmd.sharding.layout import Layout, RankInt, local_shape

aten = torch.ops.aten
PROVENANCE = ("phase", "source", "module", "grad_of", "checkpoint")


class Build:
    """A local graph under construction, for one rank of one axis."""

    def __init__(self, fake: FakeTensorMode, world: int, rank: int) -> None:
        self.graph = fx.Graph()
        self.fake, self.world, self.rank = fake, world, rank
        self.origin: fx.Node | None = None  # the step's node being expanded
        self.moving: fx.Node | None = None  # the step's node being redistributed for it

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call and compute its local fake value."""
        node = self.graph.call_function(target, args, kwargs)
        self.stamp(node)
        with self.fake:
            fakes = tree_map(plain, map_arg((args, kwargs), lambda n: n.meta["val"]))
            node.meta["val"] = target(*fakes[0], **fakes[1])
        return node

    def number(self, target: Any, args: Any, kwargs: Any, example: Any) -> fx.Node:
        """Append a call that yields a Python number; it's known only at run time."""
        node = self.graph.call_function(target, args, kwargs)
        self.stamp(node)
        node.meta["val"] = sample(example)
        return node

    def stamp(self, node: fx.Node) -> None:
        if self.origin is not None:
            node.meta.update({k: self.origin.meta[k] for k in PROVENANCE if k in self.origin.meta})
            node.meta["step"] = step_name(self.origin)
        if self.moving is not None:  # for another's sake: whether this is a gradient has nothing to do with that
            node.meta.pop("grad_of", None)
            if "grad_of" in self.moving.meta:
                node.meta["grad_of"] = self.moving.meta["grad_of"]

    def val(self, node: fx.Node) -> torch.Tensor:
        return node.meta["val"]

    def local(self, shape: Sequence[int], layout: Layout | None) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(shape) if layout is None else local_shape(shape, layout, self.world, self.rank)

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`x` with another shape. Whether strides allow a view may differ from rank to rank (a dim of 1 is free), so that's left to run time."""
        if tuple(self.val(x).shape) == tuple(shape) and not any(isinstance(n, RankInt) for n in shape):
            return x
        return self.op(aten.reshape.default, x, list(shape))

    def narrow(self, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
        """A contiguous range of `dim`; `x` itself where that's all of it on every rank."""
        if (
            not isinstance(start, RankInt)
            and not isinstance(length, RankInt)
            and start == 0
            and length == self.val(x).shape[dim]
        ):
            return x
        return self.op(aten.slice.Tensor, x, dim, start, add(start, length))


def add(a: int, b: int) -> int:
    """a + b that stays a function of the rank."""
    if not isinstance(a, RankInt) and not isinstance(b, RankInt):
        return a + b
    text = [x.formula if isinstance(x, RankInt) else str(x) for x in (a, b) if isinstance(x, RankInt) or x]
    return RankInt(int(a) + int(b), "+".join(text))


def plain(x: Any) -> Any:
    return int(x) if isinstance(x, RankInt) else x


def sample(value: Any) -> Any:
    """A Python number of the type that a symbolic one stands for."""
    if isinstance(value, (torch.SymFloat, float)):
        return 1.0
    if isinstance(value, (torch.SymBool, bool)):
        return True
    return 1


def is_number(value: Any) -> bool:
    """Whether a node's value holds no tensor."""
    return not any(isinstance(v, torch.Tensor) for v in tree_leaves(value))
