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
            inputs = [self._number(i.name) if i.role is Role.HYPER else self.stored[i.name] for i in captured.init.inputs]
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
    return {k: v for k, v in out.items()}


def check(
    step: Callable[..., Any],
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    batch: Callable[[int], tuple[Any, ...]],
    sizes: tuple[int, ...] = (6, 6, 4, 6),
    tolerance: float = 1e-12,
    between: Callable[[torch.optim.Optimizer | None], None] = lambda optim: None,
    before: int = 0,
    traces: int = 1,
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
    assert pytree.tree_all(lambda same: same, pytree.tree_map(lambda a, b: bool((torch.as_tensor(a) == torch.as_tensor(b)).all()) if isinstance(a, (torch.Tensor, float)) else a == b, snapshot, after))
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
    return captured


def compare(replay: Replay, replayed: Any, eager: Any, model: nn.Module, optim: Any, tolerance: float, where: str) -> None:
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


def labelled(dtype: torch.dtype = torch.float64, *shape: int, classes: int = 5) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
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
    def __init__(self, layers: int = 2, d: int = 16, heads: int = 4, vocab: int = 19, length: int = 7, dropout: float = 0.1, recompute: bool = False, tied: bool = True) -> None:
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
        self.a, self.b, self.reentrant = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh()), nn.Linear(16, 5), reentrant

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
