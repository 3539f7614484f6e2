"""Makes a failing program small: instructions and features go as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Do, Program, default_of


def shrink(program: Program, fails: Callable[[Program], bool], budget: int = 80) -> Program:
    """The smallest program found with at most `budget` trials."""
    changed = True
    while changed:
        changed = False
        for smaller in simpler(program):
            if budget <= 0:
                return program
            budget -= 1
            if fails(smaller):
                program, changed = smaller, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Programs a little smaller, the boldest first."""
    for start in range(len(program.body) - 1, 0, -1):  # a whole tail
        yield cut(program, start)
    for index in range(len(program.body) - 1, -1, -1):
        for source in dict.fromkeys(program.body[index].reads):
            yield without(program, index, source)
    for f in dataclasses.fields(Program):
        if f.name in ("shape", "body", "dim"):
            continue
        default = default_of(f)
        if getattr(program, f.name) != default:
            simple = replace(program, **{f.name: default})
            yield replace(simple, options={}) if f.name == "optimizer" else simple
    if program.dim and len(program.shape) > 1:
        yield replace(program, dim=0)
    for samples in (1, 2):
        if samples < program.samples:
            yield replace(program, samples=samples)
    if program.steps > 1:
        yield replace(program, steps=1)


def cut(program: Program, length: int) -> Program:
    extra = program.extra if program.extra is not None and program.extra <= length else None
    return replace(program, body=program.body[:length], extra=extra)


def without(program: Program, index: int, source: int) -> Program:
    """Instruction `index` goes; its readers read its source."""
    gone = index + 1

    def moved(i: int) -> int:
        return source if i == gone else i - (i > gone)

    body = [Do(d.word, tuple(map(moved, d.reads)), d.options) for j, d in enumerate(program.body) if j != index]
    extra = program.extra if program.extra is None else moved(program.extra) or None
    return replace(program, body=tuple(body), extra=extra)
