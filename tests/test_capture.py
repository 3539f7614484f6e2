"""Capture against eager: the graph replayed on one device, at two batch sizes from one trace, for models, optimizers and traps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from spmd.capture import Capture, capture, flatten_leaves, guards_hold
from spmd.errors import CaptureError, InputError, SideEffectError, StateError
from spmd.graph.step import Role


class Replay:
    """Runs a captured graph on one device, with storage of its own."""

    def __init__(self, captured: Capture) -> None:
        self.captured, self.step = captured, captured.step
        self.stored = {s.input.name: s.tensor.detach().clone() for s in captured.slots if s.tensor is not None}
        self.grads: dict[str, torch.Tensor | None] = {}
        if captured.init is not None:
            inputs = [
                self._number(i.name) if i.role is Role.HYPER else self.stored[i.name] for i in captured.init.inputs
            ]
            for output, value in zip(captured.init.outputs, captured.init.module(*inputs), strict=True):
                self.stored[output.name] = value

    def _slot(self, name: str) -> Any:
        return next(s for s in self.captured.slots if s.input.name == name)

    def _number(self, name: str) -> Any:
        slot = self._slot(name)
        return slot.tensor if slot.tensor is not None else slot.container[slot.key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = flatten_leaves(args, kwargs)
        inputs = []
        for s in self.captured.slots:
            if s.leaf is not None:
                inputs.append(leaves[s.leaf])
            elif s.input.role is Role.HYPER and s.container is not None:
                inputs.append(s.container[s.key])
            else:
                inputs.append(self.stored[s.input.name])
        with torch.no_grad():
            values = self.step.module(*inputs)
        user = []
        for output, value in zip(self.step.outputs, values, strict=True):
            if output.role is Role.USER and output.updates is None:
                user.append(self.stored[output.alias_of] if output.alias_of else value)
            elif output.role is Role.USER and self.captured.slots[output.updates].leaf is not None:
                leaves[self.captured.slots[output.updates].leaf].copy_(value)
            else:
                self.stored[output.name] = value
        return pytree.tree_unflatten(user, self.captured.out_spec)


def difference(a: Any, b: Any) -> float:
    """Largest difference relative to the largest value."""
    a, b = torch.as_tensor(a).detach().double(), torch.as_tensor(b).detach().double()
    assert a.shape == b.shape, (a.shape, b.shape)
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() if a.numel() else 0.0


def named_state(model: nn.Module, optim: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    names = {p: n for n, p in model.named_parameters()}
    out = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for p, state in optim.state.items() if optim else ():
        out.update({f"{names[p]}.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)})
    return out


def check(
    step: Callable[..., Any],
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    batch: Callable[[int], tuple[Any, ...]],
    sizes: tuple[int, ...] = (6, 6, 4, 6),
    tolerance: float = 1e-12,
    between: Callable[[torch.optim.Optimizer | None], None] = lambda optim: None,
    before: int = 0,
) -> Capture:
    """Replays one capture for several calls of different batch sizes, and eager beside it. `before`: eager steps first."""
    for _ in range(before):
        step(model, optim, *batch(sizes[0]))
    state = torch.get_rng_state()
    first = batch(sizes[0])
    torch.set_rng_state(state)
    flags = [p.requires_grad for p in model.parameters()]
    snapshot = copy.deepcopy((model.state_dict(), optim.state_dict() if optim else None))
    captured = capture(step, (model, optim, *first), {})
    assert torch.equal(state, torch.get_rng_state()), "tracing drew random numbers"
    assert [p.requires_grad for p in model.parameters()] == flags
    after = (model.state_dict(), optim.state_dict() if optim else None)
    assert pytree.tree_all(
        lambda same: same,
        pytree.tree_map(
            lambda a, b: (
                bool((torch.as_tensor(a) == torch.as_tensor(b)).all())
                if isinstance(a, (torch.Tensor, float))
                else a == b
            ),
            snapshot,
            after,
        ),
    )
    assert captured.guards.check(step, (model, optim, *first), {}) is None
    replay = Replay(captured)
    for i, size in enumerate(sizes):
        if captured.step.size is not None and size != captured.step.size:
            continue
        assert guards_hold(captured.step, size)
        state = torch.get_rng_state()
        data = batch(size)
        middle = torch.get_rng_state()
        replayed = replay(model, optim, *data)
        ended = torch.get_rng_state()
        torch.set_rng_state(state)
        data = batch(size)
        assert torch.equal(middle, torch.get_rng_state())
        eager = step(model, optim, *data)
        assert torch.equal(ended, torch.get_rng_state()), "another number of random draws than eager"
        compare(replay, replayed, eager, model, optim, tolerance, f"step {i}, batch {size}")
        between(optim)
        assert captured.guards.scalars.changed() is None, "something that changed is baked into the graph"
    return captured


def compare(
    replay: Replay, replayed: Any, eager: Any, model: nn.Module, optim: Any, tolerance: float, where: str
) -> None:
    ours, theirs = pytree.tree_leaves(replayed), pytree.tree_leaves(eager)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert difference(a, b) <= tolerance if b is not None else a is None, (where, "output", a, b)
    reference = named_state(model, optim)
    lacking = set(reference) - set(replay.stored)
    assert not lacking, (where, lacking)
    for name, value in reference.items():
        error = difference(replay.stored[name], value)
        assert error <= tolerance, (where, name, error)
        assert replay.stored[name].dtype == value.dtype, name


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def labelled(
    dtype: torch.dtype = torch.float64, *shape: int, classes: int = 5
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda n: (torch.randn(n, *(shape or (8,)), dtype=dtype), torch.randint(0, classes, (n,)))


def train(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True, weight_decay=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw_fused_amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, fused=True, amsgrad=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adam_maximize": lambda p: torch.optim.Adam(p, 1e-2, maximize=True),
    "adam_capturable": lambda p: torch.optim.Adam(p, 1e-2, capturable=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """State is made by the optimizer's own code, from one trace; the learning rate is read at each call."""

    def decay(optim: Any) -> None:
        optim.param_groups[0]["lr"] *= 0.7

    model = mlp()
    check(train, model, OPTIMIZERS[name](model.parameters()), labelled(), between=decay, sizes=(6, 6, 4, 6, 6, 6, 6))


# Models. Each: a step, a model, a batch maker; trained with AdamW in float64.


class Transformer(nn.Module):
    def __init__(self, dropout: float, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x if self.batch_first else x.transpose(0, 1)).mean(1 if self.batch_first else 0))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads, self.dropout = nn.LayerNorm(d), nn.RMSNorm(d), heads, dropout
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, t, d)), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self,
        layers: int = 2,
        d: int = 16,
        heads: int = 4,
        vocab: int = 19,
        length: int = 7,
        dropout: float = 0.1,
        recompute: bool = False,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.blocks = nn.ModuleList(Block(d, heads, dropout) for _ in range(layers))
        self.norm, self.head, self.recompute = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False), recompute
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def language(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optim.zero_grad()
    loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), ignore_index=3)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    return loss.detach()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 12, num_layers=2, batch_first=True, dropout=0.2), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout2d(0.2),
        nn.Conv2d(8, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = (
            nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh()),
            nn.Linear(16, 5),
            reentrant,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_() if self.reentrant else x
        return self.b(checkpoint(self.a, x, use_reentrant=self.reentrant))


class Odd(nn.Module):
    """Tied, frozen, unused, 0-dim, empty, transposed and twice-used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(3, 3), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.b.weight = self.a.weight
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(5, 8).t())
        self.register_parameter("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return torch.tanh(self.frozen(self.a(h))) @ self.turned * self.scale + self.empty.sum()


def tokens(n: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 19, (n, 8)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "mlp": (mlp, train, labelled()),
    "cnn": (cnn, train, labelled(torch.float64, 3, 8, 8)),
    "encoder": (lambda: Transformer(0.1, True), train, labelled(torch.float64, 7, 16)),
    "encoder_sequence_first": (lambda: Transformer(0.1, False), train, labelled(torch.float64, 7, 16)),
    "lstm": (Recurrent, train, labelled(torch.float64, 6, 8)),
    "gpt": (GPT, language, tokens),
    "gpt_recompute": (lambda: GPT(recompute=True), language, tokens),
    "checkpoint": (lambda: Checkpointed(False), train, labelled()),
    "checkpoint_reentrant": (lambda: Checkpointed(True), train, labelled()),
    "odd": (Odd, train, labelled()),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, step, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    captured = check(step, model, torch.optim.AdamW(model.parameters(), 1e-3), batch, tolerance=1e-9)
    assert captured.step.batch is not None, "the batch was specialised"
    assert not any(n.target is torch.ops.aten.native_dropout.default for n in captured.step.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "gpt", "checkpoint"])
def test_low_precision_is_bitwise_forward(name: str, dtype: torch.dtype) -> None:
    """Dropout and everything that isn't decomposed rounds as in eager: the forward is equal bit for bit."""
    make, _, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().to(dtype)

    def forward(model: nn.Module, optim: None, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return model(x[:, :-1] if x.dtype == torch.int64 else x.to(dtype))

    check(forward, model, None, batch, tolerance=0.0)


# Silent traps: each would be a wrong program, were it not handled or refused.


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def test_zero_grad_first_or_last_is_one_program() -> None:
    def first(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optim.step()
        return loss.detach()

    for step, cleared in ((first, False), (train, True)):
        model = mlp()
        optim = torch.optim.SGD(model.parameters(), 0.1)
        args = (model, optim, *labelled()(6))
        fresh = capture(step, args)
        step(*args)
        assert fresh.guards.check(step, args, {}) is None
        again = capture(step, args)
        assert str(fresh.step) == str(again.step)
        assert bool(fresh.cleared) is cleared
        assert [o.name for o in fresh.step.outputs if o.role is Role.GRADIENT] == (
            [] if cleared else [f"{n}.grad" for n, _ in model.named_parameters()]
        )


def test_gradients_accumulate_across_calls() -> None:
    def accumulate(model: nn.Module, optim: None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    model = mlp()
    args = (model, None, *labelled()(6))
    fresh = capture(accumulate, args)
    assert not [i for i in fresh.step.inputs if i.role is Role.GRADIENT]
    accumulate(*args)
    changed = fresh.guards.check(accumulate, args, {})
    assert changed and changed.name == "0.weight.grad"
    second = capture(accumulate, args)
    assert [i.name for i in second.step.inputs if i.role is Role.GRADIENT] == [
        f"{n}.grad" for n, _ in model.named_parameters()
    ]
    replay = Replay(second)
    replay(*args)
    accumulate(*args)
    for name, p in model.named_parameters():
        assert difference(replay.stored[f"{name}.grad"], p.grad) < 1e-12


@pytest.mark.parametrize("how", ["stack", "chunk"])
def test_micro_batches_mark_one_gradient(how: str) -> None:
    def micro(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for a, b in zip(x.chunk(3), y.chunk(3), strict=True) if how == "chunk" else [(x, y), (2 * x, y)]:
            loss = F.cross_entropy(model(a), b) / 3
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optim.step()
        optim.zero_grad()
        return losses

    model = mlp()
    captured = check(micro, model, adamw(model), labelled(), sizes=(6, 9, 6) if how == "chunk" else (6, 4, 6))
    marks = [n.meta["grad_of"] for n in captured.step.graph.nodes if "grad_of" in n.meta]
    assert sorted(marks) == sorted(n for n, _ in model.named_parameters())


def test_data_assignment_is_an_update() -> None:
    def clamp(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = train(model, optim, x, y)
        for p in model.parameters():
            p.data = p.data.clamp(-0.1, 0.1)
        return out

    model = mlp()
    check(clamp, model, adamw(model), labelled())


def test_tensor_hooks_run() -> None:
    model = mlp()
    next(model.parameters()).register_hook(lambda g: 3 * g)

    def halve(p: torch.Tensor) -> None:
        p.grad.mul_(0.5)

    list(model.parameters())[1].register_post_accumulate_grad_hook(halve)
    check(train, model, torch.optim.SGD(model.parameters(), 0.1), labelled())


def test_tensors_closed_over() -> None:
    weights, model = torch.rand(5, dtype=torch.float64), mlp()
    model.table = torch.randn(16, dtype=torch.float64)  # a plain attribute, not a buffer
    first = model[0].weight

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (
            F.cross_entropy(model(x), y, weight=weights)
            + first.square().sum()
            + (model[0](x) * model.table).sum() * 0.01
        )
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    captured = check(step, model, torch.optim.SGD(model.parameters(), 0.1), labelled())
    outside = [s for s in captured.slots if s.input.role is Role.USER and s.leaf is None]
    assert {id(s.tensor) for s in outside} == {id(weights), id(model.table)}
    assert [s.input.name for s in outside if s.tensor is weights] == ["weights"]


def test_everything_closed_over() -> None:
    model = mlp()
    optim = adamw(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return train(model, optim, x, y)

    captured = capture(step, labelled()(6))
    assert list(captured.modules) == ["model"] and list(captured.optimizers) == ["optim"]
    assert [i.name for i in captured.step.inputs if i.role is Role.USER] == ["x", "y"]


def test_an_input_written_to_is_an_output() -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return train(model, optim, x, y)

    model = mlp()
    captured = check(step, model, adamw(model), labelled())
    assert [o.name for o in captured.step.outputs if o.role is Role.USER and o.updates is not None] == ["x"]


def test_unused_parameters_get_no_state() -> None:
    model = Odd().double()
    captured = check(train, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1), labelled())
    assert not any("unused" in o.name or "frozen" in o.name for o in captured.step.outputs)


def test_no_fake_tensor_is_left_behind() -> None:
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.last = nn.Linear(8, 5), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.a(x)
            return self.last

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model(x)
        loss = F.cross_entropy(model.last, y)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    model = Stash().double()
    capture(step, (model, adamw(model), *labelled()(6)))
    assert model.last is None and all(p.grad is None for p in model.parameters())


def test_a_first_step_graph_where_state_comes_from_gradients() -> None:
    model = mlp()
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)
    args = (model, optim, *labelled()(6))
    first = capture(train, args)
    assert first.init is None
    made = [o for o in first.step.outputs if o.role is Role.STATE]
    assert [o.updates for o in made] == [None] * 4
    train(*args)
    changed = first.guards.check(train, args, {})
    assert changed and changed.name == "optim.state"
    check(train, model, optim, labelled())


def test_resumed_state_is_taken_as_it_is() -> None:
    model = mlp()
    check(train, model, adamw(model), labelled(), before=3)


def test_double_backward() -> None:
    def penalty(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.cross_entropy(out, y) + grad.norm(dim=1).sub(1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    model = mlp()
    check(penalty, model, adamw(model), labelled())


def test_outputs() -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return {
            "loss": loss,
            "n": x.shape[0] * 2,
            "name": "a",
            "w": model[0].weight,
            "g": model[0].weight.grad,
            "item": loss.item(),
            "none": None,
        }

    model = mlp()
    captured = capture(step, (model, None, *labelled()(6)))
    by_name = dict(
        zip(
            ["loss", "n", "name", "w", "g", "item"],
            (o for o in captured.step.outputs if o.role is Role.USER),
            strict=False,
        )
    )
    assert by_name["w"].alias_of == "0.weight" and by_name["g"].grad_of == "0.weight"
    out = Replay(captured)(model, None, *labelled()(4))
    assert out["n"] == 8 and out["name"] == "a" and out["none"] is None and isinstance(out["item"], float)


def test_nested_arguments() -> None:
    def step(model: nn.Module, batch: dict[str, Any], scale: float) -> torch.Tensor:
        return (model(batch["x"]) * scale * batch["mask"]).sum() + batch["pair"][1].sum()

    batch = {
        "x": torch.randn(6, 8, dtype=torch.float64),
        "mask": torch.rand(5, dtype=torch.float64),
        "pair": [torch.ones(6), torch.ones(6)],
    }
    captured = capture(step, (mlp(), batch, 2.0), replicated=("batch.mask",))
    names = {i.name: i.batch_dim for i in captured.step.inputs if i.role is Role.USER}
    assert names == {"batch.x": 0, "batch.mask": None, "batch.pair[0]": 0, "batch.pair[1]": 0}


def test_scalars_are_guarded_or_lifted() -> None:
    def step(
        model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, alpha: float = 1.0
    ) -> torch.Tensor:
        return train(model, optim, x * alpha, y)

    model = mlp()
    optim = adamw(model)
    data = labelled()(6)
    captured = capture(step, (model, optim, *data, 1.0))
    changed = captured.guards.check(step, (model, optim, *data, 2.0), {})
    assert changed == "alpha was 1.0, is 2.0" and changed.liftable
    lifted = capture(step, (model, optim, *data, 1.0), lifted=frozenset({changed.name}))
    assert lifted.guards.check(step, (model, optim, *data, 2.0), {}) is None
    optim.param_groups[0]["weight_decay"] = 0.2
    changed = captured.guards.check(step, (model, optim, *data, 1.0), {})
    assert changed and changed.name == "optim.param_groups[0].weight_decay" and changed.liftable
    optim.param_groups[0]["lr"] = 0.5
    optim.param_groups[0]["weight_decay"] = 1e-2
    assert captured.guards.check(step, (model, optim, *data, 1.0), {}) is None
    model.eval()
    changed = captured.guards.check(step, (model, optim, *data, 1.0), {})
    assert changed and changed.name == "training"


def test_a_specialised_scalar_is_guarded() -> None:
    import math

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return train(model, optim, x * math.sqrt(optim.param_groups[0]["lr"]), y)

    model = mlp()
    optim = adamw(model)
    args = (model, optim, *labelled()(6))
    captured = capture(step, args)
    assert captured.guards.check(step, args, {}) is None
    optim.param_groups[0]["lr"] = 0.5
    changed = captured.guards.check(step, args, {})
    assert changed and changed.name == "optim.param_groups[0].lr"


def test_a_branch_on_the_batch_size_is_a_guard() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() if x.shape[0] <= 20 else model(x).mean()

    captured = capture(step, (mlp(), torch.randn(8, 8, dtype=torch.float64)))
    assert captured.step.batch is not None
    assert guards_hold(captured.step, 20) and not guards_hold(captured.step, 21)


def test_a_batch_of_one_and_a_specialised_batch_are_static() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).view(6, 5).sum()

    assert capture(lambda m, x: m(x), (mlp(), torch.randn(1, 8, dtype=torch.float64))).step.size == 1
    assert capture(step, (mlp(), torch.randn(6, 8, dtype=torch.float64))).step.size == 6


def refused(
    error: type[Exception], step: Callable[..., Any], *words: str, model: nn.Module | None = None, **options: Any
) -> str:
    """The step is refused, the message has all of `words`, and nothing has changed."""
    model = model or mlp()
    optim = options.pop("optim", None) or torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(error) as raised:
        capture(step, (model, optim, *labelled()(6)), {}, **options)
    text = str(raised.value)
    assert all(w in text for w in words), text
    assert all(type(p) is nn.Parameter for p in model.parameters()) and all(p.grad is None for p in model.parameters())
    return text


def test_refuses_control_flow_on_values() -> None:
    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        if loss.item() > 1:
            loss.backward()
        return loss

    refused(CaptureError, step, "test_capture.py", "loss.item() > 1", "torch.where")


def test_refuses_shapes_that_depend_on_values() -> None:
    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return x[x[:, 0] > 0].sum() + x.nonzero().sum()

    text = refused(CaptureError, step, "test_capture.py", "mask")
    assert text.count("the shape of its result") >= 2, text


def test_refuses_lbfgs() -> None:
    model = mlp()
    refused(CaptureError, train, "LBFGS", model=model, optim=torch.optim.LBFGS(model.parameters()))


def test_refuses_an_optimizer_over_other_tensors() -> None:
    refused(StateError, train, "optim.param_groups[0]['params'][0]", optim=torch.optim.SGD(mlp().parameters(), 0.1))


def test_refuses_dist_calls() -> None:
    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return model(x).sum() / torch.distributed.get_world_size()

    refused(CaptureError, step, "torch.distributed", "get_world_size")


def test_refuses_a_scheduler_inside() -> None:
    model = mlp()
    optim = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)

    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        train(model, optim, x, y)
        scheduler.step()

    refused(SideEffectError, step, "StepLR", "scheduler.step()", model=model, optim=optim)
    assert scheduler.last_epoch == 0 and optim.param_groups[0]["lr"] == 0.1


def test_refuses_python_side_effects_all_at_once() -> None:
    import random

    log: list[Any] = []
    calls = 0

    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        nonlocal calls
        calls += 1
        model.calls = getattr(model, "calls", 0) + 1
        log.append(1)
        random.random()
        optim.param_groups[0]["lr"] *= 0.5
        return model(x).sum()

    refused(SideEffectError, step, "log", "generator", "lr")
    assert calls == 0 and log == []


def test_refuses_counters_but_keeps_one_time_effects() -> None:
    class Counting(nn.Module):
        def __init__(self, settle: bool) -> None:
            super().__init__()
            self.a, self.calls, self.settle = nn.Linear(8, 5).double(), 0, settle

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = 1 if self.settle else self.calls + 1
            return self.a(x)

    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return model(x).sum()

    model = Counting(False)
    refused(SideEffectError, step, "calls", "from 1 to 2", model=model)
    assert model.calls == 0
    model = Counting(True)
    assert capture(step, (model, None, *labelled()(6))).guards.check(step, (model, None, *labelled()(6)), {}) is None
    assert model.calls == 1


def test_refuses_state_that_a_call_leaves_for_the_next() -> None:
    class Carry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(8, 5).double(), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.h = self.a(x) if self.h is None else self.a(x) + self.h.detach()
            return self.h

    refused(SideEffectError, lambda model, optim, x, y: model(x).sum(), "h", model=Carry())


def test_refuses_tensors_that_share_memory() -> None:
    model = mlp()
    model.register_buffer("view", model[0].weight.data[0])
    refused(StateError, train, "view", "0.weight", "shares memory", model=model)


def test_refuses_batch_sized_buffers() -> None:
    model = mlp()
    model.register_buffer("memory", torch.zeros(6, 5, dtype=torch.float64))

    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return (model(x) + model.memory).sum()

    refused(CaptureError, step, "memory", "12", model=model, global_batch=lambda b: 2 * b)

    def replace(model: Any, optim: Any, x: Any, y: Any) -> Any:
        model.memory = model(x).detach()

    refused(StateError, replace, "memory", model=model, global_batch=lambda b: 2 * b)


def test_refuses_arguments_that_disagree() -> None:
    with pytest.raises(InputError) as raised:
        capture(train, (mlp(), None, torch.randn(6, 8), torch.zeros(5)))
    assert "x[6, 8] has 6" in str(raised.value) and "y[5] has 5" in str(raised.value)


def test_a_step_that_fails_says_where_and_restores() -> None:
    def step(model: Any, optim: Any, x: Any, y: Any) -> Any:
        return model(x) @ y.double().unsqueeze(0)

    refused(CaptureError, step, "test_capture.py")


def test_guards_follow_replaced_parameters() -> None:
    model = mlp()
    optim = adamw(model)
    args = (model, optim, *labelled()(6))
    captured = capture(train, args)
    mapping = {}
    for sub in model.modules():
        for name, p in list(sub._parameters.items()):
            mapping[id(p)] = sub._parameters[name] = nn.Parameter(p.detach().clone())
    optim.param_groups[0]["params"] = [mapping[id(p)] for p in optim.param_groups[0]["params"]]
    assert captured.guards.check(train, args, {}) is not None
    captured.guards.rebind(mapping)
    assert captured.guards.check(train, args, {}) is None


def test_provenance() -> None:
    torch.manual_seed(0)
    model = GPT(recompute=True)
    captured = capture(language, (model, adamw(model), *tokens(4)))
    nodes = [n for n in captured.step.graph.nodes if n.op == "call_function"]
    assert {n.meta["phase"] for n in nodes} == {"forward", "backward", "update"}
    assert all(n.meta["source"].file == __file__ for n in nodes if n.meta.get("source"))
    assert sum("source" in n.meta for n in nodes) > 0.95 * len(nodes)
    attention = [n for n in nodes if "scaled_dot_product" in str(n.target)]
    assert {n.meta["module"] for n in attention} == {"blocks.0", "blocks.1"} and len(attention) == 4
    assert {"y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"} == {n.meta["source"].code for n in attention}
    assert {n.meta["step_source"].function for n in nodes} == {"language"}
    assert {n.meta["checkpoint"] for n in attention if n.meta["phase"] == "forward"} == {1, 2}
    norms = [n for n in nodes if "clip_grad" in n.meta["source"].code]
    assert norms and all(n.meta["phase"] == "update" for n in norms)


# Models of `transformers`, dropout on as they come.


def _tiny(name: str) -> tuple[nn.Module, Callable[[int], tuple[Any, ...]]]:
    import transformers as t

    def words(n: int) -> tuple[torch.Tensor, ...]:
        return (torch.randint(3, 50, (n, 9)), torch.randint(3, 50, (n, 9)))

    if name == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
        ), words
    if name == "llama":
        config = t.LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        return t.LlamaForCausalLM(config), words
    if name == "bert":
        config = t.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        )
        return t.BertForMaskedLM(config), words
    if name == "t5":
        config = t.T5Config(
            vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        return t.T5ForConditionalGeneration(config), words
    config = t.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.1,
    )
    return t.ViTForImageClassification(config), lambda n: (
        torch.randn(n, 3, 16, 16, dtype=torch.float64),
        torch.randint(0, 5, (n,)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_transformers(name: str) -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = model(x, labels=y).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        return loss.detach()

    torch.manual_seed(0)
    model, batch = _tiny(name)
    # SGD and a float32 tolerance: some of them take the loss in float32, and Adam would enlarge its rounding.
    optim = torch.optim.SGD(model.double().train().parameters(), 0.1, momentum=0.9)
    captured = check(step, model, optim, batch, tolerance=1e-6, sizes=(6, 4, 6))
    assert captured.step.batch is not None


# Decompositions and draws keep to eager.


def _target(a: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, 5, dtype=a.dtype).expand_as(a)


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mse": lambda a: F.mse_loss(a, _target(a)),
    "l1": lambda a: F.l1_loss(a, _target(a), reduction="sum"),
    "smooth_l1": lambda a: F.smooth_l1_loss(a, _target(a)),
    "huber": lambda a: F.huber_loss(a, _target(a)),
    "bce": lambda a: F.binary_cross_entropy(a.sigmoid(), _target(a)),
    "bce_logits": lambda a: F.binary_cross_entropy_with_logits(a, _target(a), pos_weight=torch.full((5,), 2.0, dtype=a.dtype)),
    "moments": lambda a: a.std() + a.var(0).sum() + torch.std_mean(a, 1)[0].sum() + torch.var_mean(a, correction=0)[0],
    "norms": lambda a: a.norm(3) + a.norm(dim=1).sum() + torch.linalg.vector_norm(a, float("inf")) + a.norm(1),
    "like": lambda a: (torch.rand_like(a) * a + torch.randn_like(a.t()).t() * a).sum(),
    "draws": lambda a: (torch.empty_like(a.t()).uniform_() * a.t()).sum() + (torch.empty_like(a.t()).normal_() * a.t()).sum(),
    "gumbel": lambda a: F.gumbel_softmax(a).square().sum(),
    "alpha_dropout": lambda a: F.alpha_dropout(a, 0.3).sum() + F.dropout(a.t(), 0.4).sum() + F.dropout(a.t() * 1, 0.4, inplace=True).sum(),
    "layer_norms": lambda a: F.layer_norm(a, (5,)).square().sum() + F.rms_norm(a, (5,)).pow(3).sum(),
    "sizes": lambda a: a.squeeze().view(-1).sum() + sum(z.square().sum() for z in a.split(2, 1)) + a[:, None].squeeze(1).sum(),
    "logsumexp": lambda a: torch.logsumexp(a, 0).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_decompositions(name: str) -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = LOSSES[name](model(x))
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    model = mlp()
    captured = check(step, model, torch.optim.SGD(model.parameters(), 0.1), labelled(), tolerance=1e-10)
    assert captured.step.batch is not None


def test_two_models_and_two_optimizers() -> None:
    def gan(G: nn.Module, D: nn.Module, og: Any, od: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        od.zero_grad()
        fake = G(torch.randn(x.shape[0], 8, dtype=x.dtype))
        d = F.softplus(D(fake.detach())).mean() + F.softplus(-D(x)).mean()
        d.backward()
        od.step()
        og.zero_grad()
        g = F.softplus(-D(fake)).mean()
        g.backward()
        og.step()
        return d.detach(), g.detach()

    G, D = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, n)).double() for n in (8, 1))
    models = (G, D, adamw(G), adamw(D))
    captured = capture(gan, (*models, torch.randn(6, 8, dtype=torch.float64)))
    replay = Replay(captured)
    for size in (6, 4, 6):
        state = torch.get_rng_state()
        ours = replay(*models, torch.randn(size, 8, dtype=torch.float64))
        torch.set_rng_state(state)
        theirs = gan(*models, torch.randn(size, 8, dtype=torch.float64))
        assert max(map(difference, ours, theirs)) < 1e-12
        assert difference(replay.stored["G.0.weight"], G[0].weight) < 1e-12
