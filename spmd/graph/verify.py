"""Invariants of both kinds of graph. A breach is a defect of spmd, of a mode or of a pass, and is named with its node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import OpOverload, pytree
from spmd.errors import Offence, VerifyError
from spmd.graph.edit import yielded
from spmd.graph.local import LocalGraph, settle
from spmd.graph.memory import WAIT, read, roots, seen_through, written
from spmd.graph.provenance import where
from spmd.graph.step import STORED, StepGraph
from spmd.graph.text import fingerprint_lines, node_text, value_text

FRESH = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}  # memory that waits to be written


def verify_step(step: StepGraph) -> None:
    """Roles match the graph; names are unique; nothing is written in place. Raises VerifyError with every breach."""
    found = structure(step.graph)
    if len(step.placeholders) != len(step.inputs):
        found.append(Offence(f"{len(step.placeholders)} placeholders for {len(step.inputs)} inputs"))
    if len(step.results) != len(step.outputs):
        found.append(Offence(f"{len(step.results)} results for {len(step.outputs)} outputs"))
    names = [x.name for x in step.inputs]
    found += [Offence(f"two inputs are called {n!r}") for n in sorted({n for n in names if names.count(n) > 1})]
    found += [
        Offence(f"{n.name} = {n.target} writes in place", where(n))
        for n in step.graph.nodes
        if n.op == "call_function" and isinstance(n.target, OpOverload) and n.target._schema.is_mutable
    ]
    if found:
        raise VerifyError(found)


def verify_order(graph: fx.Graph) -> None:
    """Every argument is defined before its use. Raises VerifyError with every breach."""
    if found := structure(graph):
        raise VerifyError(found)


def verify_local(local: LocalGraph, known: Known | None = None) -> None:
    """All that holds for a rank's program, whatever passes it has been through.

    Arguments come before their use; each collective is waited for once, before anything reads it; every update of stored state is written
    exactly once; what a node reads hasn't been overwritten; nothing runs before the ranks agree; metadata says what nodes yield (looked
    at for nodes that `known` hasn't seen; not at all without it).

    Raises:
        VerifyError: with every breach.
    """
    found = structure(local.graph) or [
        *collectives(local.graph),
        *stores(local),
        *memory(local),
        *agreed(local),
        *(known.metadata(local.graph) if known is not None else ()),
    ]
    if found:
        raise VerifyError(found)


def structure(graph: fx.Graph) -> list[Offence]:
    """Topology: every argument is defined before its use."""
    found, seen = [], set()
    for node in graph.nodes:
        found += [
            Offence(f"{node.name} uses {a.name} before it's computed", where(node))
            for a in node.all_input_nodes
            if a not in seen
        ]
        seen.add(node)
    return found


def collectives(graph: fx.Graph) -> Iterator[Offence]:
    """Each is waited for exactly once, and only the wait reads it."""
    for node in graph.nodes:
        starts = isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional"
        if starts and node.target is not WAIT:
            if "collective" not in node.meta:
                yield Offence(f"{node.name} = {node.target} has no note of what it's for", where(node))
            if [u.target for u in node.users] != [WAIT]:
                users = ", ".join(u.name for u in node.users) or "nothing"
                what = f"collective {node.name} must be waited for exactly once, by its only reader; {users} reads it"
                yield Offence(what, where(node))
        if node.target is WAIT and "collective" not in node.all_input_nodes[0].meta:
            yield Offence(f"{node.name} waits for {node.all_input_nodes[0].name}, which is no collective", where(node))


def stores(local: LocalGraph) -> Iterator[Offence]:
    """Updates of stored inputs, one write each; no other input is written to."""
    root = roots(local.graph)
    count = Counter(root[x] for node in local.graph.nodes for x in {root[w]: w for w in written(node)}.values())
    placeholders = local.graph.find_nodes(op="placeholder", sort=True)
    expected: Counter[fx.Node] = Counter()
    for out, result in zip(local.step.outputs, local.step.results, strict=True):
        if out.updates is not None and local.step.inputs[out.updates].role in STORED:
            expected[placeholders[out.updates]] += int(result is not local.step.placeholders[out.updates])
    for node, spec in zip(placeholders, local.step.inputs, strict=False):
        if count[node] != expected[node]:
            yield Offence(
                f"{spec.name} ({node.name}) is stored {count[node]} times, not {expected[node]}", fqn=spec.name
            )


def memory(local: LocalGraph) -> Iterator[Offence]:
    """Nothing reads memory whose value has been replaced, and no result lies in it. What is allocated empty may be filled in parts."""
    root = roots(local.graph)
    writer: dict[fx.Node, fx.Node] = {}
    for node in local.graph.nodes:
        waits = node.target is WAIT and bool(written(node.all_input_nodes[0]))  # for a collective in place
        for x in node.all_input_nodes if waits else read(node):
            last = writer.get(root[x])
            if last is not None and not (root[x].op != "placeholder" and descends(x, last)):
                yield Offence(
                    f"{node.name} reads {x.name} after {last.name} has written to {root[x].name}", where(node)
                )
        writer.update({root[x]: node for x in written(node) if not allocation(root[x])})


def descends(x: fx.Node | None, from_: fx.Node) -> bool:
    """Whether `x` is `from_` or a view of it."""
    while x is not None and x is not from_:
        x = seen_through(x)
    return x is not None


def allocation(node: fx.Node) -> bool:
    """Whether a node makes memory for others to fill."""
    return isinstance(node.target, OpOverload) and node.target._schema.name.split("::")[-1] in FRESH


def agreed(local: LocalGraph) -> Iterator[Offence]:
    """The ranks settle on the program, before anything that one of them would notice."""
    if max(local.mesh_shape, default=1) == 1:
        return
    for node in local.graph.nodes:
        if node.target is settle:
            return
        if "collective" in node.meta or written(node):
            yield Offence(f"{node.name} runs before the ranks settle on the program", where(node))
            return
    yield Offence("the ranks never settle on the program")


@dataclass
class Known:
    """Nodes whose metadata is known to be true, as they were then."""

    nodes: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph) -> Known:
        return cls({node: _identity(node) for node in graph.nodes})

    def metadata(self, graph: fx.Graph) -> Iterator[Offence]:
        """New and changed nodes yield what their metadata says: shapes, types and strides."""
        for node in graph.nodes:
            identity = _identity(node)
            if node.op != "call_function" or node.target is settle or self.nodes.get(node) == identity:
                self.nodes[node] = identity
                continue
            if "val" not in node.meta:
                yield Offence(f"{node_text(node)} has no value in its metadata", where(node))
            elif not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(node.meta["val"])):
                self.nodes[node] = identity  # a number: known at run time only
            elif (true := describe(yielded(node))) != (said := describe(node.meta["val"])):
                yield Offence(f"{node.name} = {node.target} yields {true}, its metadata says {said}", where(node))
            else:
                self.nodes[node] = identity


def _identity(node: fx.Node) -> tuple[Any, ...]:
    return node.target, node.args, tuple(node.kwargs.items()), id(node.meta.get("val"))


def describe(val: Any) -> Any:
    """What must be true of a node's value, as text: type, shape and strides. Strides of dims that have none to speak of don't count."""
    if isinstance(val, torch.Tensor):
        strides = [s if n > 1 and val.numel() else 0 for n, s in zip(val.shape, val.stride(), strict=True)]
        return f"{value_text(val)} strides {strides}"
    if isinstance(val, (list, tuple)):
        return "(" + ", ".join(map(describe, val)) + ")"
    return value_text(val)


def verify_ranks(graphs: list[LocalGraph]) -> None:
    """All ranks run the same program: the same nodes, and so the same collectives in the same order. Raises VerifyError."""
    first, *others = map(fingerprint_lines, graphs)
    for rank, lines in enumerate(others, 1):
        for mine, theirs in zip(first, lines, strict=False):
            if mine != theirs:
                raise VerifyError(f"rank 0 runs {mine}; rank {rank} runs {theirs}")
        if len(first) != len(lines):
            raise VerifyError(f"rank 0 runs {len(first)} nodes, rank {rank} {len(lines)}")
