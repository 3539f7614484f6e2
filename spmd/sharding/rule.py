"""A sharding rule: for one op call and one mesh axis, which input layouts give which output layouts.

Almost every rule is a labelling of dims. A label that stands on an input and an output: a shard there stays a shard. A label missing from an
output: the output is partial, reduced by `reduce[label]`. None: this dim can't be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from spmd._torch import tree_leaves
from spmd.sharding.layout import Layout, Partial, R, Sharded, ceil_div

if TYPE_CHECKING:
    from spmd.sharding.emit import Expansion

ROWS = "rows"  # label of rows of a table that are looked up by index: each rank finds those that it has
OWN = "own"  # label of the batch where each rank may take statistics of its own share, and what P calls them
Labels = tuple[Hashable | None, ...]
Shape = tuple[int, ...]
Transfer = tuple[list[Layout | None], list[Layout]]  # wanted input layouts (None: any), output layouts


class Call:
    """One op call with its arguments by schema name and its tensors by position."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.target = node.target
        self.schema = getattr(node.target, "_schema", None)
        self.name = op_name(node.target)
        self.tensors = tensor_inputs(node)
        self.inputs: list[Shape] = [tuple(x.meta["val"].shape) for x in self.tensors]
        val = node.meta.get("val")
        self.values: list[Any] = tree_leaves(val, is_leaf=lambda x: x is None)
        self.outputs: list[Shape | None] = [
            tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in self.values
        ]

    def position(self, name: str) -> int:
        assert self.schema is not None
        return next(i for i, a in enumerate(self.schema.arguments) if a.name == name)

    def has(self, name: str) -> bool:
        return self.schema is not None and any(a.name == name for a in self.schema.arguments)

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument called `name` in the op's schema; its schema default, else `default`, where it isn't given."""
        if name in self.node.kwargs:
            return self.node.kwargs[name]
        for i, a in enumerate(self.schema.arguments if self.schema else ()):
            if a.name == name:
                if i < len(self.node.args) and not a.kwarg_only:
                    return self.node.args[i]
                return a.default_value if a.has_default_value() else default
        return default

    def dims(self, value: Any, rank: int) -> list[int]:
        """Normalise a dim, a list of dims, or None (all) against `rank` dims."""
        if value is None or (isinstance(value, (list, tuple)) and not value):
            return list(range(rank))
        listed = value if isinstance(value, (list, tuple)) else [value]
        return [int(d) % rank for d in listed] if rank else []


def op_name(target: Any) -> str:
    """Name of an op in torch's own namespaces; with its namespace elsewhere: a custom op is not torch's of the same name."""
    if not hasattr(target, "_schema"):
        return getattr(target, "__name__", str(target))
    space, name = target._schema.name.split("::")
    return name if space in ("aten", "prims") else f"{space}::{name}"


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of `node`, flat, in order, repeats included."""
    leaves = tree_leaves((node.args, node.kwargs), is_leaf=lambda x: isinstance(x, fx.Node))
    return [x for x in leaves if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor)]


@dataclass(frozen=True)
class Rule:
    """What one op call does to layouts, and how its local program differs from the op itself."""

    inputs: tuple[Labels | None, ...]  # None: only the shape matters, any layout will do
    outputs: tuple[Labels | None, ...]
    reduce: Mapping[Hashable, str | tuple[str, ...]] = field(default_factory=dict)  # for all outputs, or for each
    linear: tuple[tuple[int, ...], ...] = ()  # sets of inputs in which the op is jointly linear: P in, P out
    base: int | None = None  # input that is added once: where the contribution is split, rank 0 alone holds it
    sizes: str = ""  # argument that repeats the output's shape
    emit: Callable[[Expansion], fx.Node] | None = None  # the local program where it isn't the op itself
    nonempty: bool = False  # the kernel can't take an empty shard
    heavy: bool = False  # worth splitting over ranks: contractions, convolutions, attention
    view: bool = False  # yields another view of its first input
    shape_only: bool = False  # values of the first input don't matter: zeros_like
    whole: bool = False  # always runs at global shape on replicated inputs: random draws
    own: tuple[int, ...] | None = None  # it has the label OWN; these inputs hold each rank's own statistics then

    def transfer(self, i: int, s: Sharded, world: int) -> Transfer | None:
        """Layouts of all inputs and outputs where input `i` is sharded as `s`; None if the op can't run so."""
        labels = self.inputs[i]
        label = labels[s.dim] if labels is not None else None
        if label is None or (self.nonempty and has_empty(s, world)):
            return None
        ins: list[Layout | None] = []
        for other in self.inputs:
            ins.append(None if other is None else at(s, other, label) or R)
        outs: list[Layout] = []
        for k, out in enumerate(self.outputs):
            placed = at(s, out, label)
            if placed is None and out is not None and label not in self.reduce:
                return None
            how = self.reduce.get(label, "")
            outs.append(placed or (R if out is None else Partial(how if isinstance(how, str) else how[k])))
        if label == OWN:
            ins = [Partial(OWN) if j in (self.own or ()) else want for j, want in enumerate(ins)]
        if self.base is not None and any(isinstance(o, Partial) for o in outs):
            ins[self.base] = Partial()
        return ins, outs

    def without(self, label: Hashable) -> Rule:
        """The rule where dims with this label can't be split."""
        if not any(label in labels for labels in (*self.inputs, *self.outputs) if labels):
            return self
        strike = lambda labels: labels and tuple(None if x == label else x for x in labels)  # noqa: E731
        return replace(self, inputs=tuple(map(strike, self.inputs)), outputs=tuple(map(strike, self.outputs)))


def at(s: Sharded, labels: Labels | None, label: Hashable) -> Sharded | None:
    """The shard `s` moved to where `label` stands; None if it doesn't."""
    return replace(s, dim=labels.index(label)) if labels and label in labels else None


def has_empty(s: Sharded, world: int) -> bool:
    return ceil_div(s.n, world) * (world - 1) >= s.n


@dataclass(frozen=True)
class ViewRule(Rule):
    """A reshape. A sharded factor is an interval of the row-major index; it goes to the output dim that contains the interval."""

    source: Shape = ()
    result: Shape = ()

    def transfer(self, i: int, s: Sharded, world: int) -> Transfer | None:
        if s.n == 1 and self.result:  # all of it is the first rank's
            return [s], [Sharded(0, 1, 1, self.result[0])]
        chunk = ceil_div(s.n, world)
        for k in range(1, chunk + 1):  # coarser factors with the same cuts
            if chunk % k or s.n % k or ceil_div(s.n // k, world) * k != chunk:
                continue
            n, stride = s.n // k, s.inner * k * math.prod(self.source[s.dim + 1 :])
            right = 1  # elements to the right of dim j
            for j in reversed(range(len(self.result))):
                size = self.result[j]
                if size and right <= stride and stride % right == 0 and (right * size) % (stride * n) == 0:
                    return [s], [Sharded(j, right * size // (stride * n), n, stride // right).canonical(world)]
                right *= size
        return None


@dataclass(frozen=True)
class BlockRule(Rule):
    """A whole and its pieces along `dim`: cat, split, slice and its adjoint. Where `dim` is split, cuts between blocks of the shard move nothing."""

    dim: int = 0
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # of each input and output along `dim`; 0: it has none
    cuts: tuple[int, ...] = ()  # offsets in the whole

    def transfer(self, i: int, s: Sharded, world: int) -> Transfer | None:
        if s.dim != self.dim:
            return super().transfer(i, s, world)
        ins, outs = self.lengths
        block = s.n * s.inner
        if not ins[i] or any(n % block for n in (*ins, *outs, *self.cuts)):
            return None
        part = lambda n: replace(s, outer=n // block).canonical(world) if n else R  # noqa: E731
        return [part(n) for n in ins], [part(n) for n in outs]


@dataclass(frozen=True)
class RepeatRule(Rule):
    """Copies one after the other: a split dim lies within as many blocks."""

    times: Shape = ()  # along each dim of the output

    def transfer(self, i: int, s: Sharded, world: int) -> Transfer | None:
        found = super().transfer(i, s, world)
        if found is None:
            return None
        ins, outs = found
        again = lambda out: replace(out, outer=out.outer * self.times[out.dim]).canonical(world)  # noqa: E731
        return ins, [again(out) if isinstance(out, Sharded) else out for out in outs]


def labelled(
    inputs: Sequence[Sequence[Hashable] | None],
    outputs: Sequence[Sequence[Hashable] | None],
    kind: type[Rule] = Rule,
    **options: Any,
) -> Rule:
    """A Rule from lists of labels."""
    freeze = lambda labels: None if labels is None else tuple(labels)  # noqa: E731
    return kind(tuple(map(freeze, inputs)), tuple(map(freeze, outputs)), **options)
