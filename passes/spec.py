"""Spec strings: `dedup,bucket{cap_mb=25},overlap`, from passes and back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from spmd.errors import Offence, PassError
from spmd.passes.base import GraphPass

ENTRY = re.compile(r"\s*(-?[A-Za-z_][\w.]*)\s*(?:\{((?:[^{}'\"]|'[^']*'|\"[^\"]*\")*)\})?\s*(?:,|$)")
OPTION = re.compile(r"\s*(\w+)\s*=\s*('[^']*'|\"[^\"]*\"|[^,{}'\"]+?)\s*(?:,|$)")
WORDS = {"true": True, "false": False, "none": None}


def entries(spec: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, options) of each entry; a name that begins with "-" takes a pass out.

    Raises:
        PassError: the text can't be read; it says from where.
    """
    for name, body in _split(spec, ENTRY, spec):
        yield name, {key: _value(text) for key, text in _split(body or "", OPTION, spec)}


def _split(text: str, pattern: re.Pattern[str], spec: str) -> Iterator[tuple[str, str]]:
    start = 0
    while text[start:].strip():
        found = pattern.match(text, start)
        if found is None:
            raise PassError(
                Offence(
                    f"the spec {spec!r} can't be read from {text[start:]!r} on",
                    remedy='write it like "dedup,bucket{cap_mb=25,first_mb=1},-overlap"',
                )
            )
        yield found[1], found[2]
        start = found.end()


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def build(cls: type[GraphPass], options: dict[str, Any]) -> GraphPass:
    """The pass with these options, held to the types of its fields.

    Raises:
        PassError: an option is unknown or of another type.
    """
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    wrong = [
        Offence(
            f"pass {cls.name!r} has no option {key!r}",
            remedy=f"its options are {', '.join(map(option_text, known.values())) or 'none'}",
        )
        for key in options
        if key not in known
    ]
    typed = {}
    for key, value in options.items():
        if key in known:
            typed[key] = float(value) if known[key].type in ("float", float) and type(value) is int else value
            kind = getattr(known[key].type, "__name__", known[key].type)
            if kind in ("int", "float", "bool", "str") and type(typed[key]).__name__ != kind:
                wrong.append(Offence(f"option {key}={value!r} of pass {cls.name!r} isn't of type {kind}"))
    if wrong:
        raise PassError(wrong)
    return cls(**typed)


def option_text(f: Field[Any]) -> str:
    """An option and its default."""
    return f.name if f.default is MISSING else f"{f.name}={value_text(f.default)}"


def value_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else repr(value)


def text(p: GraphPass) -> str:
    """The entry of a pass: its name, and the options that aren't as by default."""
    changed = [
        f"{f.name}={value_text(getattr(p, f.name))}"
        for f in fields(p)  # type: ignore[arg-type]
        if f.init and getattr(p, f.name) != f.default
    ]
    return p.name + (f"{{{','.join(changed)}}}" if changed else "")
