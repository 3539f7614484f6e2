"""What each pass does to a program: text in, text out."""

import re
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn, optim
from torch.nn import functional as F

from spmd.graph.local import LocalGraph
from tests import programs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def gradients(model: nn.Module, x: Tensor) -> Any:
    model(x).sum().backward()
    return None


def update(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    F.linear(x, model.weight, model.bias).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """Equal sums of equal products, on purpose; what's returned twice stays two tensors."""
    y, z = x.exp() * 2, x.exp() * 2
    return y.sum() + z.sum(), x.sin(), x.sin()  # type: ignore[return-value]


def text(graph: LocalGraph) -> str:
    """The calls of a program in short: names without what fx adds, no shapes, what each collective is for."""
    lines = []
    for line in str(graph).splitlines():
        if line.startswith("return") or ": - = settle" in line:
            continue
        call, _, comment = line.partition("  # ")
        if found := re.match(r"(\w+): .*? = ([\w.]+\(.*)", call):
            note = re.search(r"(param_gather|grad_reduce|value) (.+) \S+->", comment)
            short = re.sub(
                r"_c10d_functional\.|aten\.|_tensor\b|_default|\.default|\.Tensor|\.Scalar|_into_tensor|, (lr|memory_format|pin_memory)=.*(?=\))",
                "",
                f"{found[1]} = {found[2]}",
            )
            lines.append(short + (f"  # {note[2]}" if note else ""))
    return "\n".join(lines)


def program(style: str, passes: str, step: Any = gradients) -> str:
    torch.manual_seed(0)
    if step is update:
        model: nn.Module = nn.Linear(4, 4)
        args: tuple[Any, ...] = (model, optim.AdamW(model.parameters(), 0.1, fused=True), torch.rand(2, 4))
    else:
        args = (Net(), torch.rand(2, 4))
    return text(programs.apply(passes, programs.programs(step, args, style, 2))[0])


def backward(program: str) -> str:
    """From the first reduction on, or what packs it."""
    return program[program.index("ones_like") :]


def test_none() -> None:
    assert_expected_inline(
        program("fully_shard", "none"),
        """\
all_gather = all_gather(blocks_0_weight, 2, 0)  # blocks.0.weight
wait_tensor = wait(all_gather)
t_1 = t(wait_tensor)
mm = mm(x, t_1)
relu = relu(mm)
all_gather_1 = all_gather(blocks_1_weight, 2, 0)  # blocks.1.weight
wait_tensor_1 = wait(all_gather_1)
t_3 = t(wait_tensor_1)
mm_1 = mm(relu, t_3)
relu_1 = relu(mm_1)
all_gather_2 = all_gather(blocks_2_weight, 2, 0)  # blocks.2.weight
wait_tensor_2 = wait(all_gather_2)
t_5 = t(wait_tensor_2)
mm_2 = mm(relu_1, t_5)
relu_2 = relu(mm_2)
sum = sum(relu_2)
ones_like = ones_like(sum)
expand = expand(ones_like, [4, 4])
slice = slice(expand, 0, start(4), end(4))
threshold_backward = threshold_backward(slice, relu_2, 0)
t_6 = t(threshold_backward)
mm_3 = mm(t_6, relu_1)
contiguous = contiguous(mm_3)
reduce_scatter_tensor = reduce_scatter(contiguous, sum, 2, 0)  # blocks.2.weight
wait_tensor_3 = wait(reduce_scatter_tensor)
mm_4 = mm(threshold_backward, wait_tensor_2)
threshold_backward_1 = threshold_backward(mm_4, relu_1, 0)
t_7 = t(threshold_backward_1)
mm_5 = mm(t_7, relu)
contiguous_1 = contiguous(mm_5)
reduce_scatter_tensor_1 = reduce_scatter(contiguous_1, sum, 2, 0)  # blocks.1.weight
wait_tensor_4 = wait(reduce_scatter_tensor_1)
mm_6 = mm(threshold_backward_1, wait_tensor_1)
threshold_backward_2 = threshold_backward(mm_6, relu, 0)
t_8 = t(threshold_backward_2)
mm_7 = mm(t_8, x)
contiguous_2 = contiguous(mm_7)
reduce_scatter_tensor_2 = reduce_scatter(contiguous_2, sum, 2, 0)  # blocks.0.weight
wait_tensor_5 = wait(reduce_scatter_tensor_2)""",
    )


def test_bucket_gathers_and_scatters() -> None:
    assert_expected_inline(
        program("fully_shard", "bucket"),
        """\
view = view(blocks_0_weight, [8])
view_1 = view(blocks_1_weight, [8])
view_2 = view(blocks_2_weight, [8])
cat = cat([view, view_1, view_2])
all_gather_3 = all_gather(cat, 2, 0)  # blocks.0.weight and 2 more
wait_tensor_6 = wait(all_gather_3)
view_3 = view(wait_tensor_6, [2, -1])
split_with_sizes_copy = split_with_sizes_copy(view_3, [8, 8, 8], 1)
getitem = getitem(split_with_sizes_copy, 0)
view_4 = view(getitem, [4, 4])
getitem_1 = getitem(split_with_sizes_copy, 1)
view_5 = view(getitem_1, [4, 4])
getitem_2 = getitem(split_with_sizes_copy, 2)
view_6 = view(getitem_2, [4, 4])
t_1 = t(view_4)
mm = mm(x, t_1)
relu = relu(mm)
t_3 = t(view_5)
mm_1 = mm(relu, t_3)
relu_1 = relu(mm_1)
t_5 = t(view_6)
mm_2 = mm(relu_1, t_5)
relu_2 = relu(mm_2)
sum = sum(relu_2)
ones_like = ones_like(sum)
expand = expand(ones_like, [4, 4])
slice = slice(expand, 0, start(4), end(4))
threshold_backward = threshold_backward(slice, relu_2, 0)
t_6 = t(threshold_backward)
mm_3 = mm(t_6, relu_1)
contiguous = contiguous(mm_3)
mm_4 = mm(threshold_backward, view_6)
threshold_backward_1 = threshold_backward(mm_4, relu_1, 0)
t_7 = t(threshold_backward_1)
mm_5 = mm(t_7, relu)
contiguous_1 = contiguous(mm_5)
mm_6 = mm(threshold_backward_1, view_5)
threshold_backward_2 = threshold_backward(mm_6, relu, 0)
t_8 = t(threshold_backward_2)
mm_7 = mm(t_8, x)
contiguous_2 = contiguous(mm_7)
view_7 = view(contiguous, [2, 8])
view_8 = view(contiguous_1, [2, 8])
view_9 = view(contiguous_2, [2, 8])
cat_1 = cat([view_7, view_8, view_9], 1)
view_10 = view(cat_1, [48])
reduce_scatter_tensor_3 = reduce_scatter(view_10, sum, 2, 0)  # blocks.2.weight and 2 more
wait_tensor_7 = wait(reduce_scatter_tensor_3)
split_with_sizes = split_with_sizes(wait_tensor_7, [8, 8, 8])
getitem_3 = getitem(split_with_sizes, 0)
view_11 = view(getitem_3, [2, 4])
getitem_4 = getitem(split_with_sizes, 1)
view_12 = view(getitem_4, [2, 4])
getitem_5 = getitem(split_with_sizes, 2)
view_13 = view(getitem_5, [2, 4])""",
    )


def test_bucket_reduces_in_place() -> None:
    assert_expected_inline(
        backward(program("replicate", "bucket")),
        """\
ones_like = ones_like(sum)
expand = expand(ones_like, [4, 4])
slice = slice(expand, 0, start(4), end(4))
threshold_backward = threshold_backward(slice, relu_2, 0)
t_3 = t(threshold_backward)
mm_3 = mm(t_3, relu_1)
contiguous = contiguous(mm_3)
mm_4 = mm(threshold_backward, blocks_2_weight)
threshold_backward_1 = threshold_backward(mm_4, relu_1, 0)
t_4 = t(threshold_backward_1)
mm_5 = mm(t_4, relu)
contiguous_1 = contiguous(mm_5)
mm_6 = mm(threshold_backward_1, blocks_1_weight)
threshold_backward_2 = threshold_backward(mm_6, relu, 0)
t_5 = t(threshold_backward_2)
mm_7 = mm(t_5, x)
contiguous_2 = contiguous(mm_7)
view = view(contiguous, [16])
view_1 = view(contiguous_1, [16])
view_2 = view(contiguous_2, [16])
cat = cat([view, view_1, view_2])
all_reduce_ = all_reduce_(cat, sum, 0)  # blocks.2.weight and 2 more
wait_tensor_3 = wait(all_reduce_)
split_with_sizes = split_with_sizes(wait_tensor_3, [16, 16, 16])
getitem = getitem(split_with_sizes, 0)
view_3 = view(getitem, [4, 4])
getitem_1 = getitem(split_with_sizes, 1)
view_4 = view(getitem_1, [4, 4])
getitem_2 = getitem(split_with_sizes, 2)
view_5 = view(getitem_2, [4, 4])""",
    )


def test_regather() -> None:
    """The last parameter stays: nothing is gathered between its uses."""
    assert_expected_inline(
        backward(program("fully_shard", "regather{keep_mb=0}")),
        """\
ones_like = ones_like(sum)
expand = expand(ones_like, [4, 4])
slice = slice(expand, 0, start(4), end(4))
threshold_backward = threshold_backward(slice, relu_2, 0)
t_6 = t(threshold_backward)
mm_3 = mm(t_6, relu_1)
contiguous = contiguous(mm_3)
reduce_scatter_tensor = reduce_scatter(contiguous, sum, 2, 0)  # blocks.2.weight
wait_tensor_3 = wait(reduce_scatter_tensor)
mm_4 = mm(threshold_backward, wait_tensor_2)
threshold_backward_1 = threshold_backward(mm_4, relu_1, 0)
t_7 = t(threshold_backward_1)
mm_5 = mm(t_7, relu)
contiguous_1 = contiguous(mm_5)
reduce_scatter_tensor_1 = reduce_scatter(contiguous_1, sum, 2, 0)  # blocks.1.weight
wait_tensor_4 = wait(reduce_scatter_tensor_1)
all_gather_3 = all_gather(blocks_1_weight, 2, 0)  # blocks.1.weight
wait_tensor_6 = wait(all_gather_3)
mm_6 = mm(threshold_backward_1, wait_tensor_6)
threshold_backward_2 = threshold_backward(mm_6, relu, 0)
t_8 = t(threshold_backward_2)
mm_7 = mm(t_8, x)
contiguous_2 = contiguous(mm_7)
reduce_scatter_tensor_2 = reduce_scatter(contiguous_2, sum, 2, 0)  # blocks.0.weight
wait_tensor_5 = wait(reduce_scatter_tensor_2)""",
    )


def test_overlap() -> None:
    assert_expected_inline(
        program("fully_shard", "regather{keep_mb=0},overlap"),
        """\
all_gather = all_gather(blocks_0_weight, 2, 0)  # blocks.0.weight
wait_tensor = wait(all_gather)
t_1 = t(wait_tensor)
all_gather_1 = all_gather(blocks_1_weight, 2, 0)  # blocks.1.weight
mm = mm(x, t_1)
relu = relu(mm)
wait_tensor_1 = wait(all_gather_1)
t_3 = t(wait_tensor_1)
all_gather_2 = all_gather(blocks_2_weight, 2, 0)  # blocks.2.weight
mm_1 = mm(relu, t_3)
relu_1 = relu(mm_1)
wait_tensor_2 = wait(all_gather_2)
t_5 = t(wait_tensor_2)
all_gather_3 = all_gather(blocks_1_weight, 2, 0)  # blocks.1.weight
mm_2 = mm(relu_1, t_5)
relu_2 = relu(mm_2)
sum = sum(relu_2)
ones_like = ones_like(sum)
expand = expand(ones_like, [4, 4])
slice = slice(expand, 0, start(4), end(4))
threshold_backward = threshold_backward(slice, relu_2, 0)
t_6 = t(threshold_backward)
mm_3 = mm(t_6, relu_1)
contiguous = contiguous(mm_3)
reduce_scatter_tensor = reduce_scatter(contiguous, sum, 2, 0)  # blocks.2.weight
mm_4 = mm(threshold_backward, wait_tensor_2)
threshold_backward_1 = threshold_backward(mm_4, relu_1, 0)
t_7 = t(threshold_backward_1)
mm_5 = mm(t_7, relu)
contiguous_1 = contiguous(mm_5)
reduce_scatter_tensor_1 = reduce_scatter(contiguous_1, sum, 2, 0)  # blocks.1.weight
wait_tensor_6 = wait(all_gather_3)
mm_6 = mm(threshold_backward_1, wait_tensor_6)
threshold_backward_2 = threshold_backward(mm_6, relu, 0)
t_8 = t(threshold_backward_2)
mm_7 = mm(t_8, x)
contiguous_2 = contiguous(mm_7)
reduce_scatter_tensor_2 = reduce_scatter(contiguous_2, sum, 2, 0)  # blocks.0.weight
wait_tensor_3 = wait(reduce_scatter_tensor)
wait_tensor_4 = wait(reduce_scatter_tensor_1)
wait_tensor_5 = wait(reduce_scatter_tensor_2)""",
    )


def test_overlap_within_bounds() -> None:
    """Nothing may be under way beside another: as without the pass, but for the reductions, which are waited for when the next starts."""
    assert_expected_inline(
        program("fully_shard", "overlap{max_in_flight_mb=0}"),
        """\
all_gather = all_gather(blocks_0_weight, 2, 0)  # blocks.0.weight
wait_tensor = wait(all_gather)
t_1 = t(wait_tensor)
mm = mm(x, t_1)
relu = relu(mm)
all_gather_1 = all_gather(blocks_1_weight, 2, 0)  # blocks.1.weight
wait_tensor_1 = wait(all_gather_1)
t_3 = t(wait_tensor_1)
mm_1 = mm(relu, t_3)
relu_1 = relu(mm_1)
all_gather_2 = all_gather(blocks_2_weight, 2, 0)  # blocks.2.weight
wait_tensor_2 = wait(all_gather_2)
t_5 = t(wait_tensor_2)
mm_2 = mm(relu_1, t_5)
relu_2 = relu(mm_2)
sum = sum(relu_2)
ones_like = ones_like(sum)
expand = expand(ones_like, [4, 4])
slice = slice(expand, 0, start(4), end(4))
threshold_backward = threshold_backward(slice, relu_2, 0)
t_6 = t(threshold_backward)
mm_3 = mm(t_6, relu_1)
contiguous = contiguous(mm_3)
reduce_scatter_tensor = reduce_scatter(contiguous, sum, 2, 0)  # blocks.2.weight
mm_4 = mm(threshold_backward, wait_tensor_2)
threshold_backward_1 = threshold_backward(mm_4, relu_1, 0)
t_7 = t(threshold_backward_1)
mm_5 = mm(t_7, relu)
wait_tensor_3 = wait(reduce_scatter_tensor)
contiguous_1 = contiguous(mm_5)
reduce_scatter_tensor_1 = reduce_scatter(contiguous_1, sum, 2, 0)  # blocks.1.weight
mm_6 = mm(threshold_backward_1, wait_tensor_1)
threshold_backward_2 = threshold_backward(mm_6, relu, 0)
t_8 = t(threshold_backward_2)
mm_7 = mm(t_8, x)
wait_tensor_4 = wait(reduce_scatter_tensor_1)
contiguous_2 = contiguous(mm_7)
reduce_scatter_tensor_2 = reduce_scatter(contiguous_2, sum, 2, 0)  # blocks.0.weight
wait_tensor_5 = wait(reduce_scatter_tensor_2)""",
    )


def test_dedup() -> None:
    assert_expected_inline(
        program("replicate", "dedup", twice),
        """\
exp = exp(x)
mul = mul(exp, 2)
sum = sum(mul)
add = add(sum, sum)
sin = sin(x)
sin_1 = sin(x)
contiguous = contiguous(add)
all_reduce = all_reduce(contiguous, sum, 0)  # add_3
wait_tensor = wait(all_reduce)""",
    )


def test_fuse_updates_in_place() -> None:
    after = program("fully_shard", "bucket,fuse", update)
    assert_expected_inline(
        after[after.index("_foreach") :],
        """\
_foreach_add_scalar = _foreach_add([weight_step, bias_step], 1)
getitem_14 = getitem(_foreach_add_scalar, 0)
getitem_15 = getitem(_foreach_add_scalar, 1)
_foreach_copy_ = _foreach_copy_([weight_step, bias_step], [getitem_14, getitem_15])
_fused_adamw_ = _fused_adamw_([weight], [wait_tensor_2], [weight_exp_avg], [weight_exp_avg_sq], [], [getitem_14])
contiguous_1 = contiguous(reshape)
_fused_adamw__1 = _fused_adamw_([bias], [contiguous_1], [bias_exp_avg], [bias_exp_avg_sq], [], [getitem_15])""",
    )
