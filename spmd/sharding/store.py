"""The end of a local graph: stored tensors are written in place, and nothing that others would notice runs before the ranks settle."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from spmd.graph.local import LocalGraph, settle
from spmd.graph.memory import roots
from spmd.graph.random import is_random
from spmd.sharding.build import Build

aten = torch.ops.aten


def write_back(build: Build, updates: list[tuple[fx.Node, fx.Node]], results: list[Any]) -> list[Any]:
    """Store new values in place, each as soon as the last reader of the old one is done. What would change under its reader is copied first."""
    graph = build.graph
    root = roots(graph)
    written = {root[home] for home, _ in updates}
    copies: dict[fx.Node, fx.Node] = {}

    def safe(x: Any) -> Any:
        if not isinstance(x, fx.Node) or root.get(x) not in written:
            return x
        if x not in copies:
            with graph.inserting_after(
                x if x.op != "placeholder" else graph.find_nodes(op="placeholder", sort=True)[-1]
            ):
                copies[x] = build.op(aten.clone.default, x)
        return copies[x]

    updates, results = [(home, safe(new)) for home, new in updates], [safe(x) for x in results]
    order = {n: i for i, n in enumerate(graph.nodes)}
    last = {root[a]: node for node in graph.nodes for a in node.all_input_nodes}
    last_input = graph.find_nodes(op="placeholder", sort=True)[-1:]
    for home, new in updates:
        reader = last.get(root[home], new)
        with graph.inserting_after(max(reader, new, home, *last_input, key=order.__getitem__)):
            build.op(aten.copy_.default, home, new)
    return results


def place_settle(local: LocalGraph) -> None:
    """Before the first node that another rank, the random generator or stored state would notice."""
    handles = [n for n in local.graph.find_nodes(op="placeholder") if n.target == "settle"]
    if not handles:
        return
    for node in local.graph.nodes:
        if node.op == "output" or (node.op == "call_function" and noticed(node)):
            with local.graph.inserting_before(node):
                local.graph.call_function(settle, (handles[0],)).meta["val"] = None
            return


def noticed(node: fx.Node) -> bool:
    if "collective" in node.meta or node.target is aten.copy_.default:
        return True
    return is_random(node.target)
