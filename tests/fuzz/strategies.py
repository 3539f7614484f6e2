"""Strategies: programs drawn instruction by instruction. Each is tried at two batch sizes while it's drawn, so what comes out runs and stays tame."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.fuzz.losses import LOSSES
from tests.fuzz.optimizers import NAMES, draw_options
from tests.fuzz.program import Do, Program
from tests.fuzz.vocabulary import OPS, Draw

SHAPES = ((5,), (4,), (4, 3), (3, 6), (6, 4), (2, 4, 5), (3, 6, 6), (2, 5, 4))
STYLES = ("fully_shard", "fully_shard", "replicate", "zero1", "zero2", "default", "hybrid_shard")
ELEMENTS, MAGNITUDE, RANK = 3000, 30.0, 5
OTHER = 11  # the other batch size

# Words that only move, join and cut: chains of them try the layouts of one batch inside other dims.
MOVES = """
    flatten flatten_all flatten_rest unflatten permute transpose unsqueeze squeeze expand repeat repeat_interleave flip roll pad cut narrow
    select chunk_swap chunk_first split_sizes halves_product tensor_split unbind_stack cat stack cat_self plus_one_row shifted unfold diff
    add mul where_of_two sum mean amax softmax cumsum similarity gram self_products matmul cross_similarity linear positions index_select
    """


class Sketch:
    """A body under construction, with its values at the program's batch size and at another."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.body: list[Do] = []
        self.layers: dict[int, nn.Module] = {}
        sizes = (program.batch, OTHER if program.batch != OTHER else 13)
        self.values: list[tuple[Tensor, ...]] = [tuple(program.arguments(n, 1)[0] for n in sizes)]

    def append(self, instruction: Do) -> bool:
        """Takes an instruction in, if it runs and its values are tame."""
        entry = OPS[instruction.word]
        operands = [self.values[i] for i in instruction.reads]
        try:
            with torch.no_grad():
                module = entry.module(tuple(operands[0][0].shape), **instruction.options) if entry.module else None
                found = tuple(
                    entry.body(*([module] if module else []), *values, **instruction.options)
                    for values in zip(*operands, strict=True)
                )
        except Exception:  # it doesn't fit these shapes
            return False
        if not all(tame(v) for v in found) or found[0] is operands[0][0]:
            return False
        self.body.append(instruction)
        self.values.append(found)
        return True


def tame(v: Tensor) -> bool:
    return (
        0 < v.numel() <= ELEMENTS
        and v.dim() <= RANK
        and v.is_floating_point()
        and bool(v.isfinite().all())
        and float(v.abs().max()) <= MAGNITUDE
    )


def fitting(
    values: list[tuple[Tensor, ...]], words: Collection[str], recent: int = 5
) -> list[tuple[str, tuple[int, ...]]]:
    """Words and the values that they could read, the newest among them."""
    newest = len(values) - 1
    shape = values[newest][0].shape
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, entry in OPS.items():
        if name not in words or not entry.rank[0] <= len(shape) <= entry.rank[1]:
            continue
        if entry.arity == 1:
            found.append((name, (newest,)))
            continue
        others = [
            i for i in range(max(0, newest - recent), newest + 1) if related(shape, values[i][0].shape, entry.same)
        ]
        found += [(name, (newest, i)) for i in others[-3:]]
    return found


def related(a: torch.Size, b: torch.Size, same: bool) -> bool:
    if same:
        return a == b
    try:
        torch.broadcast_shapes(a, b)
    except RuntimeError:
        return len(a) > 0 and len(b) > 0
    return True


@st.composite
def instructions(draw: Draw, sketch: Sketch, words: Collection[str]) -> Do:
    word, reads = draw(st.sampled_from(fitting(sketch.values, words)))
    shape = tuple(sketch.values[reads[0]][0].shape)
    return Do(word, reads, {key: option(draw, shape) for key, option in OPS[word].options.items()})


@st.composite
def programs(draw: Draw, longest: int = 7, words: Collection[str] = OPS) -> Program:
    """A random train step of at most `longest` of these words."""
    with torch.random.fork_rng():
        torch.set_default_dtype(torch.float64)
        try:
            return _program(draw, longest, words)
        finally:
            torch.set_default_dtype(torch.float32)


def _program(draw: Draw, longest: int, words: Collection[str]) -> Program:
    torch.manual_seed(0)
    dim = draw(st.sampled_from((0, 0, 0, 0, 1)))
    shape = draw(st.sampled_from(SHAPES))
    style = draw(st.sampled_from(STYLES))
    world = 4 if style == "hybrid_shard" else draw(st.sampled_from((2, 3)))
    samples = draw(st.sampled_from((1, 2, 3, 4, 5)))
    start = Program(shape, (), world=world, samples=samples, dim=dim)
    sketch = Sketch(start)
    assume(sketch.append(Do("linear", (0,), {"out": draw(st.sampled_from((3, 4, 6))), "bias": draw(st.booleans())})))
    for _ in range(draw(st.integers(min(4, longest), longest))):
        for _attempt in range(4):
            if sketch.append(draw(instructions(sketch, words))):
                break
    name = draw(NAMES)
    options: dict[str, Any] = {
        "loss": draw(st.sampled_from(list(LOSSES))),
        "optimizer": name,
        "options": draw_options(draw, name),
        "style": style,
        "passes": draw(st.sampled_from(("default", "default", "none"))),
        "steps": draw(st.sampled_from((2, 2, 3))),
        "extra": draw(st.sampled_from((None, None, *range(1, len(sketch.body) + 1)))),
        "clip": draw(st.sampled_from((None, None, None, (0.3, 2.0), (0.2, float("inf")), (0.5, 1.0)))),
        "parts": draw(st.sampled_from((1, 1, 1, 1, 2))),
        "zero": draw(st.sampled_from(("last", "last", "first"))),
        "returns": draw(st.booleans()),
    }
    options |= {key: draw(st.sampled_from((False, False, False, True))) for key in RARE}
    program = Program(shape, tuple(sketch.body), world=world, samples=samples, dim=dim, **options)
    writes = next(program.model().buffers(), None) is not None  # twice, if they are recomputed: that's refused
    return replace(program, recompute=program.recompute and not writes)


RARE = ("groups", "tie", "freeze", "unused", "recompute", "counter")
