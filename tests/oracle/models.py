"""Small models, sized so that nothing divides evenly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def mlp(activation: type[nn.Module] = nn.Tanh, dropout: float = 0.0) -> nn.Sequential:
    """5 -> 7 -> 3."""
    middle = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(5, 7), activation(), *middle, nn.Linear(7, 3))


class Odd(nn.Module):
    """Parameters of every awkward shape: 0-dim, empty, sizes 1, 3, 5, 7, 13, transposed; all of them used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.randn(1))
        self.three = nn.Parameter(torch.randn(5, 3))
        self.thirteen = nn.Parameter(torch.randn(3, 13))
        self.column = nn.Parameter(torch.randn(13, 1))
        self.row = nn.Parameter(torch.randn(1, 13))
        self.turned = nn.Parameter(torch.randn(7, 13).t())
        self.back = nn.Parameter(torch.randn(3, 7).t())
        self.empty = nn.Parameter(torch.randn(0))
        self.hollow = nn.Parameter(torch.randn(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.three) * self.scale + self.one
        hidden = torch.tanh(hidden @ self.thirteen + self.row) * self.column[:, 0]
        out = torch.tanh(hidden @ self.turned) @ self.back
        return out + self.empty.sum() + self.hollow.sum()


class Partly(nn.Module):
    """A frozen layer, an unused one, one that is None, and a parameter that no optimizer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.unused = nn.Linear(7, 7)
        self.head = nn.Linear(7, 3)
        self.outside = nn.Parameter(torch.ones(3))
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(x))) * self.outside


class Tied(nn.Module):
    """A bigram model whose embedding is also its head; 13 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


class Twice(nn.Module):
    """One layer used twice, and its weight a third time by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return self.head(hidden @ self.layer.weight)


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, norm: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, width = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(B, T, width)), p, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), p, self.training)


class GPT(nn.Module):
    """A decoder over 13 tokens and at most 8 positions, its head tied to the embedding."""

    def __init__(
        self,
        norm: type[nn.Module] = nn.LayerNorm,
        heads: int = 3,
        dropout: float = 0.0,
        recompute: str = "",
        blocks: int = 1,
    ) -> None:
        super().__init__()
        width = 4 * heads
        self.recompute = recompute
        self.token, self.position = nn.Embedding(13, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, heads, norm, dropout) for _ in range(blocks))
        self.norm = norm(width)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else block(x)
        return self.head(self.norm(x))


class CNN(nn.Module):
    """Convolutions on 8 x 8 images; GroupNorm or BatchNorm between them."""

    def __init__(self, batch_norm: bool = False, channels_last: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 7, 4, stride=4, bias=False)
        self.norm: nn.Module = nn.BatchNorm2d(6) if batch_norm else nn.GroupNorm(2, 6)
        self.head = nn.Linear(28, 3)
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        return self.head(torch.tanh(self.conv2(x)).flatten(1))


class Recurrent(nn.Module):
    """A two-layer LSTM and a head on its last output: [B, 3], or [1, B, 3] if the sequence comes first."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        return self.head(out[:, -1] if self.batch_first else out[-1:])


class SequenceFirst(nn.Module):
    """nn.TransformerEncoder over [T, B, D], dropout on."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=13, dropout=dropout)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Counting(nn.Module):
    """Buffers that change: one in place, one assigned anew, and an integer count."""

    mean: Tensor
    last: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.last = x.detach().square().mean()
        self.seen += x.shape[0]
        return self.body(x - self.mean)


class Scaled(nn.Module):
    """Scales its output by an attribute that is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.factor = mlp(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.factor


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


class Reversal(nn.Module):
    """Gradient reversal and a straight-through rounding: backwards that aren't derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = _Reversed.apply(self.below(x))
        return self.above(hidden + (hidden.round() - hidden).detach())


class Mixed(nn.Module):
    """Linear layers in bfloat16 around a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = (
            nn.Linear(5, 7).bfloat16(),
            nn.LayerNorm(7).float(),
            nn.Linear(7, 3).bfloat16(),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.bfloat16()).float())
        return self.head(hidden.bfloat16()).float()


class Complex(nn.Module):
    """A complex parameter, and an integer one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.offset = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.filter).abs() + self.offset


def transformers_model(kind: str) -> nn.Module:
    """A tiny model of the `transformers` package, in training mode, dropout as its config has it."""
    import transformers

    hf: Any = transformers

    ends = {"bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=37, n_positions=16, n_embd=12, n_layer=1, n_head=3, **ends)
        ).train()
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 22, "num_attention_heads": 4, "num_key_value_heads": 2}
        return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=37, num_hidden_layers=1, **sizes)).train()
    if kind == "bert":
        sizes = {"hidden_size": 12, "intermediate_size": 22, "num_attention_heads": 3, "num_hidden_layers": 1}
        return hf.BertForMaskedLM(hf.BertConfig(vocab_size=37, max_position_embeddings=16, **sizes)).train()
    if kind == "t5":
        sizes = {"d_model": 12, "d_kv": 4, "d_ff": 22, "num_heads": 3, "num_layers": 1}
        return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=37, decoder_start_token_id=0, **sizes)).train()
    sizes = {"hidden_size": 12, "intermediate_size": 22, "num_attention_heads": 3, "num_hidden_layers": 1}
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes)).train()


class Algebra(nn.Module):
    """Inverses, factorizations and determinants, of a parameter and of a matrix for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.head = nn.Parameter(torch.randn(5, 5) + 3 * torch.eye(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        solved = torch.linalg.solve(self.mixing, x.unsqueeze(-1)).squeeze(-1)
        own = torch.linalg.inv(x[:, :, None] * x[:, None, :] + torch.eye(5)).sum(-1)
        fitted = torch.linalg.lstsq(self.mixing, torch.eye(5)).solution.sum(0)
        factor = torch.linalg.cholesky(x.T @ x + torch.eye(5))
        return self.head(solved + own + fitted + factor.diagonal().log()) + torch.linalg.slogdet(self.mixing)[1]


class Rare(nn.Module):
    """Layers that sharding tools often lack: 1-D convolution, bags of embeddings, distances, an integer parameter, a wide buffer."""

    wide: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bag = nn.Conv1d(2, 4, 3, padding=1), nn.EmbeddingBag(11, 5, mode="mean")
        self.centres, self.head = nn.Parameter(torch.randn(6, 5)), nn.Linear(4 * 5 + 5 + 6, 3)
        self.places = nn.Parameter(torch.arange(5) % 4, requires_grad=False)
        self.register_buffer("wide", torch.ones(5, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x)) * self.wide
        words = (x[:, 0].abs() * 7).long() % 11
        near = torch.cdist(x[:, 1], self.centres)
        picked = h[:, 0] + h[..., self.places].mean((1, 2)).unsqueeze(-1)
        return self.head(torch.cat([h.flatten(1), self.bag(words) + picked, near], dim=1))


def from_meta() -> nn.Module:
    """A GPT without memory at first; its tie is renewed, as `to_empty` gives each module memory of its own."""
    with torch.device("meta"):
        model = GPT()
    model.to_empty(device="cpu")
    model.head.weight = model.token.weight
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


class SixOfAll(nn.Module):
    """Six words, positions, features and classes, with a table over positions and scores of each against each."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(6, 6), nn.Embedding(6, 6)
        self.places = nn.Parameter(torch.randn(6, 6))
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(6)) + self.places
        scores = (x @ self.mix(x).transpose(1, 2) + torch.eye(6) + self.places.mean(0)).softmax(-1)
        return self.head(scores @ x)


class WideBuffer(nn.Module):
    """A running mean in float32 of activations in bfloat16."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp().bfloat16()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        self.mean.lerp_(y.detach().float().mean(0), 0.1)
        return y - self.mean.bfloat16()
