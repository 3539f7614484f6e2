"""What an instruction of a random program may be: a function of tensors, the module it needs, and how its options are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hypothesis import strategies as st
from torch import Tensor, nn


class Draw(Protocol):
    """hypothesis's `draw`."""

    def __call__(self, strategy: st.SearchStrategy[Any]) -> Any: ...


Shape = tuple[int, ...]
Option = Callable[[Draw, Shape], Any]  # an option's value for a first operand of this shape
Body = Callable[..., Tensor]


@dataclass(frozen=True)
class Op:
    """One word.

    Attributes:
        body: `body(*operands, **options)`; with a module, `body(module, *operands, **options)`.
        arity: how many earlier values it reads.
        rank: the numbers of dims that its first operand may have.
        same: its operands have one shape; otherwise shapes that broadcast.
        module: builds the module from the shape of the first operand and the options.
    """

    name: str
    body: Body
    arity: int = 1
    rank: tuple[int, int] = (0, 5)
    same: bool = False
    module: Callable[..., nn.Module] | None = None
    options: dict[str, Option] = field(default_factory=dict)


OPS: dict[str, Op] = {}


def word(op: Op) -> None:
    assert op.name not in OPS, op.name
    OPS[op.name] = op


def op(arity: int = 1, rank: tuple[int, int] = (0, 5), same: bool = False, **options: Option) -> Callable[[Body], Body]:
    """Adds a function to the vocabulary under its own name."""

    def add(body: Body) -> Body:
        word(Op(body.__name__.rstrip("_"), body, arity, rank, same, None, options))
        return body

    return add


def layer(
    name: str, module: Callable[..., nn.Module], rank: tuple[int, int], body: Body | None = None, **options: Option
) -> None:
    """Adds a module to the vocabulary. `module(shape, **options)` builds it."""
    word(Op(name, body or (lambda m, x, **_: m(x)), 1, rank, False, module, options))


# ---- options


def dim(draw: Draw, shape: Shape) -> int:
    return draw(st.integers(0, len(shape) - 1))


def dims(draw: Draw, shape: Shape) -> tuple[int, ...]:
    """One dim or several."""
    found = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape)))
    return tuple(sorted(found))


def order(draw: Draw, shape: Shape) -> tuple[int, ...]:
    return tuple(draw(st.permutations(range(len(shape)))))


def flag(draw: Draw, shape: Shape) -> bool:
    return draw(st.booleans())


def pick(*values: Any) -> Option:
    return lambda draw, shape: draw(st.sampled_from(values))
