"""Ops along a split dim, written with partial sums and maxima: a few numbers move where the rule of the op itself would gather the whole.

A decomposition is a function with the op's own signature, over whole tensors. Propagation puts it in the op's place where the dim that the op works
along is split; everywhere else the op stays as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from spmd._torch import make_fx
from spmd.sharding.layout import Layout, Sharded
from spmd.sharding.rule import Call


@dataclass(frozen=True)
class Decomposition:
    """What an op is along the dims that `dims(call)` gives of its input `operand`."""

    function: Callable[..., Any]
    dims: Callable[[Call], Sequence[int]]
    operand: int = 0


def decomposition(call: Call, layouts: Sequence[Layout]) -> Decomposition | None:
    """The decomposition of `call` if it works along a dim that is split."""
    found = TABLE.get(call.name)
    split = layouts[found.operand] if found is not None and found.operand < len(layouts) else None
    return found if found is not None and isinstance(split, Sharded) and split.dim in found.dims(call) else None


def decompose(graph: fx.Graph, node: fx.Node, function: Callable[..., Any]) -> list[fx.Node]:
    """Put the trace of `function` in the place of `node`; its nodes, in order."""
    inputs = {x: x.meta["val"] for x in node.all_input_nodes}
    fake = next(v.fake_mode for v in tree_leaves(list(inputs.values())) if hasattr(v, "fake_mode"))

    def run(*values: torch.Tensor) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        return function(*args, **kwargs)

    with fake:
        traced = make_fx(run)(*inputs.values())
    env: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    inherited = {k: v for k, v in node.meta.items() if k not in ("val", "varies", "grad_of")}
    new: list[fx.Node] = []
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, env.__getitem__)
                env[inner].meta = {**inherited, "val": inner.meta["val"]}
                new.append(env[inner])
            elif inner.op == "get_attr":
                raise AssertionError(f"{node.target}: a decomposition builds its constants with factories")
    results = map_arg(traced.graph.output_node().args[0], env.__getitem__)
    replace(graph, node, results)
    return new


def replace(graph: fx.Graph, node: fx.Node, results: Any) -> None:
    """Let all who read `node`, or an element of it, read `results`."""
    if isinstance(results, fx.Node):
        results.meta = {**node.meta, "val": results.meta["val"]}
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            result = results[user.args[1]]
            result.meta = {**user.meta, "val": result.meta["val"]}
            user.replace_all_uses_with(result)
            graph.erase_node(user)
    graph.erase_node(node)


# ---------------------------------------------------------------------------------------------- the dims of an op


def along(call: Call) -> list[int]:
    return call.dims(call.arg("dim"), len(call.inputs[0]))


def along_one(call: Call) -> list[int]:
    """`dim` of an overload that has one: max.dim, not max of everything."""
    return along(call) if call.has("dim") else []


def matrix(call: Call) -> list[int]:
    n = len(call.inputs[0])
    return [n - 2, n - 1]


def diagonals(call: Call) -> list[int]:
    """The two dims of a square diagonal."""
    shape = call.inputs[0]
    d1, d2 = (d % len(shape) for d in (call.arg("dim1"), call.arg("dim2")))
    return [d1, d2] if call.arg("offset") == 0 and shape[d1] == shape[d2] else []


# ---------------------------------------------------------------------------------------------- decompositions


def opmath(x: torch.Tensor) -> torch.Tensor:
    """Low precision is summed in float32, as the kernels do."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def highest(x: torch.Tensor, dim: Any) -> torch.Tensor:
    """The maximum to subtract before exp: finite, so that a row of -inf gives what it gives in eager."""
    top = x.amax(dim, True)
    return torch.where(top.abs() == math.inf, torch.zeros_like(top), top)


def softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    high = opmath(x)
    e = (high - high.amax([dim], True)).exp()
    return (e / e.sum([dim], True)).to(torch.float32 if half_to_float else x.dtype)


def safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    high = opmath(x.to(dtype or x.dtype))
    masked = high.amax([dim], True) == -math.inf
    return torch.where(masked, torch.zeros_like(high), softmax(high, dim)).to(dtype or x.dtype)


def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    high = opmath(x)
    shifted = high - high.amax([dim], True)
    return (shifted - shifted.exp().sum([dim], True).log()).to(torch.float32 if half_to_float else x.dtype)


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    product = opmath(grad) * output
    return (product - output * product.sum([dim], True)).to(input_dtype)


def log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    high = opmath(grad)
    return (high - output.exp() * high.sum([dim], True)).to(input_dtype)


def logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    high = opmath(x)
    top = highest(high, dim)
    total = (high - top).exp().sum(dim, True).log() + top
    return (total if keepdim else torch.squeeze(total, dim)).to(x.dtype)


def first_at(x: torch.Tensor, best: torch.Tensor, dim: int) -> torch.Tensor:
    """Where along `dim` the value `best` (of size 1 there) stands first; a NaN counts as best."""
    n = x.shape[dim]
    place = torch.arange(n, device=x.device).view([n if d == dim % x.dim() else 1 for d in range(x.dim())])
    return torch.where((x == best) | (x != x), place, n).amin([dim], True)


def extremum_along(amax: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def function(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        best = amax(x, [dim], True)
        found = best, first_at(x, best, dim)
        return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))

    return function


def place_of(amax: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        if dim is None:
            whole = x.reshape(-1)
            place = first_at(whole, amax(whole, [0], True), 0)
            return place.view([1] * x.dim() if keepdim else [])
        place = first_at(x, amax(x, [dim], True), dim)
        return place if keepdim else place.squeeze(dim)

    return function


def triangle(keep: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
        mask = keep(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device), diagonal)
        return torch.where(mask, x, torch.zeros_like(x))

    return function


def on_diagonal(x: torch.Tensor, dim1: int, dim2: int) -> torch.Tensor:
    """`x` with zeros off the diagonal of two dims of one size."""
    n = x.shape[dim1]
    eye = torch.eye(n, dtype=torch.bool, device=x.device)
    mask = eye.view([n if d in (dim1 % x.dim(), dim2 % x.dim()) else 1 for d in range(x.dim())])
    return torch.where(mask, x, torch.zeros_like(x))


def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    d1, d2 = sorted((dim1 % x.dim(), dim2 % x.dim()))
    return on_diagonal(x, d1, d2).sum([d2], dtype=x.dtype).movedim(d1, -1)


def diagonal_backward(
    grad: torch.Tensor, input_sizes: Sequence[int], offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    d1, d2 = sorted((dim1 % len(input_sizes), dim2 % len(input_sizes)))
    return on_diagonal(grad.movedim(-1, d1).unsqueeze(d2).expand(input_sizes), d1, d2)


def diagonal_result(call: Call) -> list[int]:
    """The diagonal is the last dim of a gradient."""
    sizes = call.arg("input_sizes")
    square = sizes[call.arg("dim1")] == sizes[call.arg("dim2")] and call.arg("offset") == 0
    return [len(call.inputs[0]) - 1] if square else []


def trace(x: torch.Tensor) -> torch.Tensor:
    return diagonal(x).sum(dtype=x.dtype)


TABLE: dict[str, Decomposition] = {
    "_softmax": Decomposition(softmax, along),
    "_safe_softmax": Decomposition(safe_softmax, along),
    "_log_softmax": Decomposition(log_softmax, along),
    "_softmax_backward_data": Decomposition(softmax_backward, along),
    "_log_softmax_backward_data": Decomposition(log_softmax_backward, along),
    "logsumexp": Decomposition(logsumexp, along),
    "max": Decomposition(extremum_along(torch.amax), along_one),
    "min": Decomposition(extremum_along(torch.amin), along_one),
    "argmax": Decomposition(place_of(torch.amax), along),
    "argmin": Decomposition(place_of(torch.amin), along),
    "tril": Decomposition(triangle(torch.tril), matrix),
    "triu": Decomposition(triangle(torch.triu), matrix),
    "diagonal": Decomposition(diagonal, diagonals),
    "diagonal_backward": Decomposition(diagonal_backward, diagonal_result),
    "trace": Decomposition(trace, matrix),
}
