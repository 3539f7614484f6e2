"""The user's objects stay valid (contract C6): parameters, states, state dicts, ties, several functions, old objects, memory."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.oracle import models, oracle, steps, tools
from tests.oracle import world as ranks
from tests.oracle.world import World

both_styles = pytest.mark.parametrize("style", ["fully_shard", pytest.param("replicate", marks=pytest.mark.slow)])


def _run(step: Callable[..., Any], model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        step(model, optimizer, *tools.batch(seed=seed))


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.mse_loss(model(x), y)


# ---- what the objects are


@pytest.mark.parametrize("style", oracle.STYLES)
def test_parameters_and_states_become_dtensors_in_place(world: World, style: str) -> None:
    world.run(_in_place, 2, style)


def _in_place(style: str) -> None:
    model, optimizer = tools.setup(build=models.Partly)
    names = [name for name, _ in model.named_parameters()]
    groups, group, state = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    keys = list(model.state_dict())
    _run(tools.compile(tools.train, style), model, optimizer, range(2))
    assert [name for name, _ in model.named_parameters()] == names and list(model.state_dict()) == keys
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter.data, DTensor), name
        assert parameter.requires_grad == ("frozen" not in name)
    assert optimizer.param_groups is groups and optimizer.param_groups[0] is group and optimizer.state is state
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    trained = {id(p) for name, p in model.named_parameters() if "frozen" not in name and "unused" not in name}
    assert {id(p) for p in state} == trained
    for entries in state.values():
        assert (
            isinstance(entries["exp_avg"], DTensor)
            and entries["exp_avg"].placements == entries["exp_avg_sq"].placements
        )


@pytest.mark.parametrize("style", oracle.STYLES)
def test_gradients_that_live_on_lie_as_their_parameters(world: World, style: str) -> None:
    world.run(_gradients, 3, style)


def _gradients(style: str) -> None:
    model, optimizer = tools.setup(build=models.Odd)
    _run(tools.compile(steps.basic(zero="first"), style), model, optimizer, range(2))
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements, name  # type: ignore[attr-defined]


@both_styles
def test_ties_stay_ties(world: World, style: str) -> None:
    world.run(_ties, 3, style)


def _ties(style: str) -> None:
    model, optimizer = tools.setup(build=models.GPT)
    tokens = torch.randint(0, 13, (2, 6))
    tools.compile(steps.basic(steps.tokens), style)(model, optimizer, tokens, tokens)
    assert model.head.weight is model.token.weight
    assert len(list(model.parameters())) == len(optimizer.param_groups[0]["params"])


def test_a_returned_parameter_is_the_users_and_a_returned_gradient_a_dtensor(world: World) -> None:
    world.run(_returned, 2)


def _returned() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        F.mse_loss(model(x), y).backward()
        grad = model[0].weight.grad  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()
        return model[0].weight, grad  # type: ignore[index]

    alone, own = tools.setup(), tools.setup()
    _, expected = step(*alone, *tools.global_batch(4))
    weight, grad = tools.compile(step)(*own, *tools.batch())
    assert weight is own[0].get_parameter("0.weight") and isinstance(grad, DTensor)
    assert torch.allclose(grad.full_tensor(), expected, rtol=1e-9, atol=1e-12)


# ---- old objects


def test_old_parameters_raise_when_used(world: World) -> None:
    for messages in world.run(_old_objects, 2):
        assert all("0.weight" in message and "gathered" in message for message in messages)


def _old_objects() -> list[str]:
    from spmd.errors import SpmdError

    model, optimizer = tools.setup()
    old = model.get_parameter("0.weight")
    _run(tools.compile(tools.train), model, optimizer, range(1))
    uses: list[Callable[[], Any]] = [
        lambda: old + 1,
        lambda: F.linear(torch.ones(1, 5), old),
        lambda: old.sum(),
        lambda: old.detach(),
    ]
    return [_message(use, SpmdError) for use in uses]


def _message(use: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        use()
    except kind as error:
        return str(error)
    raise AssertionError("it ran")


def test_eager_use_of_the_model_names_both_ways_out(world: World) -> None:
    for message in world.run(_eager_use, 2):
        assert "gathered" in message and "compile" in message


def _eager_use() -> str:
    from spmd.errors import SpmdError

    model, optimizer = tools.setup()
    _run(tools.compile(tools.train), model, optimizer, range(1))
    return _message(lambda: model(torch.ones(2, 5)), SpmdError)


@both_styles
def test_gathered_lends_whole_parameters(world: World, style: str) -> None:
    world.run(_gathered, 3, style)


def _gathered(style: str) -> None:
    import spmd

    alone, (model, optimizer) = tools.setup(build=models.Odd), tools.setup(build=models.Odd)
    expected = tools.continue_alone(*alone, tools.train, range(2), W=3)
    step = tools.compile(tools.train, style)
    _run(step, model, optimizer, range(2))
    held = [id(p) for p in model.parameters()]
    with spmd.gathered(model):
        assert not any(isinstance(p.data, DTensor) for p in model.parameters())
        assert torch.allclose(
            evaluate(model, *tools.global_batch(5)), evaluate(alone[0], *tools.global_batch(5)), rtol=1e-9
        )
    assert held == [id(p) for p in model.parameters()]
    tools.assert_equal(expected, tools.state_of(model, optimizer))
    _run(step, model, optimizer, range(2, 4))
    tools.assert_equal(tools.continue_alone(*alone, tools.train, range(2, 4), W=3), tools.state_of(model, optimizer))


# ---- state dicts


@both_styles
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("kind", ["plain", "dtensor"])
def test_loading_after_compiling_reshards(world: World, style: str, kind: str, assign: bool) -> None:
    world.run(_load_after, 3, style, kind, assign)


def _load_after(style: str, kind: str, assign: bool) -> None:
    """Train away, then load what one device (or an earlier moment) had, and go on from there."""
    alone, (model, optimizer) = tools.setup(build=models.Counting), tools.setup(build=models.Counting)
    step = tools.compile(tools.train, style)
    _run(step, model, optimizer, range(2))
    tools.continue_alone(*alone, tools.train, range(2), W=3)
    saved = alone if kind == "plain" else (model, optimizer)
    model_state, optim_state = (copy.deepcopy(thing.state_dict()) for thing in saved)
    _run(step, model, optimizer, range(10, 12))
    model.load_state_dict(model_state, assign=assign)
    optimizer.load_state_dict(optim_state)
    _run(step, model, optimizer, range(2, 4))
    tools.continue_alone(*alone, tools.train, range(2, 4), W=3)
    expected, found = tools.state_of(*alone), tools.state_of(model, optimizer)
    del expected.state["buffer seen"], found.state["buffer seen"]  # not persistent, so in no state dict
    tools.assert_equal(expected, found)
    assert all(isinstance(p.data, DTensor) for p in model.parameters())
    assert all(isinstance(entries["exp_avg"], DTensor) for entries in optimizer.state.values())


@both_styles
def test_loading_right_after_shows_at_once(world: World, style: str) -> None:
    world.run(_load_shows, 3, style)


def _load_shows(style: str) -> None:
    source, (model, optimizer) = tools.setup(5, models.Odd), tools.setup(build=models.Odd)
    _run(tools.compile(tools.train, style), model, optimizer, range(1))
    model.load_state_dict(source[0].state_dict())
    tools.assert_equal(tools.state_of(source[0]), tools.state_of(model), tolerance=0)


@both_styles
def test_a_run_that_resumes_before_compiling(world: World, style: str) -> None:
    world.run(_resumed, 3, style)


def _resumed(style: str) -> None:
    alone, (model, optimizer) = tools.setup(), tools.setup(3)
    tools.continue_alone(*alone, tools.train, range(2), W=3)
    model.load_state_dict(alone[0].state_dict())
    optimizer.load_state_dict(alone[1].state_dict())
    _run(tools.compile(tools.train, style), model, optimizer, range(2, 4))
    tools.assert_equal(tools.continue_alone(*alone, tools.train, range(2, 4), W=3), tools.state_of(model, optimizer))


@both_styles
def test_state_dicts_have_one_devices_keys_and_compact_values(world: World, style: str) -> None:
    world.run(_state_dicts, 3, style)


def _state_dicts(style: str) -> None:
    alone, (model, optimizer) = tools.setup(build=models.Odd), tools.setup(build=models.Odd)
    tools.continue_alone(*alone, tools.train, range(1), W=3)
    _run(tools.compile(tools.train, style), model, optimizer, range(1))
    expected, found = alone[0].state_dict(), model.state_dict()
    assert list(expected) == list(found) and all(expected[key].shape == found[key].shape for key in expected)
    expected, found = alone[1].state_dict(), optimizer.state_dict()
    assert expected["param_groups"] == found["param_groups"]
    assert {i: list(entries) for i, entries in expected["state"].items()} == {
        i: list(entries) for i, entries in found["state"].items()
    }
    for key, tensor in model.state_dict().items():
        allowed = _shard_bytes(tensor) if style == "fully_shard" else tensor.numel() * tensor.element_size()
        assert tools.local(tensor).untyped_storage().nbytes() <= allowed, (
            f"{key} drags more than itself into a checkpoint"
        )


def test_an_optimizers_state_with_other_groups_is_refused_whole(world: World) -> None:
    world.run(_other_groups, 2)


def _other_groups() -> None:
    """More groups, fewer, other sizes: no learning rate is lost, and nothing has changed."""
    alone, (model, optimizer) = tools.setup(), tools.setup()
    step = tools.compile(tools.train, "fully_shard")
    _run(step, model, optimizer, range(1))
    tools.continue_alone(*alone, tools.train, range(1), W=2)
    kind, (first, *rest) = type(optimizer), list(models.mlp().parameters())
    for groups in ([[first], rest], [[first]], [[first, *rest, nn.Parameter(torch.ones(3))]]):
        other = kind([{"params": group, "lr": 0.5 + i} for i, group in enumerate(groups)])
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict(other.state_dict())
    _run(step, model, optimizer, range(1, 3))
    tools.assert_equal(tools.continue_alone(*alone, tools.train, range(1, 3), W=2), tools.state_of(model, optimizer))


# ---- several functions, several models


@both_styles
def test_an_eval_function_shares_the_parameters(world: World, style: str) -> None:
    world.run(_eval, 3, style)


def _eval(style: str) -> None:
    alone, (model, optimizer) = tools.setup(), tools.setup()
    train, score = tools.compile(tools.train, style), tools.compile(evaluate, style)
    for seed in range(3):
        expected = evaluate(alone[0], *tools.global_batch(6, seed))
        assert torch.allclose(score(model, *tools.batch(seed=seed)), expected, rtol=1e-9)
        tools.train(*alone, *tools.global_batch(6, seed))
        train(model, optimizer, *tools.batch(seed=seed))
    tools.assert_equal(tools.state_of(*alone), tools.state_of(model, optimizer))
    assert (train.trace_count, score.trace_count) == (1, 1)


def test_an_optimizer_made_after_an_eval_function_trains(world: World) -> None:
    world.run(_optimizer_after, 2)


def _optimizer_after() -> None:
    alone, (model, _) = tools.setup(), tools.setup()
    tools.compile(evaluate)(model, *tools.batch())
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    _run(tools.compile(tools.train), model, optimizer, range(2))
    tools.assert_equal(tools.continue_alone(*alone, tools.train, range(2), W=2), tools.state_of(model, optimizer))


def test_backward_and_update_may_be_two_functions(world: World) -> None:
    world.run(_split_step, 3)


def _split_step() -> None:
    def gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    def update(optimizer: Optimizer, model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    alone, own = tools.setup(), tools.setup()
    backward, step = tools.compile(gradients), tools.compile(update)
    for _ in range(2):
        for seed in range(2):  # two micro-batches
            gradients(alone[0], *tools.global_batch(6, seed))
            backward(own[0], *tools.batch(seed=seed))
        update(alone[1], alone[0])
        step(own[1], own[0])
    tools.assert_equal(tools.state_of(*alone), tools.state_of(*own))


def test_two_models_in_two_modes_dont_meet(world: World) -> None:
    world.run(_two_models, 3)


def _two_models() -> None:
    alone, own = [tools.setup(1), tools.setup(2)], [tools.setup(1), tools.setup(2)]
    compiled = [tools.compile(tools.train, style) for style in oracle.STYLES]
    for seed in range(3):
        for parts, other, step in zip(alone, own, compiled, strict=True):
            tools.train(*parts, *tools.global_batch(6, seed))
            step(*other, *tools.batch(seed=seed))
    for parts, other in zip(alone, own, strict=True):
        tools.assert_equal(tools.state_of(*parts), tools.state_of(*other))


def test_one_function_serves_two_models(world: World) -> None:
    world.run(_one_function, 2)


def _one_function() -> None:
    alone, own = [tools.setup(1), tools.setup(2)], [tools.setup(1), tools.setup(2)]
    step = tools.compile(tools.train)
    for seed in range(2):
        for parts, other in zip(alone, own, strict=True):
            tools.train(*parts, *tools.global_batch(4, seed))
            step(*other, *tools.batch(seed=seed))
    for parts, other in zip(alone, own, strict=True):
        tools.assert_equal(tools.state_of(*parts), tools.state_of(*other))


# ---- memory


def _shard_bytes(tensor: Tensor) -> int:
    """Of the tensor's padded shard: its first dim with a row for every rank, rounded up; whole if there is none."""
    W, shape = ranks.size(), list(tensor.shape)
    for dim, rows in enumerate(shape):
        if rows >= W:
            shape[dim] = math.ceil(rows / W)
            break
    return math.prod(shape) * tensor.element_size()


@both_styles
def test_storage_stays_at_its_address(world: World, style: str) -> None:
    world.run(_addresses, 3, style)


def _addresses(style: str) -> None:
    model, optimizer = tools.setup(build=models.Counting)
    step = tools.compile(tools.train, style)
    seen = set()
    for seed in range(4):
        step(model, optimizer, *tools.batch(seed=seed))
        buffers = {
            name: tools.local(buffer) for name, buffer in model.named_buffers() if name != "last"
        }  # assigned anew by the model
        seen.add(tuple((name, own.data_ptr()) for name, own in (tools.stored(model, optimizer) | buffers).items()))
    assert len(seen) == 1


def test_at_rest_a_rank_holds_its_padded_shards_and_no_more(world: World) -> None:
    world.run(_at_rest, 4)


def _at_rest() -> None:
    for build, batch in ((models.Odd, tools.batch), (models.GPT, _tokens)):
        model, optimizer = tools.setup(build=build)
        step = tools.compile(tools.train if build is models.Odd else steps.basic(steps.tokens))
        for count in (1, 10):
            for _ in range(count):
                step(model, optimizer, *batch())
            states = [value for entries in optimizer.state.values() for value in entries.values()]
            allowed = sum(map(_shard_bytes, (*model.parameters(), *states)))
            storages = {
                own.untyped_storage().data_ptr(): own.untyped_storage().nbytes()
                for own in tools.stored(model, optimizer).values()
            }
            assert sum(storages.values()) <= allowed


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(ranks.rank()))
    return tokens[:, 1:].clone(), tokens[:, :-1].clone()


class Transposed(nn.Module):
    """A weight whose memory isn't in the order of its dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_fused_update_of_a_transposed_parameter(world: World, style: str) -> None:
    """Its kernel goes through the memory of parameter and gradient from end to end."""
    world.run(_transposed, 2, style)


def _transposed(style: str) -> None:
    expected = tools.continue_alone(*tools.setup(build=Transposed, fused=True), tools.train, range(3), W=2)
    model, optimizer = tools.setup(build=Transposed, fused=True)
    step = tools.compile(tools.train, style)
    for seed in range(3):
        step(model, optimizer, *tools.batch(seed=seed))
    tools.assert_equal(expected, tools.state_of(model, optimizer))
