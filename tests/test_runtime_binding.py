"""Binding on real ranks, without capture: replacing, loading, copying, lending, and what becomes of the old objects."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint import state_dict as portable
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from spmd.capture.objects import successor
from spmd.capture.result import Capture, Slot
from spmd.errors import SpmdError, StaleError, StateError
from spmd.graph.step import Input, Role
from spmd.runtime.binding import Binding, placed
from spmd.runtime.gathered import gathered
from spmd.runtime.storage import Storage
from spmd.runtime.world import World as Ranks
from spmd.sharding.layout import R, state_shard
from tests.oracle.world import World


class Net(nn.Module):
    """Ties, a shared layer, a flat list of weights, a frozen, a 0-dim and a transposed parameter, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.first = self.again = nn.Linear(4, 4)
        self.rnn = nn.LSTM(4, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.randn(6, 5).t(), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.again(self.first(self.embed(tokens)))) * self.scale)


def bind(model: nn.Module, optimizer: Optimizer | None = None, layout: Callable[..., Any] = state_shard) -> Binding:
    """A binding such as capture and a mode would ask for."""
    ranks = Ranks.of()
    named = {id(p): (n, p, Role.PARAMETER) for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    named |= {id(b): (n, b, Role.BUFFER) for n, b in model.named_buffers()}
    slots = [Slot(Input(role, name, ""), tensor) for name, tensor, role in named.values()]
    lay: list[Any] = [
        placed(t) or ((layout(t.shape, ranks.size) if role is Role.PARAMETER else R),) for _, t, role in named.values()
    ]
    for p, values in optimizer.state.items() if optimizer else ():
        for key, value in values.items():
            owner = named[id(successor(p))][0]
            slots.append(Slot(Input(Role.STATE, f"{owner}.{key}", "optim", owner, key), value))
            lay.append((layout(value.shape, ranks.size),))
    optims = {"optim": optimizer} if optimizer else {}
    return Binding(Capture(None, tuple(slots), {"model": model}, optims, None, None), lay, ranks)  # type: ignore[arg-type]


def _made(seed: int = 0, steps: int = 2) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = optim.AdamW(
        [{"params": [model.scale], "lr": 0.5}, {"params": [p for p in model.parameters() if p is not model.scale]}],
        lr=0.1,
    )
    for _ in range(steps):
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


def states_of(optimizer: Optimizer) -> dict[str, Tensor]:
    found = optimizer.state_dict()["state"]
    return {f"{i}.{key}": whole(v) for i, values in found.items() for key, v in values.items()}


def message(use: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        use()
    return str(caught.value)


# ---- replacing


def _replaces() -> None:
    model, optimizer = _made()
    before, states, old = values_of(model), states_of(optimizer), dict(model.named_parameters())
    groups, lists, state, order = (
        optimizer.param_groups,
        [g["params"] for g in optimizer.param_groups],
        optimizer.state,
        list(optimizer.state.values()),
    )
    strides = {n: p.stride() for n, p in old.items()}
    binding = bind(model, optimizer)
    assert same(before, values_of(model)) and same(states, states_of(optimizer))
    assert model.head.weight is model.embed.weight and model.first is model.again
    assert [id(w) for w in model.rnn._flat_weights] == [id(p) for p in model.rnn.parameters()]
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter) and isinstance(p.data, DTensor) and p.stride() == strides[name]
        assert p.requires_grad == (name != "turned" and "rnn" not in name)
        assert (
            binding.storages[name].tensor is p
            and binding.storages[name].buffer.untyped_storage().data_ptr() == p.to_local().untyped_storage().data_ptr()
        )
    assert optimizer.param_groups is groups and [g["params"] for g in groups] == lists
    assert optimizer.state is state and [id(v) for v in state.values()] == [id(v) for v in order]
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    first = optimizer.state[model.embed.weight]
    assert isinstance(first["exp_avg"], DTensor) and first["exp_avg"].placements == model.embed.weight.placements
    assert not isinstance(first["step"], DTensor)
    assert binding.check()
    again = bind(model, optimizer)
    assert all(again.storages[n] is s for n, s in binding.storages.items() if n in old)
    assert all(again.storages[n].buffer is s.buffer for n, s in binding.storages.items())


@pytest.mark.parametrize("W", [2, 3, 4])
def test_every_place_gets_the_managed_tensor(world: World, W: int) -> None:
    world.run(_replaces, W)


def _alone() -> None:
    model, optimizer = _made()
    before = {n: id(p) for n, p in model.named_parameters()}
    states = {id(v) for values in optimizer.state.values() for v in values.values()}
    binding = bind(model, optimizer)
    assert before == {n: id(p) for n, p in model.named_parameters()}
    assert states == {id(v) for values in optimizer.state.values() for v in values.values()}
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model(torch.arange(3)).shape == (3, 7) and binding.check()
    buffer = binding.storages["first.weight"].buffer
    model.first.weight.data = torch.ones(4, 4)  # is copied into the buffer that programs are bound to
    assert binding.check() and bool((buffer == 1).all()) and model.first.weight.data_ptr() == buffer.data_ptr()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert states == {id(v) for values in optimizer.state.values() for v in values.values()}
    replaced = nn.Parameter(torch.zeros(4, 4))
    kept, model.first.weight = model.first.weight, replaced
    assert binding.check() and model.first.weight is kept and not buffer.any()
    model.double()
    assert not binding.check()


def test_one_process_keeps_its_own_tensors(world: World) -> None:
    world.run(_alone, 1)


def _carried() -> None:
    model, _ = _made()
    calls: list[str] = []
    model.scale.tag = "mine"  # type: ignore[attr-defined]
    handle = model.first.weight.register_hook(lambda g: calls.append("hook"))
    model.first.bias.register_post_accumulate_grad_hook(lambda p: calls.append("post"))
    model.first(torch.ones(2, 4)).sum().backward()
    grad = model.first.weight.grad.clone()
    calls.clear()
    binding = bind(model)
    assert model.scale.tag == "mine"
    assert isinstance(model.first.weight.grad, DTensor) and torch.equal(whole(model.first.weight.grad), grad)
    local = binding.gradient("first.weight")
    assert local is not None and local.shape == model.first.weight.to_local().shape
    replicated = distribute_tensor(torch.ones(2, 4), model.first.weight.device_mesh, [Replicate()], src_data_rank=None)
    model.first(replicated).sum().backward()
    assert sorted(calls) == ["hook", "post"]
    handle.remove()
    model.first(replicated).sum().backward()
    assert sorted(calls) == ["hook", "post", "post"]
    binding.set_gradient("first.weight", torch.zeros_like(local))
    assert (
        not whole(model.first.weight.grad).any() and model.first.weight.grad.placements == model.first.weight.placements
    )
    binding.set_gradient("first.weight", None)
    assert model.first.weight.grad is None and binding.gradient("first.weight") is None


def test_attributes_hooks_and_gradients_are_carried_over(world: World) -> None:
    world.run(_carried, 2)


def _old_ones() -> list[str]:
    model, _ = _made()
    old, statistics = model.first.weight, model.norm.running_mean
    memory = old.untyped_storage()
    bind(model)
    assert old._spmd_successor is model.first.weight and isinstance(old, nn.Parameter)  # type: ignore[attr-defined]
    assert "first.weight" in repr(old) and hash(old) == id(old)
    assert memory.nbytes() == 64  # ours is the last reference
    uses: list[Callable[[], Any]] = [
        lambda: old + 1,
        lambda: old.shape,
        lambda: torch.stack([old]),
        lambda: copy.deepcopy(old),
        lambda: old.grad,
        lambda: nn.functional.linear(torch.ones(4), old),
    ]
    assert "norm.running_mean" in message(lambda: statistics * 2, StaleError)
    return [message(use, StaleError) for use in uses]


def test_old_objects_raise_with_name_and_remedy(world: World) -> None:
    for texts in world.run(_old_ones, 2):
        assert all("first.weight" in text and "spmd.gathered" in text for text in texts)


def _other_holders() -> None:
    """A module and an optimizer that the first function didn't know."""
    model, optimizer = _made()
    other = nn.Sequential(nn.Linear(4, 4))
    other[0].weight = model.first.weight
    bind(model)
    message(lambda: other(torch.ones(1, 4)), StaleError)
    bind(other)
    assert other[0].weight is model.first.weight
    bind(model, optimizer)
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
    states = states_of(optimizer)
    assert any(v.any() for v in states.values())


def test_what_an_earlier_function_didnt_know_is_replaced_later(world: World) -> None:
    world.run(_other_holders, 2)


def _refused() -> tuple[str, str]:
    model, _ = _made()
    elsewhere = nn.Linear(3, 3, device="meta")
    before = [id(p) for p in elsewhere.parameters()]
    first = message(lambda: bind(elsewhere), StateError)
    assert before == [id(p) for p in elsewhere.parameters()]
    binding = bind(model)
    capture, ranks = binding.capture, binding.world
    return first, message(lambda: Binding(capture, [(R,)] * len(capture.slots), ranks), StateError)


def test_wrong_devices_and_two_layouts_are_refused(world: World) -> None:
    for device, layouts in world.run(_refused, 2):
        assert "weight" in device and "bias" in device and "meta" in device
        assert "first.weight" in layouts and "S(0)" in layouts


def _adopted() -> None:
    model = nn.Linear(6, 4)
    mesh = Ranks.of().mesh
    assert mesh is not None
    value = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(value, mesh, [Shard(1)]))
    kept = model.weight
    binding = bind(model)
    assert model.weight is kept and kept.placements == (Shard(1),) and torch.equal(whole(kept), value)
    assert kept.to_local().data_ptr() == binding.storages["weight"].buffer.data_ptr()


def test_the_users_own_dtensors_stay_as_they_lie(world: World) -> None:
    world.run(_adopted, 3)


# ---- loading


def _loads(kind: str, assign: bool) -> None:
    source, source_optimizer = _made(1)
    model, optimizer = _made()
    binding = bind(model, optimizer)
    if kind == "dtensor":
        bind(source, source_optimizer)
    if kind == "elsewhere":  # another placement
        bind(source, source_optimizer, lambda shape, ranks: R)
    addresses = {n: s.buffer.data_ptr() for n, s in binding.storages.items()}
    objects = {n: id(s.tensor) for n, s in binding.storages.items()}
    expected, states = values_of(source), states_of(source_optimizer)
    saved, saved_states = source.state_dict(), source_optimizer.state_dict()
    saved_states["param_groups"][0]["lr"] = 0.125
    group = optimizer.param_groups[0]
    keys = model.load_state_dict(saved, assign=assign)
    optimizer.load_state_dict(saved_states)
    assert not keys.missing_keys and not keys.unexpected_keys
    assert same(expected, values_of(model)) and same(states, states_of(optimizer))
    assert optimizer.param_groups[0] is group and group["lr"] == 0.125
    assert binding.check()
    assert addresses == {n: s.buffer.data_ptr() for n, s in binding.storages.items()}
    assert objects == {n: id(s.tensor) for n, s in binding.storages.items()}
    for n, p in (*model.named_parameters(), *model.named_buffers()):
        assert p is binding.storages[n].tensor
    assert all(
        optimizer.state[p][k] is binding.storages[f"{n}.{k}"].tensor
        for n, p in model.named_parameters()
        for k in optimizer.state.get(p, ())
    )
    with torch.no_grad():
        model.scale.zero_()
    assert expected["scale"] == whole(source.scale) != 0  # nothing is shared with what was loaded


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["plain", "dtensor", "elsewhere"])
def test_state_dicts_load_into_the_same_buffers(world: World, kind: str, assign: bool) -> None:
    world.run(_loads, 3, kind, assign)


def _loads_partly() -> None:
    source, model = _made(1)[0], _made()[0]
    binding = bind(model)
    before, expected = values_of(model), values_of(source)
    model.first.load_state_dict(source.first.state_dict())  # a submodule by itself
    assert torch.equal(whole(model.first.weight), expected["first.weight"])
    found = model.load_state_dict({"scale": torch.tensor([9.0]), "nothing": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["nothing"] and "rnn.weight_ih_l0" in found.missing_keys
    assert whole(model.scale) == 9 and torch.equal(whole(model.embed.weight), before["embed.weight"])
    assert "size mismatch for embed.weight" in message(
        lambda: model.load_state_dict({"embed.weight": torch.ones(3, 4)}, strict=False), RuntimeError
    )
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"scale": torch.tensor(1.0)})
    model.load_state_dict({k: v.double() for k, v in source.state_dict().items()})  # casts, as torch does
    assert same(expected, values_of(model)) and binding.check()
    model.load_state_dict({"scale": torch.tensor(3.0, dtype=torch.float64)}, strict=False, assign=True)
    assert model.scale.dtype == torch.float64 and not binding.check()  # another type: the step is captured anew
    rebound = bind(model)
    assert rebound.check() and whole(model.scale) == 3 and isinstance(model.scale, nn.Parameter)


def test_partial_mismatched_and_retyped_state_dicts(world: World) -> None:
    world.run(_loads_partly, 2)


def _edits() -> None:
    model, optimizer = _made()
    binding = bind(model, optimizer)
    buffer = binding.storages["embed.weight"].buffer
    with torch.no_grad():
        model.embed.weight.zero_()
        model.embed.weight += 3
    assert bool((whole(model.embed.weight) == 3).all()) and binding.check()
    assert int((buffer == 3).sum()) == model.embed.weight.to_local().numel()  # never the padding
    model.head.weight = model.embed.weight = nn.Parameter(
        torch.full((7, 4), 5.0)
    )  # what load_state_dict isn't asked for
    assert binding.check() and model.head.weight is model.embed.weight is binding.storages["embed.weight"].tensor
    assert bool((whole(model.embed.weight) == 5).all())
    optimizer.state[model.scale]["exp_avg"] = torch.tensor(7.0)
    assert binding.check() and binding.storages["scale.exp_avg"].local == 7
    optimizer.state.clear()
    assert binding.check()
    binding.storages.pop("scale.exp_avg")
    made = binding.add_state("scale.exp_avg", torch.tensor(1.0), (R,), torch.tensor(0.0))
    assert optimizer.state[model.scale]["exp_avg"] is made.tensor and isinstance(made.tensor, DTensor)
    model.to(torch.bfloat16)
    assert not binding.check()
    assert bind(model).check() and model.embed.weight.dtype == torch.bfloat16


def test_edits_between_calls_are_taken_in(world: World) -> None:
    world.run(_edits, 3)


# ---- copies and checkpoints


def _copies() -> None:
    model, optimizer = _made()
    binding = bind(model, optimizer)
    expected = values_of(model)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    sent = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "live": dict(model.named_parameters()), "optim": optimizer.state_dict()}, buffer
    )
    buffer.seek(0)
    loaded = torch.load(buffer)  # weights_only: nothing of ours is in the file
    assert all(torch.equal(whole(loaded["model"][k]), v) for k, v in expected.items())
    with torch.no_grad():
        model.embed.weight.zero_()
    for other in (twin, sent):
        assert same(expected, values_of(other)) and other.head.weight is other.embed.weight
        message(lambda other=other: other(torch.arange(3)), StaleError)
        with gathered(other):
            assert torch.equal(other.embed.weight, expected["embed.weight"])
            with torch.no_grad():
                other.scale.fill_(4)
        assert whole(other.scale) == 4 and Storage.under(other.scale) is None
        other.load_state_dict(expected)
        assert same(expected, values_of(other))
        kept = other.scale
        assert bind(other).check() and other.scale is kept and Storage.under(kept) is not None
    assert same(states_of(twin_optimizer), states_of(optimizer))
    assert bind(twin, twin_optimizer).check() and binding.check()
    with torch.no_grad():
        twin_optimizer.state[twin.scale]["exp_avg"].fill_(77)
    assert optimizer.state[model.scale]["exp_avg"].full_tensor() != 77


def test_deep_copies_and_pickles_are_models_of_their_own(world: World) -> None:
    world.run(_copies, 3)


def _portable(folder: str) -> None:
    model, optimizer = _made()
    bind(model, optimizer)
    expected, states = values_of(model), states_of(optimizer)
    full = portable.StateDictOptions(full_state_dict=True)
    assert set(portable.get_optimizer_state_dict(model, optimizer)["state"]) == {
        n for n, p in model.named_parameters() if p in optimizer.state
    }
    gathered_model, gathered_optim = portable.get_state_dict(model, optimizer, options=full)
    assert all(torch.equal(gathered_model[k], v) for k, v in expected.items())
    own, own_optim = portable.get_state_dict(model, optimizer)
    dcp.save({"model": own, "optim": own_optim}, checkpoint_id=folder)
    other, other_optimizer = _made(5)
    binding = bind(other, other_optimizer)
    found, found_optim = portable.get_state_dict(other, other_optimizer)
    dcp.load({"model": found, "optim": found_optim}, checkpoint_id=folder)
    portable.set_state_dict(other, other_optimizer, model_state_dict=found, optim_state_dict=found_optim)
    assert binding.check() and same(expected, values_of(other)) and same(states, states_of(other_optimizer))
    third, third_optimizer = _made(6)
    binding = bind(third, third_optimizer)
    portable.set_state_dict(
        third, third_optimizer, model_state_dict=gathered_model, optim_state_dict=gathered_optim, options=full
    )
    assert binding.check() and same(expected, values_of(third)) and same(states, states_of(third_optimizer))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("W", [2, 3])
def test_torchs_own_checkpoint_tools_work(world: World, tmp_path: Any, W: int) -> None:
    world.run(_portable, W, str(tmp_path))


# ---- eager use


def _eager() -> None:
    model = _made()[0].eval()
    expected = model(torch.arange(7))
    binding = bind(model)
    mesh = Ranks.of().mesh
    assert mesh is not None
    with gathered(model, model.first):  # a module twice, blocks nested, ties kept
        with gathered(model.embed):
            assert model.head.weight is model.embed.weight and not isinstance(model.embed.weight.data, DTensor)
            assert torch.equal(model(torch.arange(7)), expected)
        message(binding.check, StaleError)
        with torch.no_grad():
            model.scale += 1
        model.first.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.zeros(4)})
        model.rnn.weight_hh_l0 = nn.Parameter(torch.full((20, 5), 2.0))
        model.turned.data = torch.zeros(5, 6)
    assert binding.check() and model.head.weight is model.embed.weight is binding.storages["embed.weight"].tensor
    assert torch.equal(whole(model.scale), _made()[0].scale.detach() + 1)
    assert (
        bool((whole(model.first.weight) == 1).all())
        and bool((whole(model.rnn.weight_hh_l0) == 2).all())
        and not whole(model.turned).any()
    )
    with pytest.raises(ZeroDivisionError), gathered(model):
        with torch.no_grad():
            model.scale.fill_(8)
        raise ZeroDivisionError
    assert whole(model.scale) == 8 and binding.check()
    placed_input = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()], src_data_rank=None)
    assert isinstance(model.first(placed_input), DTensor)  # DTensor inputs are none of our business


def test_gathered_lends_nests_and_writes_back(world: World) -> None:
    message_of = world.run(_eager_only, 2)
    assert all("Net" in text and "spmd.gathered" in text and "spmd.compile" in text for text in message_of)
    world.run(_eager, 3)


def _eager_only() -> str:
    model, _ = _made()
    bind(model)
    return message(lambda: model(torch.arange(3)), SpmdError)
