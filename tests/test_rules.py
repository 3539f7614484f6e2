"""Every rule of the table against the op itself: run on parts, joined, it gives what the whole gives. And every redistribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spmd.graph.axis import Axis
from spmd.graph.step import StepGraph
from spmd.sharding.constraints import Constraints
from spmd.sharding.layout import Layout, Partial, R, Sharded, join, shard
from spmd.sharding.partition import partition
from spmd.sharding.plan import Choice, Plan
from spmd.sharding.propagate import propagate
from spmd.sharding.rule import Call
from spmd.sharding.sources import rule_for
from spmd.sharding.table import TABLE
from tests.parts import F64, ints, rand, run, step_graph

aten = torch.ops.aten


def rows(n: int) -> torch.Tensor:
    return aten.arange.default(n)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> tuple[torch.Tensor, ...]:
    """What attention keeps for its adjoint."""
    return q, k, v, *aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal)


# One call or more for each row: sizes 7, 5, 4 and 3 don't divide, 6 does.
CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "add": (lambda x, y: aten.add.Tensor(x, y, alpha=2), (rand(7, 4), rand(4))),
    "add_number": (lambda x: aten.add.Tensor(x, 3.0), (rand(7, 4),)),
    "mul": (lambda x, y: aten.mul.Tensor(x, y), (rand(7, 4), rand(7, 1))),
    "div": (lambda x, y: aten.div.Tensor(x, y), (rand(7, 4), rand(4))),
    "where": (lambda c, x, y: aten.where.self(c, x, y), (rand(7, 4) > 0, rand(7, 4), rand(7, 4))),
    "cast": (lambda x: aten._to_copy.default(x, dtype=torch.float32), (rand(7, 4),)),
    "lerp": (lambda x, y: aten.lerp.Scalar(x, y, 0.3), (rand(7, 4), rand(7, 4))),
    "addcmul": (lambda x, y, z: aten.addcmul.default(x, y, z, value=0.5), (rand(7, 4), rand(7, 4), rand(7, 4))),
    "addcdiv": (lambda x, y, z: aten.addcdiv.default(x, y, z, value=0.5), (rand(7, 4), rand(7, 4), rand(7, 4))),
    "zeros_like": (lambda x: aten.zeros_like.default(x), (rand(7, 4),)),
    "new_zeros": (lambda x: aten.new_zeros.default(x, [5, 7]), (rand(7, 4),)),
    "view_merge": (lambda x: aten.view.default(x, [28]), (rand(7, 4),)),
    "view_split": (lambda x: aten.view.default(x, [7, 2, 2]), (rand(7, 4),)),
    "squeeze": (lambda x: aten.squeeze.dims(x, [0, 1]), (rand(7, 1, 4),)),
    "squeeze_dim": (lambda x: aten.squeeze.dim(x, 0), (rand(3, 4),)),
    "view_as_real": (lambda x: aten.view_as_real.default(x), (torch.complex(rand(7, 4), rand(7, 4)),)),
    "view_as_complex": (lambda x: aten.view_as_complex.default(x), (rand(7, 4, 2),)),
    "unsqueeze_last": (lambda x: aten.unsqueeze.default(x, -1), (rand(7, 4),)),
    "unsqueeze": (lambda x: aten.unsqueeze.default(x, 1), (rand(7, 4),)),
    "t": (lambda x: aten.t.default(x), (rand(7, 4),)),
    "transpose": (lambda x: aten.transpose.int(x, 0, -1), (rand(7, 4, 3),)),
    "permute": (lambda x: aten.permute.default(x, [2, 0, 1]), (rand(7, 4, 3),)),
    "expand": (lambda x: aten.expand.default(x, [5, 7, 4]), (rand(7, 4),)),
    "expand_one": (lambda x: aten.expand.default(x, [7, 4]), (rand(7, 1),)),
    "repeat": (lambda x: aten.repeat.default(x, [2, 1, 3]), (rand(7, 4),)),
    "repeat_rows": (lambda x: aten.repeat.default(x, [3, 1]), (rand(7, 4),)),
    "slice": (lambda x: aten.slice.Tensor(x, 0, 1, 5, 2), (rand(7, 4),)),
    "slice_all": (lambda x: aten.slice.Tensor(x, 0, 0, 7), (rand(7, 4),)),
    "slice_backward": (lambda x: aten.slice_backward.default(x, [7, 4], 0, 1, 6, 1), (rand(5, 4),)),
    "slice_scatter": (lambda x, y: aten.slice_scatter.default(x, y, 0, 1, 6), (rand(7, 4), rand(5, 4))),
    "slice_scatter_all": (lambda x, y: aten.slice_scatter.default(x, y, 0, 0, 7), (rand(7, 4), rand(7, 4))),
    "slice_scatter_end": (
        lambda x, y: aten.slice_scatter.default(x, y, 0, 0, 9223372036854775807),
        (rand(7, 4), rand(7, 4)),
    ),
    "split": (lambda x: aten.split.Tensor(x, 2, 1), (rand(7, 4),)),
    "split_with_sizes": (lambda x: aten.split_with_sizes.default(x, [1, 3], 1), (rand(7, 4),)),
    "unfold": (lambda x: aten.unfold.default(x, 1, 2, 1), (rand(7, 4),)),
    "select": (lambda x: aten.select.int(x, 1, 2), (rand(7, 4),)),
    "unbind": (lambda x: aten.unbind.int(x, 1), (rand(7, 4),)),
    "select_backward": (lambda x: aten.select_backward.default(x, [7, 4], 1, 2), (rand(7),)),
    "select_scatter": (lambda x, y: aten.select_scatter.default(x, y, 1, 2), (rand(7, 4), rand(7))),
    "cat": (lambda x, y: aten.cat.default([x, y], 1), (rand(7, 4), rand(7, 2))),
    "cat_rows": (lambda x, y: aten.cat.default([x, y], 0), (rand(7, 4), rand(7, 4))),
    "cat_legacy": (lambda x, y: aten.cat.default([x, y], 0), (torch.zeros(0, dtype=F64), rand(7, 2))),
    "stack": (lambda x, y: aten.stack.default([x, y], 1), (rand(7, 4), rand(7, 4))),
    "pad": (lambda x: aten.constant_pad_nd.default(x, [1, 2], 0), (rand(7, 4),)),
    "sum": (lambda x: aten.sum.dim_IntList(x, [0, 2]), (rand(7, 4, 3),)),
    "sum_all": (lambda x: aten.sum.default(x), (rand(7, 4),)),
    "mean": (lambda x: aten.mean.dim(x, [0], True), (rand(7, 4),)),
    "mean_all": (lambda x: aten.mean.default(x), (rand(7, 4),)),
    "amax": (lambda x: aten.amax.default(x, [0]), (rand(4, 7),)),
    "amin_tiny": (lambda x: aten.amin.default(x, [0], True), (rand(2, 7),)),
    "max": (lambda x: aten.max.default(x), (rand(4, 7),)),
    "max_dim": (lambda x: aten.max.dim(x, 1), (rand(4, 7),)),
    "any": (lambda x: aten.any.dim(x, 0), (rand(4, 7) > 1,)),
    "all": (lambda x: aten.all.dim(x, 0), (rand(2, 7) > -1,)),
    "mm": (lambda x, y: aten.mm.default(x, y), (rand(7, 5), rand(5, 4))),
    "bmm": (lambda x, y: aten.bmm.default(x, y), (rand(3, 7, 5), rand(3, 5, 4))),
    "mv": (lambda x, y: aten.mv.default(x, y), (rand(7, 5), rand(5))),
    "dot": (lambda x, y: aten.dot.default(x, y), (rand(7), rand(7))),
    "addmm": (lambda b, x, y: aten.addmm.default(b, x, y), (rand(4), rand(7, 5), rand(5, 4))),
    "baddbmm": (lambda b, x, y: aten.baddbmm.default(b, x, y), (rand(3, 7, 4), rand(3, 7, 5), rand(3, 5, 4))),
    "convolution": (
        lambda x, w, b: aten.convolution.default(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        (rand(7, 3, 5, 5), rand(4, 3, 3, 3), rand(4)),
    ),
    "convolution_backward": (
        lambda g, x, w: aten.convolution_backward.default(
            g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        ),
        (rand(7, 4, 5, 5), rand(7, 3, 5, 5), rand(4, 3, 3, 3)),
    ),
    "attention": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True),
        (rand(7, 2, 5, 8), rand(7, 2, 5, 8), rand(7, 2, 5, 8)),
    ),
    "attention_of_all": (
        lambda q, k, v, mask: aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, attn_mask=mask),
        (rand(3, 2, 7, 8), rand(3, 2, 5, 8), rand(3, 2, 5, 8), rand(7, 5)),
    ),
    "attention_of_all_backward": (
        lambda *tensors: aten._scaled_dot_product_flash_attention_for_cpu_backward.default(*tensors, 0.0, False),
        (rand(3, 2, 7, 8), *attended(rand(3, 2, 7, 8), rand(3, 2, 5, 8), rand(3, 2, 5, 8))),
    ),
    "softmax": (lambda x: aten._softmax.default(x, 1, False), (rand(7, 4),)),
    "softmax_backward": (lambda g, y: aten._softmax_backward_data.default(g, y, 1, F64), (rand(7, 4), rand(7, 4))),
    "cumsum": (lambda x: aten.cumsum.default(x, 1), (rand(7, 4),)),
    "sort": (lambda x: aten.sort.default(x, 1), (rand(7, 4),)),
    "topk": (lambda x: aten.topk.default(x, 2, 1), (rand(7, 4),)),
    "argmax": (lambda x: aten.argmax.default(x, 1), (rand(7, 4),)),
    "argmax_all": (lambda x: aten.argmax.default(x), (rand(7, 4),)),
    "logsumexp": (lambda x: aten.logsumexp.default(x, [1], True), (rand(7, 4),)),
    "flip": (lambda x: aten.flip.default(x, [1]), (rand(7, 4),)),
    "roll": (lambda x: aten.roll.default(x, [1], [1]), (rand(7, 4),)),
    "embedding": (lambda w, i: aten.embedding.default(w, i), (rand(9, 4), ints(9, 7, 3))),
    "embedding_backward": (
        lambda g, i: aten.embedding_dense_backward.default(g, i, 9, -1, False),
        (rand(7, 3, 4), ints(9, 7, 3)),
    ),
    "gather": (lambda x, i: aten.gather.default(x, 1, i), (rand(7, 4), ints(4, 7, 2))),
    "scatter": (lambda x, i, s: aten.scatter.src(x, 1, i, s), (rand(7, 4), ints(4, 7, 1), rand(7, 1))),
    "scatter_add": (lambda x, i, s: aten.scatter_add.default(x, 1, i, s), (rand(7, 4), ints(4, 7, 3), rand(7, 3))),
    "index": (lambda x, i: aten.index.Tensor(x, [None, i]), (rand(7, 4), ints(4, 5))),
    "index_two": (lambda x, i, j: aten.index.Tensor(x, [i, None, j]), (rand(7, 4, 3), ints(7, 5), ints(3, 5))),
    "index_own": (lambda x, i: aten.index.Tensor(x, [rows(7), i]), (rand(7, 4, 3), ints(4, 7))),
    "index_own_each": (
        lambda x, i: aten.index.Tensor(x, [rows(7).unsqueeze(1), None, i]),
        (rand(7, 4, 3), ints(3, 7, 2)),
    ),
    "index_own_inner": (lambda x, i: aten.index.Tensor(x, [i, rows(6)]), (rand(4, 6), ints(4, 5, 6))),
    "index_own_diagonal": (lambda x: aten.index.Tensor(x, [rows(7), rows(7)]), (rand(7, 7, 2),)),
    "index_own_mask": (
        lambda x: aten.index.Tensor(x, [rows(7).view(7, 1, 1, 1), rows(4).view(1, 1, 1, 4)]),
        (rand(7, 4),),
    ),
    "index_own_table": (lambda x: aten.index.Tensor(x, [rows(7).unsqueeze(1), rows(4)]), (rand(7, 4),)),
    "index_put_own": (
        lambda x, i, v: aten.index_put.default(x, [rows(7), i], v, True),
        (rand(7, 4, 3), ints(4, 7), rand(7, 3)),
    ),
    "index_put_own_set": (
        lambda x, i, v: aten.index_put.default(x, [rows(7), i], v, False),
        (rand(7, 4, 3), ints(4, 7), rand(3)),
    ),
    "index_put": (lambda x, i, v: aten.index_put.default(x, [i], v, True), (rand(9, 4), ints(9, 7), rand(7, 4))),
    "index_put_set": (lambda x, v: aten.index_put.default(x, [torch.arange(7)], v, False), (rand(9, 4), rand(7, 4))),
    "index_select": (lambda x, i: aten.index_select.default(x, 1, i), (rand(7, 4), ints(4, 5))),
    "index_add": (lambda x, i, v: aten.index_add.default(x, 0, i, v), (rand(9, 4), ints(9, 7), rand(7, 4))),
    "layer_norm": (
        lambda x, w, b: aten.native_layer_norm.default(x, [4], w, b, 1e-5),
        (rand(7, 3, 4), rand(4), rand(4)),
    ),
    "group_norm": (
        lambda x, w, b: aten.native_group_norm.default(x, w, b, 7, 4, 9, 2, 1e-5),
        (rand(7, 4, 3, 3), rand(4), rand(4)),
    ),
    "max_pool": (lambda x: aten.max_pool2d_with_indices.default(x, [2, 2]), (rand(7, 3, 4, 4),)),
    "avg_pool": (lambda x: aten.avg_pool2d.default(x, [2, 2]), (rand(7, 3, 4, 4),)),
    "upsample_backward": (
        lambda g: aten.upsample_nearest2d_backward.default(g, [8, 8], [7, 3, 4, 4]),
        (rand(7, 3, 8, 8),),
    ),
    "tril": (lambda x: aten.tril.default(x), (rand(3, 4, 4),)),
    "qr": (lambda x: aten.linalg_qr.default(x), (rand(3, 4, 4),)),
    "sum_to_int": (lambda x: aten.sum.dim_IntList(x, [1], dtype=torch.int64), (rand(7, 4),)),
    "cumsum_to_int": (lambda x: aten.cumsum.default(x, 1, dtype=torch.int64), (rand(7, 4),)),
    "cast_half": (lambda x: aten._to_copy.default(x, dtype=torch.float16), (rand(7, 4).bfloat16(),)),
    "view_dtype": (lambda x: aten.view.dtype(x, torch.int64), (rand(7, 4),)),
    "fill": (lambda x, v: aten.fill.Tensor(x, v), (rand(7, 4), rand())),
    "any_number": (lambda x: aten.any.dim(x, 0), (torch.zeros(2, 7),)),
    "all_number": (lambda x: aten.all.dim(x, 0), (torch.ones(2, 7),)),
    "any_no_dims": (lambda x: aten.any.dims(x, []), (rand(7, 4) > 0,)),
    "mean_half": (lambda x: aten.mean.dim(x, [0]), (torch.full((600, 2), 200.0, dtype=torch.float16),)),
    "index_select_number": (lambda x, i: aten.index_select.default(x, 0, i), (rand(), ints(1, 1))),
    "triangular": (
        lambda a, b: aten.linalg_solve_triangular.default(a, b, upper=True),
        (rand(3, 3, 3).triu() + 5 * torch.eye(3, dtype=F64), rand(3, 3, 2)),
    ),
    "glu": (lambda x: aten.glu.default(x, 1), (rand(7, 4),)),
    "glu_backward": (lambda g, x: aten.glu_backward.default(g, x, 1), (rand(7, 2), rand(7, 4))),
    "scatter_reduce": (
        lambda x, i, s: aten.scatter_reduce.two(x, 1, i, s, "amax"),
        (rand(7, 4), ints(4, 7, 2), rand(7, 2)),
    ),
    "pixel_shuffle": (lambda x: aten.pixel_shuffle.default(x, 2), (rand(7, 4, 3, 3),)),
    "complex": (lambda x, y: aten.complex.default(x, y), (rand(7, 4), rand(7, 4))),
    "masked_put": (lambda x, m, v: aten.index_put.default(x, [m], v), (rand(7, 4), rand(7, 4) > 0, rand())),
    "hardshrink_backward": (
        lambda g, x: aten.hardshrink_backward.default(g, x, 0.5),
        (rand(7, 4), rand(7, 4)),
    ),
    "prelu": (lambda x, w: aten._prelu_kernel.default(x, w), (rand(7, 4), rand(1, 4))),
    "prelu_backward": (
        lambda g, x, w: aten._prelu_kernel_backward.default(g, x, w),
        (rand(7, 4), rand(7, 4), rand(1, 4)),
    ),
    "bucketize": (lambda x, b: aten.bucketize.Tensor(x, b), (rand(7, 4), rand(3).sort().values)),
    "index_copy": (lambda x, i, s: aten.index_copy.default(x, 1, i, s), (rand(7, 4), torch.tensor([2, 0]), rand(7, 2))),
    "trilinear": (
        lambda a, w, b: aten._trilinear.default(a, w, b, [1, 3], [0], [1, 2], [2, 3]),
        (rand(7, 4), rand(3, 4, 5), rand(7, 5)),
    ),
    "fft": (lambda x: aten._fft_c2c.default(x, [1, 2], 0, True), (torch.complex(rand(7, 4, 3), rand(7, 4, 3)),)),
    "fft_real": (lambda x: aten._fft_r2c.default(x, [1], 0, True), (rand(7, 6),)),
    "fft_back": (lambda x: aten._fft_c2r.default(x, [1], 2, 6), (torch.complex(rand(7, 4), rand(7, 4)),)),
    "rot90": (lambda x: aten.rot90.default(x, 1, [1, 2]), (rand(7, 4, 3),)),
    "diag_embed": (lambda x: aten.diag_embed.default(x, 1, 0, -1), (rand(7, 4),)),
    "unfold_backward": (lambda g: aten.unfold_backward.default(g, [7, 4], 1, 2, 1), (rand(7, 3, 2),)),
    "adaptive_max_pool": (lambda x: aten.adaptive_max_pool2d.default(x, [2, 2]), (rand(7, 3, 4, 4),)),
    "adaptive_max_pool_backward": (
        lambda g, x, i: aten.adaptive_max_pool2d_backward.default(g, x, i),
        (rand(7, 3, 2, 2), rand(7, 3, 4, 4), ints(16, 7, 3, 2, 2)),
    ),
    "im2col": (lambda x: aten.im2col.default(x, [2, 2], [1, 1], [0, 0], [1, 1]), (rand(7, 3, 4, 4),)),
    "col2im": (lambda x: aten.col2im.default(x, [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), (rand(7, 12, 9),)),
    "weight_norm": (lambda v, g: aten._weight_norm_interface.default(v, g, 0), (rand(7, 4), rand(7, 1))),
    "weight_norm_last": (lambda v, g: aten._weight_norm_interface.default(v, g, 1), (rand(4, 7), rand(1, 7))),
    "weight_norm_backward": (
        lambda w, v, g, n: aten._weight_norm_interface_backward.default(w, v, g, n, 0),
        (rand(7, 4), rand(7, 4), rand(7, 1), rand(7, 1).abs()),
    ),
    "lu_solve": (
        lambda a, p, b: aten.linalg_lu_solve.default(a, p, b),
        (
            rand(7, 3, 3) + 5 * torch.eye(3, dtype=F64),
            torch.tensor([1, 2, 3], dtype=torch.int32).expand(7, 3),
            rand(7, 3, 2),
        ),
    ),
    "slogdet": (lambda x: aten._linalg_slogdet.default(x), (rand(7, 3, 3),)),
    "det": (lambda x: aten._linalg_det.default(x), (rand(7, 3, 3),)),
    "matrix_exp": (lambda x: aten.linalg_matrix_exp.default(x), (rand(7, 3, 3),)),
    "ctc": (
        lambda x, t, i, n: torch.ops.spmd.ctc_loss.default(x, t, i, n, 0, False),
        (rand(6, 7, 4).log_softmax(2), ints(3, 7, 2) + 1, torch.full((7,), 6), torch.full((7,), 2)),
    ),
    "ctc_backward": (
        lambda g, x, t, i, n: torch.ops.spmd.ctc_loss_backward.default(g, x, t, i, n, 0, False),
        (rand(7), rand(6, 7, 4).log_softmax(2), ints(3, 7, 2) + 1, torch.full((7,), 6), torch.full((7,), 2)),
    ),
    "cdist": (lambda x, y: aten._cdist_forward.default(x, y, 2.0, None), (rand(2, 7, 3), rand(2, 4, 3))),
    "cdist_backward": (
        lambda g, x, y, d: aten._cdist_backward.default(g, x, y, 2.0, d),
        (rand(2, 7, 4), rand(2, 7, 3), rand(2, 4, 3), rand(2, 7, 4).abs()),
    ),
    "diagonal": (lambda x: aten.diagonal.default(x, 1, 0, 2), (rand(4, 7, 3),)),
    "diagonal_backward": (lambda g: aten.diagonal_backward.default(g, [4, 7, 3], 1, 0, 2), (rand(7, 2),)),
    "layer_norm_backward": (
        lambda g, x, m, r, w: aten.native_layer_norm_backward.default(g, x, [3], m, r, w, w, [True, True, True]),
        (rand(3, 2, 3), rand(3, 2, 3), rand(3, 2, 1), rand(3, 2, 1).abs(), rand(3)),
    ),
    "layer_norm_backward_empty": (
        lambda g, x, m, r, w: aten.native_layer_norm_backward.default(g, x, [3], m, r, w, w, [True, True, False]),
        (rand(4, 3), rand(4, 3), rand(4, 1), rand(4, 1).abs(), rand(3)),
    ),
    "group_norm_backward": (
        lambda g, x, m, r, w: aten.native_group_norm_backward.default(g, x, m, r, w, 7, 4, 3, 2, [True, True, True]),
        (rand(7, 4, 3), rand(7, 4, 3), rand(7, 2), rand(7, 2).abs(), rand(4)),
    ),
    "batch_norm_eval": (
        lambda x, w, m, v: aten._native_batch_norm_legit_no_training.default(x, w, w, m, v, 0.1, 1e-5),
        (rand(7, 4, 3), rand(4), rand(4), rand(4).abs()),
    ),
    "batch_norm_eval_backward": (
        lambda g, x, w, m, v: aten.native_batch_norm_backward.default(
            g, x, w, m, v, m, v, False, 1e-5, [True, True, True]
        ),
        (rand(7, 4, 3), rand(7, 4, 3), rand(4), rand(4), rand(4).abs()),
    ),
    "nll_backward": (
        lambda g, x, t, w: aten.nll_loss_backward.default(g, x, t, None, 1, -100, w),
        (rand(), rand(7, 4), ints(4, 7), torch.tensor(7.0, dtype=F64)),
    ),
    "nll_backward_each": (
        lambda g, x, t, w: aten.nll_loss_backward.default(g, x, t, None, 0, -100, w),
        (rand(7), rand(7, 4), ints(4, 7), torch.tensor(7.0, dtype=F64)),
    ),
    "nll2d_backward": (
        lambda g, x, t, w: aten.nll_loss2d_backward.default(g, x, t, None, 1, -100, w),
        (rand(), rand(7, 4, 3, 2), ints(4, 7, 3, 2), torch.tensor(7.0, dtype=F64)),
    ),
    "fused_adamw": (
        lambda p, g, m, v, s: aten._fused_adamw.default(
            [p],
            [g],
            [m],
            [v],
            [],
            [s],
            lr=0.1,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        ),
        (rand(7, 4), rand(7, 4), rand(7, 4), rand(7, 4).abs(), torch.tensor(3.0)),
    ),
}


def transfers(name: str, world: int) -> list[tuple[int, int, list[Layout], list[Layout]]]:
    fn, args = CALLS[name]
    call = op_call(step_graph(fn, args))
    rule = rule_for(call)
    if rule is None:
        return []
    found: list[tuple[int, int, list[Layout], list[Layout]]] = []
    for i, shape in enumerate(call.inputs):
        for d, size in enumerate(shape):
            if size > 1 and rule.inputs[i] is not None and (t := rule.transfer(i, shard(d, size), world)):
                found.append((i, d, [w or R for w in t[0]], t[1]))
    for group in rule.linear:
        if all(call.tensors[i].meta["val"].is_floating_point() for i in group):
            wants: list[Layout] = [Partial() if i in group else R for i in range(len(call.inputs))]
            found.append((group[0], -1, wants, [Partial()] * len(call.values)))
    return found


def op_call(step: StepGraph) -> Call:
    nodes = [
        n
        for n in step.graph.nodes
        if n.op == "call_function" and hasattr(n.target, "_schema") and n.target is not aten.arange.default
    ]
    return Call(nodes[-1])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_a_rule_is_what_the_op_does(name: str, world: int) -> None:
    """For each shard of each input that the rule accepts: parts in, op on parts, joined parts out."""
    fn, args = CALLS[name]
    expected = torch.utils._pytree.tree_leaves(fn(*args))
    for i, d, wants, outs in transfers(name, world):
        step = step_graph(fn, args)
        call = op_call(step)
        place = dict(zip(call.tensors, wants, strict=True))
        plan = Plan(world)
        for node in step.graph.nodes:
            if node.op == "call_function":
                plan.layouts[node] = R
                plan.choices[node] = Choice(
                    Call(node), rule_for(Call(node)), [R] * len(Call(node).tensors), [R] * len(Call(node).values)
                )
            elif node.op != "output":
                plan.layouts[node] = place.get(node, R)
        plan.choices[call.node] = Choice(call, rule_for(call), list(wants), outs)
        _, spec = torch.utils._pytree.tree_flatten(call.node.meta["val"])
        plan.layouts[call.node] = torch.utils._pytree.tree_unflatten(outs, spec)
        for node in step.graph.nodes:
            if node.target.__class__.__name__ == "builtin_function_or_method" and node.op == "call_function":
                del plan.choices[node]
                plan.layouts[node] = plan.layouts[node.args[0]][node.args[1]]
        plan.outputs = [R] * len(step.outputs)
        for result in run(step, plan, world, args):
            for got, want in zip(result, expected, strict=True):
                torch.testing.assert_close(
                    got, want, rtol=1e-12, atol=1e-12, msg=f"input {i} sharded on dim {d}: {wants} -> {outs}"
                )


@pytest.mark.parametrize("name", ["weight_norm", "weight_norm_backward", "fft"])
def test_a_kernel_that_dies_of_empty_tensors_gets_none(name: str) -> None:
    assert transfers(name, 4) and not transfers(name, 5)  # 7 rows in chunks of 2: the fifth rank has none


MUST_SPLIT = {
    "mm",
    "addmm",
    "convolution",
    "attention",
    "attention_of_all",
    "attention_of_all_backward",
    "layer_norm",
    "embedding",
    "softmax",
    "sum_all",
    "mean_all",
    "view_merge",
    "convolution_backward",
    "index_put",
    "fused_adamw",
    "index_own",
    "fft",
    "fft_real",
    "fft_back",
    "slice_scatter_all",
    "slice_scatter_end",
    "index_own_each",
    "index_own_mask",
    "index_put_own",
}


@pytest.mark.parametrize("name", sorted(MUST_SPLIT))
def test_rules_that_matter_exist(name: str) -> None:
    assert any(i == 0 or d == 0 for i, d, *_ in transfers(name, 2))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_pieces_of_the_batch_are_joined_and_cut_without_moving(world: int) -> None:
    """Two views of a batch in one tensor, as in contrastive losses: whole blocks of a split dim."""

    def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined = aten.cat.default([x, y, x * 2], 0)
        first = aten.slice.Tensor(joined, 0, None, 14)
        parts = aten.split_with_sizes.default(joined, [7, 14])
        padded = aten.slice_backward.default(aten.slice.Tensor(joined, 0, 7, 14), [21, 4], 0, -14, -7, 1)
        return first[:7] * joined[7:14], parts[0] + y, (parts[1] * first).sum([1]), padded.sum([0])

    args = rand(7, 4), rand(7, 4)
    step = step_graph(chain, args)
    plan = propagate(step, Constraints((shard(0, 7),) * 2, (shard(0, 7), shard(0, 7), Sharded(0, 2, 7, 1), R)), world)
    results = run(step, plan, world, args)
    for parts, place, want in zip(zip(*results, strict=True), plan.outputs, chain(*args), strict=True):
        assert place is not None
        torch.testing.assert_close(join(list(parts), place), want)
    assert [c.op for c in partition(step, plan, Axis(world, 0, "0")).collectives] == ["all_reduce"]


SHARDS = [R, Partial(), shard(0, 7), shard(1, 6), Sharded(1, 2, 3, 1), Sharded(1, 1, 3, 2), Sharded(1, 3, 2, 1)]


@pytest.mark.parametrize(
    ("dtype", "world"),
    [
        *((F64, world) for world in (2, 3, 4)),
        *((dtype, 3) for dtype in (torch.int64, torch.complex128, torch.bfloat16, torch.float8_e4m3fn, torch.bool)),
    ],
)
def test_redistribution_keeps_the_whole(world: int, dtype: torch.dtype) -> None:
    """From every layout to every other: the joined parts are the tensor that was there."""
    x = (rand(7, 6) * 10).round().to(dtype)
    for a in SHARDS:
        for b in SHARDS:
            if a == b or (b == Partial() and (isinstance(a, Sharded) or dtype.itemsize == 1)):
                continue
            step = step_graph(lambda t: aten.alias.default(t), (x,))
            node = next(n for n in step.graph.nodes if n.op == "call_function")
            plan = Plan(world)
            plan.layouts = {step.placeholders[0]: a, node: a}
            plan.choices = {node: Choice(Call(node), rule_for(Call(node)), [a], [a])}
            plan.outputs = [b]
            parts = [y for (y,) in run(step, plan, world, (x,))]
            found, wide = join(parts, b), torch.complex128 if dtype.is_complex else F64
            assert found.dtype == dtype
            torch.testing.assert_close(found.to(wide), x.to(wide), rtol=0, atol=0, msg=f"{a} -> {b}")


def test_the_table_has_no_row_that_torch_lacks() -> None:
    unknown = [name for name in TABLE if "::" not in name and not hasattr(aten, name)]
    assert not unknown
