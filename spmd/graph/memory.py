"""Which nodes of a graph share memory, and which write to it. The base of verifiers and of every pass that moves nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import OpOverload, pytree
from spmd._torch import c10d_functional as c10d
from spmd.graph.local import settle

WAIT = c10d.wait_tensor.default


def tensors(x: Any) -> Iterator[fx.Node]:
    """The nodes in an argument."""
    return (n for n in pytree.tree_leaves(x) if isinstance(n, fx.Node))


def seen_through(node: fx.Node) -> fx.Node | None:
    """The input whose memory `node` yields, where it does: views, elements of tuples of views, in-place ops, waits."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    if node.target is WAIT or node.target is operator.getitem:
        return node.all_input_nodes[0]
    if not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    shared = {name for alias in aliases for name in alias.before_set}
    for i, arg in enumerate(schema.arguments):
        alias = arg.alias_info  # of what yields a list of views the set after is "*", and the list's own is empty
        if alias is not None and (shared & alias.before_set or (aliases and "*" in alias.after_set)):
            value = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
            return next(tensors(value), None)
    return None


def roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the one that made its memory. An op that copies only where it must counts as sharing."""
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = seen_through(node)
        root[node] = node if source is None else root[source]
    return root


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    found: list[fx.Node] = []
    for i, arg in enumerate(node.target._schema.arguments):
        if arg.name == "grads" and node.kwargs.get("grad_scale") is None:
            continue  # a fused optimizer writes to gradients only where it unscales them
        if arg.alias_info is not None and arg.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
            found += tensors(value)
    return found


def read(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory `node` reads. A wait reads what its collective was given, since that's in use until then."""
    inputs = node.all_input_nodes
    if node.target is WAIT and inputs:
        return [*inputs, *inputs[0].all_input_nodes]
    return inputs


def draws(node: fx.Node) -> bool:
    """Whether a node advances a random generator."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def before(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """For each node those that must come earlier: its inputs; reads and writes of one memory keep their order, and so do random
    draws; nothing that another rank, the generator or stored state would notice comes before the ranks have settled."""
    root = roots(graph)
    must: dict[fx.Node, set[fx.Node]] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    drawn = settled = None
    for node in graph.nodes:
        needs = must[node] = set(node.all_input_nodes)
        writes = {root[w] for w in written(node)}
        for r in {root[x] for x in read(node)} | writes:
            if r in writer:
                needs.add(writer[r])
            if r in writes:
                needs.update(readers.pop(r, ()))
                writer[r] = node
            else:
                readers.setdefault(r, []).append(node)
        if draws(node):
            needs.update([drawn] if drawn is not None else [])
            drawn = node
        if node.target is settle:
            settled = node
        elif settled is not None and (draws(node) or writes or "collective" in node.meta):
            needs.add(settled)
        needs.discard(node)
    return must
