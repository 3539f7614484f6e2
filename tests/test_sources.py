"""Where rules come from: what users register, the table, DTensor, discovery, none. And that a step with a custom op comes out as on one device."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spmd._torch import OpOverload
from spmd.errors import PlacementError
from spmd.sharding import Call, Rule, check_rule, dtensor, labelled, register, register_rule, sources
from spmd.sharding.layout import Partial, R, shard
from spmd.sharding.listed import ListedRule
from spmd.sharding.sources import rule_for, why_none
from tests.oracle import tools
from tests.oracle.world import World
from tests.parts import F64, ints, rand, step_graph

ops = torch.ops.spmd_test


@torch.library.custom_op("spmd_test::scale_rows", mutates_args=())
def scale_rows(x: Tensor, by: Tensor) -> Tensor:
    return x * by[:, None]


@torch.library.custom_op("spmd_test::outer_sum", mutates_args=())
def outer_sum(grad: Tensor, x: Tensor) -> Tensor:
    """[n, o], [n, i] -> [o, i]"""
    return grad.t() @ x


@torch.library.custom_op("spmd_test::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm of the last dim, and its statistics."""
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * scale * weight, scale.squeeze(-1)


@torch.library.custom_op("spmd_test::joined", mutates_args=())
def joined(xs: list[Tensor], last: Tensor | None) -> Tensor:
    return torch.cat([*xs, *([] if last is None else [last])], 1)


@torch.library.custom_op("spmd_test::relu", mutates_args=())
def relu(x: Tensor) -> Tensor:
    """Of another kind: relative to the column's mean."""
    return (x - x.mean(0)).relu()


@torch.library.custom_op("spmd_test::in_place", mutates_args=("x",))
def in_place(x: Tensor) -> None:
    x.add_(1)


@scale_rows.register_fake
def _(x: Tensor, by: Tensor) -> Tensor:
    return torch.empty_like(x)


@outer_sum.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(grad.shape[1], x.shape[1])


@norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1])


@relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@joined.register_fake
def _(xs: list[Tensor], last: Tensor | None) -> Tensor:
    return torch.cat([*xs, *([] if last is None else [last])], 1)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Rules that a test registers go with it."""
    kept = dict(register.RULES)
    yield
    register.RULES.clear()
    register.RULES.update(kept)


def op_call(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> Call:
    """The last op that `fn` calls."""
    nodes = step_graph(fn, args).graph.nodes
    return Call([n for n in nodes if isinstance(n.target, OpOverload)][-1])


def forbid(*_: object) -> None:
    raise AssertionError("a later source was asked")


def crashing(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return x.clone()


# ---------------------------------------------------------------------------------------------------- registering


def test_a_registered_line_is_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.discover, "discover", forbid)
    register_rule(scale_rows, "n f, n -> n f")
    rule = rule_for(op_call(lambda x, y: ops.scale_rows(x, y), (rand(7, 4), rand(7))))
    assert rule is not None
    assert rule.transfer(0, shard(0, 7), 2) == ([shard(0, 7), shard(0, 7)], [shard(0, 7)])
    assert rule.transfer(0, shard(1, 4), 2) == ([shard(1, 4), R], [shard(1, 4)])


@pytest.mark.parametrize("op", [outer_sum, ops.outer_sum, ops.outer_sum.default, "spmd_test::outer_sum"])
def test_an_op_may_be_named_in_any_way(op: register.Op) -> None:
    register_rule(op, "n o, n i -> o i | sum n")
    rule = rule_for(op_call(lambda x, y: ops.outer_sum(x, y), (rand(7, 4), rand(7, 5))))
    assert rule is not None and rule.transfer(0, shard(0, 7), 2) == ([shard(0, 7), shard(0, 7)], [Partial()])


def test_a_registered_rule_comes_before_the_table() -> None:
    register_rule(torch.ops.aten.mul.Tensor, "_ f, _ f -> _ f")
    rule = rule_for(op_call(lambda x, y: torch.mul(x, y), (rand(7, 4), rand(7, 4))))
    assert rule is not None and rule.transfer(0, shard(0, 7), 2) is None
    assert rule.transfer(0, shard(1, 4), 2) is not None


@pytest.mark.parametrize("shape", [(6,), (7, 6), (3, 5, 6)])
def test_dots_stand_for_any_dims(shape: tuple[int, ...]) -> None:
    register_rule("spmd_test::norm", "... _, _ -> ... _, ...")
    held = check_rule("spmd_test::norm", rand(*shape), rand(6), 1e-6)
    assert len(held) == 2 * (len(shape) - 1)


def test_lists_and_missing_tensors_count_once() -> None:
    register_rule("spmd_test::joined", "n _, n _ -> n _")
    x, y, z = rand(7, 2), rand(7, 3), rand(7, 4)
    assert check_rule("spmd_test::joined", [x, y], None)
    assert "2 ranks: S(0), S(0), S(0) -> S(0)" in check_rule("spmd_test::joined", [x, y], z)


def test_a_function_decides_by_the_call() -> None:
    @register_rule("spmd_test::scale_rows")
    def rows(call: Call) -> Rule | None:
        return labelled([["n", None], ["n"]], [["n", None]]) if call.inputs[0][0] > 3 else None

    assert rule_for(op_call(lambda x, y: ops.scale_rows(x, y), (rand(7, 4), rand(7)))) is not None
    assert rule_for(op_call(lambda x, y: ops.scale_rows(x, y), (rand(3, 4), rand(3)))) is None


def test_any_layout_will_do_for_a_tensor_that_gives_only_its_shape() -> None:
    register_rule("aten::new_zeros", "* -> _ _")
    rule = rule_for(op_call(lambda x: x.new_zeros(3, 4), (rand(7, 5),)))
    assert rule is not None and rule.inputs == (None,)


@pytest.mark.parametrize(
    ("op", "line", "said"),
    [
        ("spmd_test::nothing", "n -> n", "there is no op"),
        ("spmd_test::outer_sum", "n o -> n o", "1 argument, but spmd_test::outer_sum has 2 with tensors (grad, x)"),
        ("spmd_test::norm", "n f, f -> n f", "1 result, but spmd_test::norm has 2"),
        ("spmd_test::outer_sum", "n o, n i -> o i", "`| sum n`"),
        ("spmd_test::outer_sum", "n o, n i -> o q | sum n i", "result 0 has q, which no argument has"),
        ("spmd_test::outer_sum", "n n, n i -> n n", "argument 0 has n twice"),
        ("spmd_test::outer_sum", "n o, n i", "no `->`"),
        ("spmd_test::outer_sum", "n o!, n i -> n i", "'o!'"),
        ("spmd_test::outer_sum", "n o, n i -> o i | mean n", "'mean' isn't a reduction"),
        ("spmd_test::outer_sum", "n o, n i -> o i | sum n x", "x is reduced, but no argument has it"),
        ("spmd_test::outer_sum", "n o, n i -> *", "result 0 is `*`"),
        ("spmd_test::in_place", "n -> n", "writes to its arguments"),
    ],
)
def test_a_line_that_cannot_be_is_refused(op: str, line: str, said: str) -> None:
    with pytest.raises(PlacementError) as refusal:
        register_rule(op, line)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("n, n -> n", "names 1 dims of input 0, which is [7, 4]"),
        ("n f, f -> n f", "f is 4 in one tensor and 7 in another"),
    ],
)
def test_a_line_that_does_not_fit_the_call_is_refused(line: str, said: str) -> None:
    register_rule(scale_rows, line)
    with pytest.raises(PlacementError) as refusal:
        rule_for(op_call(lambda x, y: ops.scale_rows(x, y), (rand(7, 4), rand(7))))
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("answer", "said"), [(3, "the rule returned int"), (labelled([["n", None]], [["n", None]]), "1 inputs, the call 2")]
)
def test_a_function_that_does_not_fit_the_call_is_refused(answer: Rule, said: str) -> None:
    register_rule(scale_rows, lambda call: answer)
    with pytest.raises(PlacementError) as refusal:
        rule_for(op_call(lambda x, y: ops.scale_rows(x, y), (rand(7, 4), rand(7))))
    assert said in str(refusal.value)


# ---------------------------------------------------------------------------------------------------- check_rule


def test_check_rule_finds_a_wrong_one() -> None:
    register_rule(outer_sum, "n o, n i -> o i | max n")
    with pytest.raises(PlacementError) as refusal:
        check_rule(outer_sum, rand(7, 4), rand(7, 5))
    assert "S(0), S(0) -> P(max)" in str(refusal.value) and "S(1)" not in str(refusal.value)


def test_check_rule_finds_a_wrong_linear_set() -> None:
    register_rule(scale_rows, lambda call: labelled([[None, None], [None]], [[None, None]], linear=((0, 1),)))
    with pytest.raises(PlacementError, match=r"P\(sum\)"):
        check_rule(scale_rows, rand(7, 4), rand(7))


def test_check_rule_holds_the_tables_rules_too() -> None:
    assert len(check_rule(torch.ops.aten.addmm, rand(4), rand(7, 5), rand(5, 4))) > 6
    assert check_rule("aten::embedding", rand(9, 4), ints(9, 7, 3))


def test_check_rule_needs_a_rule() -> None:
    with pytest.raises(PlacementError, match="has no rule"):
        check_rule("aten::nonzero_static", rand(7, 4), size=3)


# ---------------------------------------------------------------------------------------------------- later sources


def test_discovery_comes_last_and_only_for_custom_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_for(op_call(lambda x, y: ops.scale_rows(x, y), (rand(7, 4), rand(7))))
    assert isinstance(rule, ListedRule)
    assert rule.transfer(0, shard(0, 7), 2) == ([shard(0, 7), shard(0, 7)], [shard(0, 7)])
    assert rule.linear == ((0,), (1,))
    monkeypatch.setattr(sources.discover, "discover", forbid)
    assert rule_for(op_call(lambda x: torch.nonzero_static(x, size=3), (rand(7, 4),))) is None
    assert not sources.discoverable(ops.in_place.default)


def test_a_custom_op_is_not_torchs_of_the_same_name() -> None:
    rule = rule_for(op_call(lambda x: ops.relu(x), (rand(7, 4),)))
    assert rule is not None and rule.transfer(0, shard(0, 7), 2) is None
    assert rule.transfer(0, shard(1, 4), 2) is not None


def test_dtensors_strategies_become_moves() -> None:
    moves, linear = dtensor.candidates(op_call(lambda x, y: torch.mm(x, y), (rand(7, 4), rand(4, 5))))
    assert {str(m) for m in moves} == {"S(0),R->S(0)", "R,S(1)->S(1)", "S(1),S(0)->P(sum)"}
    assert {(0,), (1,)} <= set(linear)


def test_dtensors_strategies_count_only_where_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = op_call(lambda x: torch.special.i1(x), (rand(7, 4),))
    monkeypatch.setattr(dtensor, "CONFIRMED", frozenset())
    assert rule_for(call) is None
    monkeypatch.setattr(dtensor, "CONFIRMED", frozenset({"aten.special_i1.default"}))
    rule = rule_for(call)
    assert rule is not None and rule.transfer(0, shard(0, 7), 2) == ([shard(0, 7)], [shard(0, 7)])
    monkeypatch.setattr(dtensor, "TORCH", "1.0.")
    assert rule_for(call) is None


WITHOUT: dict[str, tuple[Callable[..., Any], str]] = {
    "crashes": (crashing, "it crashed: SIGSEGV"),
    "mixes": (
        lambda x: x.flatten().sort().values.view_as(x) * x.max(),
        "no split of an input gives parts of the whole",
    ),
    "counts": (lambda x: x + random.random(), "other results when it's run again"),
    "accelerators only": (forbid, "AssertionError: a later source was asked"),
    "misdescribed": (lambda x: x[:1].clone(), "other shapes than register_fake says"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_why_a_custom_op_has_no_rule(name: str) -> None:
    fn, reason = WITHOUT[name]

    def typed(x: Tensor) -> Tensor:
        return fn(x)

    op = torch.library.custom_op(f"spmd_sources::{name.replace(' ', '_')}", typed, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    call = op_call(op, (rand(12, 5),))
    assert rule_for(call) is None and reason in why_none(call)
    register_rule(op, lambda call: None)
    assert "registered" in why_none(call)


def test_why_others_have_no_rule() -> None:
    writing = op_call(lambda x: torch.ops.aten.relu_.default(x.clone()), (rand(7, 4),))
    assert "written its rule" in why_none(op_call(lambda x: torch.nonzero_static(x, size=3), (rand(7, 4),)))
    assert not sources.discoverable(writing.target)


# ---------------------------------------------------------------------------------------------------- in a step

RULES: dict[str, str | register.Entry | None] = {
    "registered": "n f, n -> n f",
    "discovered": None,
    "replicated": lambda call: None,
}


def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, by = ctx.saved_tensors  # type: ignore[attr-defined]
    return scale_rows(grad, by), (grad * x).sum(1)


scale_rows.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = (scale_rows(model(x), x[:, 0].exp()) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(kind: str, W: int) -> tuple[int, int, int]:
    """Train with a custom op here and on one device, compare; gathers of activations, fallbacks, and their bytes."""
    rule = RULES[kind]
    if rule is not None:
        register_rule(scale_rows, rule)
    model, optimizer = tools.setup()
    reference = tools.continue_alone(*tools.setup(), step, range(3), W)
    compiled = tools.compile(step)
    for seed in range(3):
        compiled(model, optimizer, *tools.batch(seed=seed))
    tools.assert_equal(reference, tools.state_of(model, optimizer))
    told = compiled.explain(model, optimizer, *tools.batch())
    values = [c for c in told.collectives if c.role == "value" and c.op == "all_gather"]
    assert all(f.reason in str(told) for f in told.fallbacks) and all(f.reason for f in told.fallbacks)
    return len(values), len(told.fallbacks), sum(f.nbytes for f in told.fallbacks)


@pytest.mark.parametrize("kind", RULES)
def test_a_custom_op_in_a_step(world: World, kind: str) -> None:
    for gathers, fallbacks, nbytes in world.run(trained, 2, kind, 2):
        if kind == "replicated":
            assert gathers and fallbacks and nbytes >= 4 * 3 * F64.itemsize
        else:
            assert not gathers and not fallbacks
