"""Models in the captured step, at two batch sizes from one trace, equal to eager; and where each node comes from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from spmd.capture import capture
from spmd.capture.fakes import memory_order
from tests.replay import adamw, check, labelled, mlp, train


class Transformer(nn.Module):
    def __init__(self, dropout: float, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
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
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.Conv2d(8, 8, 3),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


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


SLOW = ("gpt_recompute", "encoder_sequence_first")  # each much like another


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS])
def test_models(name: str) -> None:
    make, step, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    captured = check(step, model, torch.optim.AdamW(model.parameters(), 1e-3), batch, tolerance=1e-9)
    assert captured.step.batch is not None, "the batch was specialised"
    assert not any(n.target is torch.ops.aten.native_dropout.default for n in captured.step.graph.nodes)


class Spread(nn.Module):
    """Dropout of one encoding of places that all samples share, as XLNet has it."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.a, self.dropout = nn.Parameter(torch.randn(4, 1, 8)), nn.Linear(8, 5), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x + self.dropout(self.places.expand(-1, len(x), -1)).sum(0))


def test_dropout_of_what_is_expanded() -> None:
    model = Spread().double()
    check(train, model, torch.optim.SGD(model.parameters(), 0.1), labelled(), tolerance=1e-9)


def test_the_memory_order_of_what_torch_makes_like_a_tensor() -> None:
    numbers = random.Random(0)
    for _ in range(2000):
        sizes = [numbers.choice([1, 2, 3, 4]) for _ in range(numbers.randint(1, 5))]
        own, turn = [numbers.choice([n, n, 1]) for n in sizes], numbers.sample(range(len(sizes)), len(sizes))
        x = torch.empty([own[d] for d in turn]).permute([turn.index(d) for d in range(len(turn))]).expand(sizes)
        order = memory_order(x)
        made = torch.empty([sizes[d] for d in order]).permute([order.index(d) for d in range(len(order))])
        expected = torch.empty_like(x).stride()
        assert all(n == 1 or a == b for n, a, b in zip(sizes, made.stride(), expected, strict=True)), (
            sizes,
            x.stride(),
        )


def test_unused_parameters_get_no_state() -> None:
    model = Odd().double()
    captured = check(train, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1), labelled())
    assert not any("unused" in o.name or "frozen" in o.name for o in captured.step.outputs)


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
    assert {n.meta["checkpoint"] for n in attention if n.meta["phase"] == "forward"} == {1, 2}
    norms = [n for n in nodes if "clip_grad" in n.meta["source"].code]
    assert norms and all(n.meta["phase"] == "update" for n in norms)


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
