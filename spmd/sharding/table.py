"""The table: op name -> category. One row a kind of op; what a category means is told by its function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spmd.sharding import categories as c
from spmd.sharding import emit, indexing, layers, lookup
from spmd.sharding.rule import Call, Rule

Entry = Callable[[Call], Rule | None]
TABLE: dict[str, Entry] = {}
FIRST = ((0,),)


def row(entry: Entry, names: str) -> None:
    for name in names.split():
        assert name not in TABLE, name
        TABLE[name] = entry


# elementwise, not linear in any operand
row(
    c.pointwise,
    """
    abs acos acosh angle asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    ceil clamp clamp_max clamp_min copysign cos cosh digamma elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge gelu
    gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 isfinite isinf isnan isneginf isposinf ldexp le leaky_relu lgamma log log10
    log1p log2 log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish
    mvlgamma nan_to_num ne nextafter polygamma pow reciprocal relu remainder round rsqrt sgn sigmoid sign signbit silu sin sinc sinh
    softplus softshrink special_entr sqrt square tan tanh threshold trunc xlogy relu6 celu selu true_divide
    elu_backward leaky_relu_backward hardtanh_backward hardsigmoid_backward hardswish_backward log_sigmoid_backward softplus_backward mish_backward complex polar
    """,
)
# elementwise, linear in the first operand: most adjoints
row(
    partial(c.pointwise, linear=FIRST),
    """
    neg clone lift_fresh_copy conj _conj _conj_physical conj_physical real imag deg2rad rad2deg positive contiguous
    tanh_backward sigmoid_backward gelu_backward silu_backward threshold_backward hardshrink_backward softshrink_backward logit_backward native_dropout_backward _fw_primal""",
)
row(partial(c.pointwise, linear=FIRST, view=True), "detach alias lift_fresh")
row(partial(c.pointwise, linear=((1,),)), "copy")
row(c.pointwise, "_prelu_kernel")
row(partial(c.pointwise, linear=FIRST), "_prelu_kernel_backward")
row(indexing.bucketize, "bucketize")
row(partial(c.pointwise, linear=((0, 1), (0, 2))), "addcmul")
row(partial(c.pointwise, linear=((0, 1),)), "lerp addcdiv")
row(c.add, "add sub rsub")
row(c.mul, "mul")
row(c.div, "div")
row(c.where, "where")
row(c.cast, "_to_copy")
row(layers.fused_adam, "_fused_adam _fused_adamw")

# made from a shape or from numbers
row(c.like, "zeros_like ones_like full_like empty_like fill")
row(
    c.factory,
    "new_zeros new_ones new_full new_empty new_empty_strided arange full zeros ones empty empty_strided eye linspace logspace scalar_tensor tril_indices triu_indices",
)
row(
    c.random,
    """
    bernoulli rand_like randn_like randint_like normal_functional uniform rand randn randint randperm multinomial normal exponential
    native_dropout rrelu_with_noise_functional poisson binomial geometric cauchy log_normal""",
)
row(c.bits, "spmd::random_bits")

# dims moved, split, merged
row(c.view, "view _unsafe_view reshape _reshape_alias")
row(c.squeeze, "squeeze")
row(c.unsqueeze, "unsqueeze")
row(c.view_complex, "view_as_real view_as_complex")
row(c.permute, "t transpose permute")
row(c.expand, "expand")
row(c.repeat, "repeat")
row(c.window, "slice slice_backward split split_with_sizes unsafe_split unfold")
row(partial(c.window, linear=((0, 1),)), "slice_scatter")
row(c.unfold_backward, "unfold_backward")
row(c.select, "select unbind")
row(c.select_adjoint, "select_backward select_scatter")
row(c.diagonal, "diagonal diagonal_backward diag_embed")
row(c.cat, "cat")
row(c.stack, "stack")
row(c.pad, "constant_pad_nd")

# sums, products of matrices
row(c.reduction, "sum mean amax amin max min any all")
row(partial(layers.einsum, equation="mk,kn->mn"), "mm")
row(partial(layers.einsum, equation="bmk,bkn->bmn"), "bmm")
row(partial(layers.einsum, equation="mk,k->m"), "mv")
row(partial(layers.einsum, equation="k,k->"), "dot vdot")
row(partial(layers.addmm, equation="mk,kn->mn"), "addmm")
row(partial(layers.addmm, equation="bmk,bkn->bmn"), "baddbmm")
row(partial(layers.addmm, equation="mk,k->m"), "addmv")
row(layers.ctc, "spmd::ctc_loss spmd::ctc_loss_backward")
row(layers.trilinear, "_trilinear")
row(layers.distances, "_cdist_forward _cdist_backward")
row(layers.convolution, "convolution")
row(layers.convolution_backward, "convolution_backward")
ATTENTION = tuple(
    f"_scaled_dot_product_{kernel}_attention{rest}"
    for kernel, device in (("flash", "_for_cpu"), ("efficient", ""), ("flash", ""), ("cudnn", ""))
    for rest in (device, f"{device}_backward")
)
row(layers.attention, " ".join(ATTENTION))

# independent along all dims but one
row(
    c.along,
    "_softmax _safe_softmax _log_softmax cumprod logcumsumexp sort topk argmax argmin argsort logsumexp prod softmax log_softmax cummax cummin median kthvalue mode nanmedian glu glu_backward var var_mean std std_mean linalg_vector_norm",
)
row(partial(c.along, linear=FIRST), "_softmax_backward_data _log_softmax_backward_data cumsum flip rot90")
row(partial(c.along, linear=FIRST, dim="dims"), "roll")
row(c.fourier, "_fft_c2c _fft_r2c _fft_c2r")

# one number, or memory as it lies: of the whole only
row(c.whole_value, "_local_scalar_dense equal is_nonzero _linalg_check_errors _assert_async")
# losses count the batch: decomposed where it's split
row(
    c.whole_value,
    """
    nll_loss_forward nll_loss2d_forward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward""",
)
row(lookup.loss_backward, "nll_loss_backward nll_loss2d_backward")
row(partial(c.whole_value, emit=emit.restrided), "as_strided as_strided_scatter")

# indices
row(lookup.embedding, "embedding")
row(lookup.embedding_backward, "embedding_dense_backward")
row(lookup.gather, "gather")
row(indexing.scatter, "scatter scatter_add scatter_reduce")
row(indexing.index, "index _unsafe_index")
row(indexing.index_put, "index_put _unsafe_index_put")
row(indexing.index_select, "index_select")
row(indexing.index_add, "index_add")
row(indexing.index_copy, "index_copy")

# independent over the leading dims
row(layers.rows, "searchsorted")
row(layers.norm, "native_layer_norm _fused_rms_norm")
row(layers.weight_norm, "_weight_norm_interface _weight_norm_interface_backward")
row(layers.norm_backward, "native_layer_norm_backward _fused_rms_norm_backward")
row(layers.group_norm, "native_group_norm")
row(layers.group_norm_backward, "native_group_norm_backward")
row(
    layers.batch_norm,
    "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training native_batch_norm_backward",
)
row(
    layers.image,
    """
    adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_linear1d_backward""",
)
row(
    partial(layers.image, linear=FIRST),
    """
    avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    _adaptive_avg_pool3d _adaptive_avg_pool3d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest1d_backward upsample_nearest2d_backward
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d reflection_pad1d_backward reflection_pad2d_backward""",
)
row(layers.columns, "im2col col2im")
row(layers.pixels, "pixel_shuffle pixel_unshuffle channel_shuffle")
row(partial(layers.matrices, linear=FIRST), "tril triu")
row(
    layers.matrices,
    "_linalg_eigh linalg_qr _linalg_svd linalg_inv_ex linalg_cholesky_ex linalg_solve_triangular _linalg_solve_ex linalg_lu_factor_ex linalg_lu_solve _linalg_slogdet _linalg_det linalg_eig linalg_matrix_exp",
)
