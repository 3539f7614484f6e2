"""Run the local graphs of all ranks in one process, node by node, with the collectives computed across them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from spmd._torch import c10d_functional as c10d
from spmd.errors import VerifyError
from spmd.graph.local import LocalGraph

REDUCE = {"sum": lambda s: s.sum(0, dtype=s.dtype), "max": lambda s: s.amax(0), "min": lambda s: s.amin(0)}


def run_lockstep(graphs: Sequence[LocalGraph], inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Outputs of every rank. `inputs[r]` are the positional inputs of rank r, without `settle`; stored buffers are updated in place.

    Random ops draw once: every rank sees the same numbers. Raises VerifyError where the programs aren't the same node for node.
    """
    env: list[dict[fx.Node, Any]] = [{} for _ in graphs]
    values = [iter([*x, lambda: None]) for x in inputs]
    for nodes in zip(*(list(g.graph.nodes) for g in graphs), strict=True):
        node = nodes[0]
        if any(
            (n.op, n.target if n.op == "call_function" else "", n.name)
            != (node.op, node.target if node.op == "call_function" else "", node.name)
            for n in nodes
        ):
            raise VerifyError(f"ranks run different nodes: {[f'{n.name} = {n.target}' for n in nodes]}")
        args = [map_arg((n.args, n.kwargs), e.__getitem__) for n, e in zip(nodes, env, strict=True)]
        if node.op == "placeholder":
            results = [next(v) for v in values]
        elif node.op == "output":
            return [a[0][0] for a in args]
        elif node.op == "get_attr":
            results = [getattr(g.module, node.target) for g in graphs]
        elif "collective" in node.meta:
            results = [None] * len(graphs)
            for ranks in along(graphs, node.meta["collective"].axis):
                found = exchange(node.target, [args[r][0] for r in ranks])
                for r, x in zip(ranks, found, strict=True):
                    results[r] = x
        else:
            state = torch.get_rng_state()
            results = []
            for r, a in enumerate(args):
                if r and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                    torch.set_rng_state(state)
                results.append(node.target(*a[0], **a[1]) if node.target is not c10d.wait_tensor.default else a[0][0])
        for n, e, x in zip(nodes, env, results, strict=True):
            e[n] = x
            check(n, x)
    raise VerifyError("the program has no output")


def along(graphs: Sequence[LocalGraph], axis: int) -> list[list[int]]:
    """The groups of ranks along a mesh axis: those that differ in nothing but their place on it."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for r, graph in enumerate(graphs):
        groups.setdefault(graph.coordinate[:axis] + graph.coordinate[axis + 1 :], []).append(r)
    return list(groups.values())


def exchange(target: Any, args: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    parts, world = [a[0] for a in args], len(args)
    if target is c10d.all_gather_into_tensor.default:
        return [torch.cat(parts)] * world
    if target is c10d.reduce_scatter_tensor.default:
        return list(REDUCE[args[0][1]](torch.stack(parts)).chunk(world))
    if target is c10d.all_to_all_single.default:
        return [torch.stack([x[rank] for x in parts]) for rank in range(world)]
    assert target in (c10d.all_reduce.default, c10d.all_reduce_.default), target
    whole = REDUCE[args[0][1]](torch.stack(parts))
    return [p.copy_(whole) if target is c10d.all_reduce_.default else whole.clone() for p in parts]


def check(node: fx.Node, x: Any) -> None:
    """A node yields what its metadata says."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and isinstance(x, torch.Tensor) and (x.shape, x.dtype) != (val.shape, val.dtype):
        raise VerifyError(
            f"{node.name} = {node.target} yields {x.dtype}{list(x.shape)}, its metadata says {val.dtype}{list(val.shape)}"
        )
