"""A step graph at one global batch size: symbols become numbers, and each dim says how it depends on the batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch.fx.node import map_arg

from spmd._torch import FakeTensorMode, LazyGraphModule, pytree
from spmd.graph.step import StepGraph


def at(step: StepGraph, batch: int | None) -> StepGraph:
    """`step` with numbers for everything that depends on the batch alone. Scalars are recomputed op by op, so they round as Python's do.

    Each node that yields one tensor gets `varies`: per dim None if it's fixed, c > 0 for c * batch, 0 for any other function of it.
    """
    return Concretion(step, batch).run()


class Concretion:
    def __init__(self, step: StepGraph, batch: int | None) -> None:
        self.step, self.batch = step, batch
        self.symbol = step.batch.symbol if step.batch else None
        self.fake = FakeTensorMode()
        self.sizes: dict[sympy.Expr, tuple[int, int | None]] = {}

    def run(self) -> StepGraph:
        graph = fx.Graph()
        env: dict[fx.Node, Any] = {}
        for node in self.step.graph.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "output":
                graph.output(args[0])
                continue
            known = self.number(node, args)
            if known is not None:
                env[node] = known
                continue
            new = graph.create_node(node.op, node.target, args, kwargs, node.name)
            env[node] = new
            new.meta = copy.copy(node.meta)
            val = node.meta.get("val")
            new.meta["val"] = pytree.tree_map(self.concrete, val)
            if self.symbol is not None:  # else the capture has noted it
                new.meta["varies"] = (
                    tuple(self.size(n)[1] for n in val.shape) if isinstance(val, torch.Tensor) else None
                )
        module = LazyGraphModule(self.step.module, graph)
        concrete = replace(self.step, module=module, batch=None, size=self.batch, shapes={})
        found = [*concrete.placeholders, *concrete.results]
        names = [*(spec.name for spec in concrete.inputs), *(spec.name for spec in concrete.outputs)]
        for name, x in zip(names, found, strict=True):
            if isinstance(x, fx.Node) and isinstance(val := x.meta.get("val"), torch.Tensor):
                concrete.shapes[name] = val.shape
        return concrete

    def number(self, node: fx.Node, args: tuple[Any, ...]) -> int | float | bool | None:
        """The value of a node that depends on the batch alone."""
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return None
        if isinstance(val, torch.SymInt) and val.node.expr.free_symbols == {self.symbol}:
            return self.size(val)[0]
        pending: list[fx.Node] = []
        map_arg(args, pending.append)
        return None if pending else node.target(*args)  # type: ignore[operator]

    def concrete(self, val: Any) -> Any:
        if not isinstance(val, torch.Tensor):
            return val
        with self.fake:
            shape, stride = ([self.size(n)[0] for n in sizes] for sizes in (val.shape, val.stride()))
            return torch.empty_strided(shape, stride, dtype=val.dtype, device=val.device)

    def size(self, n: int | torch.SymInt) -> tuple[int, int | None]:
        """The number, and how it varies: None, c for c * B, or 0."""
        if not isinstance(n, torch.SymInt):
            return int(n), None
        expr = n.node.expr
        if expr not in self.sizes:
            value = int(expr.subs(self.symbol, self.batch))
            ratio = sympy.simplify(expr / self.symbol) if self.symbol is not None else None
            varies = None if expr.is_number else int(ratio) if ratio is not None and ratio.is_Integer else 0
            self.sizes[expr] = value, varies
        return self.sizes[expr]
