"""A graph as one Python function: what an Executor runs. Each op is called by its C++ entry point, and values go with their last use."""

from __future__ import annotations

import itertools
import linecache
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import OpOverload

_count = itertools.count()  # for file names that tracebacks can look up


def generate(graph: fx.Graph, owner: torch.nn.Module) -> Callable[..., tuple[Any, ...]]:
    """A function of the placeholders, positional, that returns the output tuple. Constants are read from `owner` now.

    It's to be called without autograd. fx's own code looks up each op by four attributes at each call, and goes through a Python frame an op:
    a tenth of a small step's time.
    """
    return Writer(graph, owner).function()


class Writer:
    def __init__(self, graph: fx.Graph, owner: torch.nn.Module) -> None:
        self.graph, self.owner = graph, owner
        self.scope: dict[str, Any] = {}
        self.names: dict[Any, str] = {}  # names of what the scope holds
        last = {x: node for node in graph.nodes for x in node.all_input_nodes}
        self.done: dict[fx.Node, list[fx.Node]] = {}
        for x, node in last.items():
            self.done.setdefault(node, []).append(x)

    def function(self) -> Callable[..., tuple[Any, ...]]:
        inputs = [n.name for n in self.graph.find_nodes(op="placeholder", sort=True)]
        lines = [f"def program({', '.join(inputs)}):"]
        for node in self.graph.nodes:
            if node.op == "output":
                lines.append(f"    return {self.text(tuple(node.args[0]))}")
            elif node.op != "placeholder":
                lines.append(f"    {node.name} = {self.value(node)}")
            gone = [x.name for x in self.done.get(node, ())] + (
                [node.name] if not node.users and node.op == "call_function" else []
            )
            if gone and node.op != "output":
                lines[-1] += f"; del {', '.join(gone)}"
        source, file = "\n".join(lines) + "\n", f"<spmd program {next(_count)}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        exec(compile(source, file, "exec"), self.scope)
        return self.scope["program"]

    def value(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self.constant(getattr(self.owner, str(node.target)), "constant")
        if node.target is operator.getitem:
            return f"{self.text(node.args[0])}[{self.text(node.args[1])}]"
        target: Any = node.target._op if isinstance(node.target, OpOverload) else node.target
        args = [self.text(a) for a in node.args] + [f"{k}={self.text(v)}" for k, v in node.kwargs.items()]
        return f"{self.constant(target, 'op')}({', '.join(args)})"

    def text(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            return x.name
        if isinstance(x, tuple):
            return f"({''.join(self.text(y) + ', ' for y in x)})"
        if isinstance(x, list):
            return f"[{', '.join(map(self.text, x))}]"
        if x is None or isinstance(x, (bool, str)):
            return repr(x)
        return repr(int(x)) if isinstance(x, int) else self.constant(x, "constant")

    def constant(self, x: Any, kind: str) -> str:
        """The name under which the function finds `x`."""
        key = (type(x), x if kind == "op" else id(x))
        if key not in self.names:
            self.names[key] = f"_{kind}_{len(self.names)}"
            self.scope[self.names[key]] = x
        return self.names[key]
