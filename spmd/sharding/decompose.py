"""Ops that work along a split dim, written with partial sums and maxima: a few numbers move where the op itself would need the whole.

A decomposition is a function with the op's own signature, over whole tensors. Propagation puts it in the op's place where it's needed; everywhere else
(another dim is split, or none) the op and its kernel stay.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from spmd._torch import decomposition_table, make_fx, tree_leaves
from spmd.sharding import decompositions as d
from spmd.sharding.layout import Layout, R, Sharded
from spmd.sharding.rule import Call

aten = torch.ops.aten


class Row(NamedTuple):
    function: Callable[..., Any]
    needed: Callable[[Call, Sequence[Layout]], bool]


def decomposition(call: Call, layouts: Sequence[Layout]) -> Callable[..., Any] | None:
    """The decomposition of `call`, whose tensors lie as `layouts` say, if it works along a split dim."""
    row = TABLE.get(call.name)
    return row.function if row is not None and layouts and row.needed(call, layouts) else None


def decompose(graph: fx.Graph, node: fx.Node, function: Callable[..., Any]) -> tuple[list[fx.Node], dict[str, fx.Node]]:
    """Put the trace of `function` in the place of `node`: its nodes, in order, and which of them stand for `node` or its elements, by their names."""
    inputs = {x: x.meta["val"] for x in node.all_input_nodes}
    fake = next(v.fake_mode for v in tree_leaves(list(inputs.values())) if hasattr(v, "fake_mode"))

    def run(*values: torch.Tensor) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        return function(*args, **kwargs)

    with fake:
        traced = make_fx(run)(*inputs.values())
    traced.graph.eliminate_dead_code()
    env: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    inherited = {k: v for k, v in node.meta.items() if k not in ("val", "varies", "grad_of")}
    new: list[fx.Node] = []
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, env.__getitem__)
                env[inner].meta = {**inherited, "val": inner.meta["val"]}
                new.append(env[inner])
    return new, replace(graph, node, map_arg(traced.graph.output_node().args[0], env.__getitem__))


def replace(graph: fx.Graph, node: fx.Node, results: Any) -> dict[str, fx.Node]:
    """Let all who read `node`, or an element of it, read `results`."""
    heirs = {}
    if isinstance(results, fx.Node):
        heirs[node.name] = results
        adopt(graph, node, results)
        return heirs
    for user in list(node.users):
        assert user.target is operator.getitem
        heirs[user.name] = results[user.args[1]]
        adopt(graph, user, results[user.args[1]])
    graph.erase_node(node)
    return heirs


def adopt(graph: fx.Graph, node: fx.Node, result: fx.Node) -> None:
    """`result` takes the place of `node`."""
    if result.op == "call_function":
        result.meta = {**node.meta, "val": result.meta["val"]}
    node.replace_all_uses_with(result)
    graph.erase_node(node)


# ---------------------------------------------------------------------------------------------- when it's needed


def split(layout: Layout, dims: Sequence[int]) -> bool:
    return isinstance(layout, Sharded) and layout.dim in dims


def along(call: Call, layouts: Sequence[Layout]) -> bool:
    """The dims that the op reduces, or works along, are split."""
    n = len(call.inputs[0])
    dims = call.dims(call.arg("dim"), n)
    return any(split(p, dims) for p, s in zip(layouts, call.inputs, strict=True) if len(s) == n)


def along_one(call: Call, layouts: Sequence[Layout]) -> bool:
    """For overloads with a dim: max.dim, not max of everything."""
    return call.has("dim") and along(call, layouts)


def matrix(call: Call, layouts: Sequence[Layout]) -> bool:
    n = len(call.inputs[0])
    return split(layouts[0], (n - 2, n - 1))


def square(call: Call, layouts: Sequence[Layout]) -> bool:
    """A main diagonal, and what it's taken from or put into is split along it."""
    backward = call.has("input_sizes")
    shape = call.arg("input_sizes") or call.inputs[0]
    d1, d2 = call.dims([call.arg("dim1"), call.arg("dim2")], len(shape))
    main = call.arg("offset") == 0 and shape[d1] == shape[d2]
    return main and split(layouts[0], (len(shape) - 2,) if backward else (d1, d2))


def anywhere(call: Call, layouts: Sequence[Layout]) -> bool:
    """For losses, which count the whole batch."""
    return any(isinstance(p, Sharded) for p in layouts)


def statistics(call: Call, layouts: Sequence[Layout]) -> bool:
    """Batch norm in training, with anything but the channels split."""
    training = call.arg("training" if call.has("training") else "train")
    return training and any(
        isinstance(p, Sharded) and p.dim != 1 for p, s in zip(layouts, call.inputs, strict=True) if len(s) > 1
    )


def queries(call: Call, layouts: Sequence[Layout]) -> bool:
    """Causal attention, with the queries' places split."""
    return bool(call.arg("is_causal")) and not call.arg("dropout_p") and split(layouts[int(call.has("grad_out"))], (2,))


def row_major(call: Call, layouts: Sequence[Layout]) -> bool:
    """as_strided and its scatter of all elements in their order, as pooling to 1 has it: a view in other words."""
    x, size = call.tensors[0].meta["val"], call.arg("size")
    strides = torch.empty(size, device="meta").stride()
    plain = all(n == 1 or a == b for n, a, b in zip(size, call.arg("stride"), strides, strict=True))
    whole = (
        x.is_contiguous() and math.prod(size) == x.numel() and call.arg("storage_offset") in (None, x.storage_offset())
    )
    return plain and whole and any(p != R for p in layouts)


# ---------------------------------------------------------------------------------------------- table


def torchs(op: Any) -> Callable[..., Any]:
    """torch's own decomposition, where it keeps to plain ATen ops and to the kernel's results within rounding."""

    def function(*args: Any, **kwargs: Any) -> Any:
        found = decomposition_table[op](*args, **kwargs)
        return tuple(found) if isinstance(found, tuple) else found  # a plain tuple: named ones are traced as calls

    return function


TABLE: dict[str, Row] = {
    "_softmax": Row(d.softmax, along),
    "_safe_softmax": Row(d.safe_softmax, along),
    "_log_softmax": Row(d.log_softmax, along),
    "_softmax_backward_data": Row(d.softmax_backward, along),
    "_log_softmax_backward_data": Row(d.log_softmax_backward, along),
    "logsumexp": Row(d.logsumexp, along),
    "var": Row(d.var, along),
    "var_mean": Row(d.var_mean, along),
    "std": Row(d.std, along),
    "std_mean": Row(d.std_mean, along),
    "linalg_vector_norm": Row(d.vector_norm, along),
    "max": Row(d.extremum_along(torch.amax), along_one),
    "min": Row(d.extremum_along(torch.amin), along_one),
    "argmax": Row(d.place_of(torch.amax), along),
    "argmin": Row(d.place_of(torch.amin), along),
    "tril": Row(d.triangle(torch.tril), matrix),
    "triu": Row(d.triangle(torch.triu), matrix),
    "diagonal": Row(d.diagonal, square),
    "diagonal_backward": Row(d.diagonal_backward, square),
    "as_strided": Row(d.restrided, row_major),
    "as_strided_scatter": Row(d.restrided_scatter, row_major),
    "trace": Row(d.trace, matrix),
    "_native_batch_norm_legit": Row(d.batch_norm_no_statistics, statistics),
    "_native_batch_norm_legit_functional": Row(d.batch_norm, statistics),
    "native_batch_norm_backward": Row(torchs(aten.native_batch_norm_backward.default), statistics),
    "_scaled_dot_product_flash_attention_for_cpu": Row(d.causal_attention, queries),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Row(d.causal_attention_backward, queries),
    "nll_loss_forward": Row(torchs(aten.nll_loss_forward.default), anywhere),
    "nll_loss2d_forward": Row(torchs(aten.nll_loss2d_forward.default), anywhere),
    "mse_loss": Row(torchs(aten.mse_loss.default), anywhere),
    "mse_loss_backward": Row(torchs(aten.mse_loss_backward.default), anywhere),
    "smooth_l1_loss": Row(torchs(aten.smooth_l1_loss.default), anywhere),
    "smooth_l1_loss_backward": Row(torchs(aten.smooth_l1_loss_backward.default), anywhere),
    "huber_loss": Row(torchs(aten.huber_loss.default), anywhere),
    "huber_loss_backward": Row(torchs(aten.huber_loss_backward.default), anywhere),
    "binary_cross_entropy": Row(torchs(aten.binary_cross_entropy.default), anywhere),
    "binary_cross_entropy_backward": Row(torchs(aten.binary_cross_entropy_backward.default), anywhere),
    "binary_cross_entropy_with_logits": Row(torchs(aten.binary_cross_entropy_with_logits.default), anywhere),
    "soft_margin_loss": Row(torchs(aten.soft_margin_loss.default), anywhere),
    "soft_margin_loss_backward": Row(torchs(aten.soft_margin_loss_backward.default), anywhere),
}
