"""Discovery: what an op does to layouts, found by running it on parts.

For every dim of every input, the op is run on uneven parts of that dim (with the other inputs whole, or split along a dim of the same size), and the ways
in which the results make up the whole's are collected: a dim on which they're joined, or a sum, maximum or minimum of all. One trial proves little (three
parts of small integers often have the same maximum), so the sets of several trials are intersected: normal numbers, small integers, contiguous parts and
interleaved ones. Only a recombination that is left alone counts; a result that is the same constant throughout says nothing.

The op runs on the CPU, wherever the step runs: a wrong shard may end a process, and on an accelerator the context of the whole process. An op without a
CPU kernel has no rule unless one is registered. Every rank discovers for itself, from the same numbers.

Sizes are cut down for the search. What is found is tried once more at the sizes of the call, or as near to them as is cheap, since an op may behave
differently at sizes beyond a constant of its own (a window, a block).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from spmd.sharding.apart import Failed, run_apart
from spmd.sharding.example import Data, Example, constant, same
from spmd.sharding.layout import Layout, Partial, R, Sharded
from spmd.sharding.listed import Move, resized
from spmd.sharding.rule import Call

CUTS = (7, 16, 40, 100, 250, 1000)  # dims are cut down to about so many elements, the first with which the op runs
ELEMENTS = 1 << 22  # in all tensors of a call that is run to confirm what was found
COMBINATIONS = 64  # of splits of the other inputs, for one split of one input
EVIDENCE = 64  # elements of an output that must have been compared, over all trials: a single number agrees by accident in every second one
TRIALS = 3, 32  # at least; at most, while several recombinations are still possible
EXTREMES = 16  # trials at least for a maximum or minimum, which is right by accident where one part's values are large
SECONDS = 30.0

Parts = list[torch.Tensor]  # positions along the split dim, one tensor a part


@dataclass(frozen=True)
class Found:
    """What discovery knows of one call. `reason` says why there is nothing, or that there's no more."""

    moves: tuple[Move, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    reason: str = ""


def discover(call: Call) -> Found:
    """The moves and linear sets of one op call, found in a child process, once for each op, shapes, types and numbers."""
    example = Example.of(call)
    return Found(reason="an argument is known only at run time") if example is None else found(example)


@cache
def found(example: Example) -> Found:
    try:
        return run_apart(lambda: search(example), SECONDS)
    except Failed as error:
        return Found(reason=str(error))


def search(example: Example) -> Found:
    """Discovery in this process. Wrong shards may crash it."""
    small = next(filter(None, (runnable(example.cut(size), example) for size in CUTS)), None)
    if small is None and example.elements <= ELEMENTS:
        small = runnable(example, example)
    if small is None:
        return Found(reason=f"the op doesn't run on drawn numbers on the CPU: {failure(example)}")
    trials = Trials(small)
    if not trials.deterministic():
        return Found(reason="the op gives other results when it's run again")
    moves: list[Move] = []
    for i, d in seeds(small):
        if not any(m.inputs[i] == d for m in moves) and (move := find(trials, (i, d))) is not None:
            moves.append(move)
    linear = linear_sets(small)
    large = next(e for e in (example, *(example.cut(size) for size in reversed(CUTS))) if e and e.elements <= ELEMENTS)
    if large != small:
        again = Trials(large)
        moves = [m for m in moves if holds(m, again)]
        linear = [group for group in linear if additive(large, Data(large, 7), group, 1.0, False)]
    fitted = [resized(m, example.shapes, list(example.outputs)) for m in moves]
    moves = [m for m in fitted if m]
    return Found(
        tuple(moves), tuple(linear), "" if moves or linear else "no split of an input gives parts of the whole"
    )


def runnable(example: Example | None, original: Example) -> Example | None:
    """`example` if the op runs on it and its outputs are those of `original` at other sizes."""
    if example is None:
        return None
    try:
        outs = example.run(Data(example, 0).draw(0))
    except Exception:
        return None
    shapes = tuple(None if y is None else tuple(y.shape) for y in outs)
    return example if shapes == example.outputs else None


def failure(example: Example) -> str:
    """Why an example isn't `runnable`."""
    if example.elements > ELEMENTS:
        return "its sizes are too large to try, and can't be cut down"
    try:
        example.run(Data(example, 0).draw(0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "its results have other shapes than register_fake says"


def seeds(example: Example) -> Iterator[tuple[int, int]]:
    for i, shape in enumerate(example.shapes):
        yield from ((i, d) for d, size in enumerate(shape) if size > 1)


# ---------------------------------------------------------------------------------------------------- trials


class Trials:
    """Inputs of one call with the outputs of the whole, drawn as they're asked for."""

    def __init__(self, example: Example) -> None:
        self.example, self.data = example, Data(example, 0)
        self.done: list[tuple[list[torch.Tensor], list[torch.Tensor | None]]] = []

    def __getitem__(self, n: int) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        while len(self.done) <= n:
            kind = len(self.done) % 2
            inputs = self.data.draw(kind)
            outputs = self.example.run(inputs)
            if not all(y is None or finite(y) for y in outputs):  # outside the op's domain
                inputs = self.data.draw(2)
                outputs = self.example.run(inputs)
            self.done.append((inputs, outputs))
        return self.done[n]

    def deterministic(self) -> bool:
        inputs, outputs = self[0]
        return all(
            a is None or b is None or torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(self.example.run(inputs), outputs, strict=True)
        )

    def needed(self, left: Sequence[set[Layout]]) -> int:
        """How many trials it takes to believe what is left."""
        smallest = min((y.numel() for y in self.done[0][1] if y is not None), default=1)
        extreme = any(isinstance(x, Partial) and x.op != "sum" for ways in left for x in ways)
        return min(max(TRIALS[0], -(-EVIDENCE // max(smallest, 1)), EXTREMES if extreme else 0), TRIALS[1])

    def constant(self, output: int) -> bool:
        """Whether an output has been one and the same number in all trials so far."""
        return constant([y for _, ys in self.done if (y := ys[output]) is not None])


def finite(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x).all())


def contiguous(n: int) -> Parts:
    """Uneven contiguous parts of n positions: half, most of the rest, the rest."""
    first, second = -(-n // 2), -(-n * 5 // 6)
    cuts = sorted({0, first, min(second, n), n})
    return [torch.arange(a, b) for a, b in itertools.pairwise(cuts)]


def interleaved(n: int) -> Parts:
    """Every third position; every second where there are few."""
    k = min(3, n)
    return [torch.arange(r, n, k) for r in range(k)]


# ---------------------------------------------------------------------------------------------------- moves


def find(trials: Trials, seed: tuple[int, int]) -> Move | None:
    """How the op can be run with this dim of this input split."""
    for dims in itertools.islice(combinations(trials.example.shapes, *seed), COMBINATIONS):
        outs = recombination(trials, dims, contiguous)
        if outs is not None:
            return Move(dims, outs, recombination(trials, dims, interleaved) == outs)
    return None


def combinations(shapes: Sequence[tuple[int, ...]], i: int, d: int) -> list[tuple[int | None, ...]]:
    """Splits of all inputs with dim `d` of input `i` among them: the most inputs first, alike dims before others."""
    n = shapes[i][d]
    choices = [[d] if j == i else [None, *(e for e, m in enumerate(s) if m == n)] for j, s in enumerate(shapes)]
    if math.prod(map(len, choices)) > 4096:  # many inputs of the same size: alike or not at all
        choices = [[None, d] if d in c and len(c) > 1 else c for c in choices]
    listed = itertools.islice(itertools.product(*choices), 4096)
    return sorted(listed, key=lambda dims: (dims.count(None), sum(e not in (d, None) for e in dims)))


def recombination(
    trials: Trials, dims: tuple[int | None, ...], cut: Callable[[int], Parts]
) -> tuple[Layout, ...] | None:
    """The one layout of each output with which the parts give the whole in all trials."""
    left: list[set[Layout]] | None = None
    for n in range(TRIALS[1]):
        found = one_trial(trials, n, dims, cut)
        left = found if left is None or not found else [a & b for a, b in zip(left, found, strict=True)]
        if not found or not left or not all(left):
            return None
        if n + 1 >= trials.needed(left) and all(len(ways) == 1 for ways in left):
            outs = tuple(next(iter(ways)) for ways in left)
            return None if any(map(trials.constant, range(len(outs)))) else outs
    return None


def one_trial(trials: Trials, n: int, dims: tuple[int | None, ...], cut: Callable[[int], Parts]) -> list[set[Layout]]:
    """All layouts of each output with which the parts give the whole."""
    inputs, whole = trials[n]
    size = next(x.shape[d] for x, d in zip(inputs, dims, strict=True) if d is not None)
    parts = cut(size)
    results = []
    try:
        for positions in parts:
            local = [x if d is None else x.index_select(d, positions) for x, d in zip(inputs, dims, strict=True)]
            results.append(trials.example.run(local))
    except Exception:
        return []
    if any(len(r) != len(whole) for r in results):
        return []
    return [ways([r[q] for r in results], y, parts) for q, y in enumerate(whole)]


def ways(pieces: Sequence[torch.Tensor | None], whole: torch.Tensor | None, parts: Parts) -> set[Layout]:
    """All layouts in which `pieces` are `whole`."""
    if whole is None:
        return {R} if all(p is None for p in pieces) else set()
    tensors = [p for p in pieces if p is not None]
    if len(tensors) != len(pieces) or not whole.numel() or any(p.dtype != whole.dtype for p in tensors):
        return set()
    if all(p.shape == whole.shape for p in tensors):
        return reductions(tensors, whole)
    return joins(tensors, whole, parts)


def reductions(pieces: Sequence[torch.Tensor], whole: torch.Tensor) -> set[Layout]:
    stack = torch.stack(list(pieces))
    results = {} if stack.is_complex() else {"max": stack.amax(0), "min": stack.amin(0)}
    if whole.dtype != torch.bool:
        results["sum"] = stack.sum(0, dtype=whole.dtype)
    return {Partial(op) for op, result in results.items() if same(result, whole)}


def joins(pieces: Sequence[torch.Tensor], whole: torch.Tensor, parts: Parts) -> set[Layout]:
    """Dims along which the pieces are joined; the split factor may lie inside a larger dim, as (outer, n, inner)."""
    n = sum(p.numel() for p in parts)
    order = torch.cat(parts).argsort()
    found: set[Layout] = set()
    for d, size in enumerate(whole.shape):
        around, rest = divmod(size, n)
        expected = [(*whole.shape[:d], around * p.numel(), *whole.shape[d + 1 :]) for p in parts]
        if rest or [tuple(p.shape) for p in pieces] != expected:
            continue
        for inner in (k for k in range(1, around + 1) if around % k == 0):
            split = [p.unflatten(d, (around // inner, len(i), inner)) for p, i in zip(pieces, parts, strict=True)]
            joined = torch.cat(split, d + 1).index_select(d + 1, order)
            if same(joined.reshape(whole.shape), whole):
                found.add(Sharded(d, around // inner, n, inner))
    return found


def holds(move: Move, trials: Trials) -> bool:
    """Whether a move holds in one trial at other sizes than those it was found at."""
    fitted = resized(move, trials.example.shapes, list(trials.example.outputs))
    cuts = (contiguous, interleaved) if move.strided else (contiguous,)
    return fitted is not None and all(fits(fitted, one_trial(trials, 0, move.inputs, cut)) for cut in cuts)


def fits(move: Move, left: list[set[Layout]]) -> bool:
    return bool(left) and all(out in ways for out, ways in zip(move.outputs, left, strict=True))


# ---------------------------------------------------------------------------------------------------- linear sets


def linear_sets(example: Example) -> list[tuple[int, ...]]:
    """Minimal sets of inputs in which the op is jointly linear: f(a + b) = f(a) + f(b), the other inputs fixed."""
    floating = [i for i, spec in enumerate(example.specs) if spec.dtype.is_floating_point or spec.dtype.is_complex]
    sets: list[tuple[int, ...]] = []
    for size in sorted({1, 2, len(floating)} & set(range(1, len(floating) + 1))):
        for group in itertools.combinations(floating, size):
            if not any(set(s) <= set(group) for s in sets) and is_linear(example, group):
                sets.append(group)
    return sets


def is_linear(example: Example, group: tuple[int, ...]) -> bool:
    data = Data(example, 7)
    return all(
        additive(example, data, group, scale, opposed) for scale in (1.0, 50.0) for opposed in (False, True, False)
    )


def additive(example: Example, data: Data, group: tuple[int, ...], scale: float, opposed: bool) -> bool:
    """Whether f(a + b) = f(a) + f(b) for one a and b, of unlike signs everywhere where they're `opposed`."""
    fixed, a, b = data.draw(0), data.draw(0, scale), data.draw(0, scale)
    if opposed:
        b = [-0.5 * x if i in group else y for i, (x, y) in enumerate(zip(a, b, strict=True))]
    try:
        results = []
        for terms in ((a,), (b,), (a, b)):
            inputs = list(fixed)
            for i in group:
                inputs[i] = sum((t[i] for t in terms[1:]), terms[0][i])
            results.append([y for y in example.run(inputs) if y is not None])
    except Exception:
        return False
    if not results[0] or not all(y.numel() and (y.is_floating_point() or y.is_complex()) for y in results[0]):
        return False
    if any(torch.promote_types(fixed[i].dtype, y.dtype) != y.dtype for i in group for y in results[0]):
        return False  # partials rounded rank by rank don't add up
    if constant(results[0]):
        return False
    return all(same(x + y, z, x, y) for x, y, z in zip(*results, strict=True))
