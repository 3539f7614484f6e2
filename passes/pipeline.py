"""PassPipeline: passes in order, checked before they run and after each."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from spmd.errors import Offence, PassError, SpmdError
from spmd.graph.local import LocalGraph, PassRecord
from spmd.graph.text import digest, fingerprint_lines, program_text
from spmd.graph.verify import Known, verify_local, verify_order
from spmd.passes import registry, spec
from spmd.passes.adapt import Adapted
from spmd.passes.base import SEPARATE, GraphPass

ENVIRONMENT = "SPMD_PASSES"  # a spec; "default" in it stands for what the program asks for


@dataclass(frozen=True)
class PassPipeline:
    """Passes in the order in which they run. The graph is verified after each; a pass that breaks it is named.

    diffs: keep what each pass did to the program's text, in `LocalGraph.history`.

    Raises:
        PassError: a pass requires what doesn't hold where it stands.
    """

    passes: tuple[GraphPass, ...] = ()
    diffs: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))
        offences = list(misplaced(self.passes))
        if offences:
            raise PassError(offences)

    # ------------------------------------------------------------------------------------------------- making

    @classmethod
    def of(cls, passes: str | PassPipeline | Iterable[Any], default: PassPipeline | None = None) -> PassPipeline:
        """A pipeline from what users write: a spec, or passes, specs and `GraphModule -> GraphModule` callables in a list.

        default: what "default" in a spec stands for; the usual passes.
        """
        if isinstance(passes, PassPipeline):
            return passes
        if isinstance(passes, str):
            return cls.parse(passes, default)
        return cls(tuple(p for x in passes for p in _each(x, default)))

    @classmethod
    def parse(cls, text: str, default: PassPipeline | None = None) -> PassPipeline:
        """The pipeline that a spec names.

        Entries: a pass with its options, `bucket{cap_mb=25}`, which takes the place of one of the same name before it; `-bucket`, which takes
        that out; "default", the usual passes or those of `default`; "none".

        Raises:
            PassError: a pass or option is unknown, or the order can't be.
        """
        found: dict[str, GraphPass] = {}
        entries = registry.known()
        for name, options in spec.entries(text):
            if name == "default" and not options:
                usual = default.passes if default else (registry.load(n, entries)() for n in registry.DEFAULT)
                found.update((p.name, p) for p in usual)
            elif name.startswith("-"):
                if found.pop(name[1:], None) is None:
                    raise PassError(Offence(f"{text!r} takes out {name[1:]!r}, which isn't in it"))
            elif name != "none":
                found[name] = spec.build(registry.load(name, entries), options)
        return cls(tuple(found.values()), default is not None and default.diffs)

    def here(self) -> PassPipeline:
        """This pipeline, or what the variable SPMD_PASSES says instead."""
        asked = os.environ.get(ENVIRONMENT)
        return self if asked is None else self.parse(asked, default=self)

    def __str__(self) -> str:
        """The spec; `PassPipeline.parse` makes the same pipeline of it."""
        return ",".join(map(spec.text, self.passes)) or "none"

    # ------------------------------------------------------------------------------------------------- running

    def run(self, graph: LocalGraph, observe: Callable[[GraphPass, LocalGraph], None] | None = None) -> LocalGraph:
        """Apply every pass. `observe` is called after each.

        Raises:
            PassError: a pass failed, or left a graph that breaks an invariant.
        """
        known = Known.of(graph.graph)
        graph = replace(graph, history=[*graph.history, record("partition", graph)])
        for p in self.passes:
            before, counts, began = program_text(graph) if self.diffs else "", _counts(graph), time.perf_counter()
            history = graph.history
            try:
                graph = p.run(graph)
                verify_order(graph.graph)
                graph.graph.eliminate_dead_code()
                verify_local(graph, known)
            except SpmdError as error:
                raise PassError(Offence(f"pass {p.name!r} broke the graph: {o}") for o in error.offences) from error
            except Exception as error:
                raise PassError(
                    f"pass {p.name!r} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                ) from error
            seconds = time.perf_counter() - began
            diff = _diff(before, graph) if self.diffs else ""
            graph = replace(graph, history=[*history, record(p.name, graph, counts, seconds, diff)])
            if observe is not None:
                observe(p, graph)
        graph.module.recompile()
        return graph


def _each(x: Any, default: PassPipeline | None) -> Iterator[GraphPass]:
    if isinstance(x, str):
        yield from PassPipeline.parse(x, default).passes
    elif isinstance(x, GraphPass):
        yield x
    elif callable(x):
        yield Adapted(x)
    else:
        raise PassError(f"{x!r} is no pass: give a name, a GraphPass, or a callable from GraphModule to GraphModule")


def misplaced(passes: Iterable[GraphPass]) -> Iterator[Offence]:
    """Passes that require what doesn't hold where they stand."""
    lost: dict[str, str] = {}  # fact -> the pass that ended it
    holds = {SEPARATE}
    for p in passes:
        for fact in sorted(p.requires - holds):
            ended = lost.get(fact)
            yield Offence(
                f"pass {p.name!r} lacks {fact!r}" + (f", which {ended!r} ends" if ended else ""),
                remedy=f"put {p.name!r} before {ended!r}" if ended else f"put a pass before it that provides {fact!r}",
            )
        lost |= dict.fromkeys(p.invalidates & holds, p.name)
        holds = (holds - p.invalidates) | p.provides


def record(
    name: str, graph: LocalGraph, before: tuple[int, int] = (0, 0), seconds: float = 0.0, diff: str = ""
) -> PassRecord:
    """What `graph` is after a pass."""
    (nodes, collectives), key = _counts(graph), digest(fingerprint_lines(graph))
    return PassRecord(name, seconds, (before[0], nodes), (before[1], collectives), key, diff)


def _counts(graph: LocalGraph) -> tuple[int, int]:
    return len(graph.graph.nodes), len(graph.collectives)


def _diff(before: str, graph: LocalGraph) -> str:
    lines = difflib.unified_diff(before.splitlines(), program_text(graph).splitlines(), lineterm="", n=1)
    return "\n".join(list(lines)[2:])
