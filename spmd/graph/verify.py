"""Invariants of both kinds of graph. A breach is a defect of spmd, of a mode or of a pass, and is named with its node."""

from __future__ import annotations

import torch
import torch.fx as fx

from spmd._torch import c10d_functional as c10d
from spmd.errors import Offence, VerifyError
from spmd.graph.local import LocalGraph, settle
from spmd.graph.provenance import where
from spmd.graph.step import STORED, StepGraph

aten = torch.ops.aten


def verify_step(step: StepGraph) -> None:
    """Roles match the graph; names are unique; nothing is written in place. Raises VerifyError with every breach."""
    found = structure(step.graph)
    if len(step.placeholders) != len(step.inputs):
        found.append(Offence(f"{len(step.placeholders)} placeholders for {len(step.inputs)} inputs"))
    if len(step.results) != len(step.outputs):
        found.append(Offence(f"{len(step.results)} results for {len(step.outputs)} outputs"))
    names = [x.name for x in step.inputs]
    found += [Offence(f"two inputs are called {n!r}") for n in sorted({n for n in names if names.count(n) > 1})]
    found += [Offence(f"{n.name} = {n.target} writes in place", where(n)) for n in step.graph.nodes if mutates(n)]
    if found:
        raise VerifyError(found)


def verify_local(local: LocalGraph) -> None:
    """Collectives are waited for once, before use; every update is stored exactly once; nothing runs before the ranks agree. Raises VerifyError."""
    found = structure(local.graph)
    for node in local.graph.nodes:
        if "collective" in node.meta and [u.target for u in node.users] != [c10d.wait_tensor.default]:
            found.append(
                Offence(f"collective {node.name} must be waited for exactly once, by its only user", where(node))
            )
    stores: dict[fx.Node, int] = {}
    for node in local.graph.find_nodes(op="call_function", target=aten.copy_.default):
        home = node.args[0]
        while isinstance(home, fx.Node) and home.op != "placeholder":
            home = home.args[0]
        if isinstance(home, fx.Node):
            stores[home] = stores.get(home, 0) + 1
    placeholders = local.graph.find_nodes(op="placeholder", sort=True)
    for out, result in zip(local.step.outputs, local.step.results, strict=True):
        if out.updates is None or local.step.inputs[out.updates].role not in STORED:
            continue
        expected = int(result is not local.step.placeholders[out.updates])
        if stores.get(placeholders[out.updates], 0) != expected:
            found.append(
                Offence(
                    f"{out.name} is stored {stores.get(placeholders[out.updates], 0)} times, not {expected}",
                    fqn=out.name,
                )
            )
    if (
        len(local.mesh_shape)
        and max(local.mesh_shape) > 1
        and not local.graph.find_nodes(op="call_function", target=settle)
    ):
        found.append(Offence("the ranks never settle on the program"))
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


def mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable
