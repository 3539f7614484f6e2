"""Models that tensor parallelism is for, with plans as a user would write them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from spmd.modes import (
    ColwiseParallel,
    ContextParallel,
    ExpertParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from tests.oracle import models, steps
from tests.oracle.case import Case


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.v, self.o = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=False)  # its bias has no gradient but rounding

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (m(x).view(B, T, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = (
            nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width), MLP(width, 3 * width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder over 13 tokens and at most 8 positions."""

    def __init__(self, heads: int = 4, layers: int = 1, tied: bool = False) -> None:
        super().__init__()
        width = 4 * heads
        self.token, self.position = nn.Embedding(13, width), nn.Embedding(8, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 13, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """[experts, tokens, width] to the same."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)


class Mixture(nn.Module):
    """Each token goes to one of five experts, each of which takes at most three tokens of a sequence (GShard's dispatch and combine)."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inlet, self.router, self.experts = nn.Linear(5, width), nn.Linear(width, 5), Experts(5, width, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        gate, chosen = self.router(x).softmax(-1).max(-1)
        mine = (chosen[..., None] == torch.arange(5, device=x.device)).to(x.dtype)
        place = (mine.cumsum(1) - 1)[..., None] == torch.arange(3, device=x.device)
        sent = mine[..., None] * place.to(x.dtype)  # token t of b goes to place c of expert e
        inbox = torch.einsum("btec,btd->ebcd", sent, x)
        outbox = self.experts(inbox.flatten(1, 2)).unflatten(1, inbox.shape[1:3])
        return x + torch.einsum("btec,ebcd->btd", sent * gate[..., None, None], outbox)


PLAN: dict[str, Any] = {
    "token": RowwiseParallel(),
    "layers.*.attention.[qkv]": ColwiseParallel(),
    "layers.*.attention.o": RowwiseParallel(),
    "layers.*.mlp.up": ColwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(),
    "head": ColwiseParallel(),
}
SEQUENCE: dict[str, Any] = {
    **PLAN,
    "token": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.norm[12]": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
}
LLAMA: dict[str, Any] = {
    "model.embed_tokens": RowwiseParallel(),
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(),
}
BERT: dict[str, Any] = {
    "bert.embeddings.word_embeddings": RowwiseParallel(),
    "bert.encoder.layer.*.attention.self.[qkv]*": ColwiseParallel(),
    "bert.encoder.layer.*.attention.output.dense": RowwiseParallel(),
    "bert.encoder.layer.*.intermediate.dense": ColwiseParallel(),
    "bert.encoder.layer.*.output.dense": RowwiseParallel(),
}
T5: dict[str, Any] = {
    "shared": RowwiseParallel(),
    "*.block.*.layer.0.SelfAttention.[qkv]": ColwiseParallel(),
    "*.block.*.layer.0.SelfAttention.o": RowwiseParallel(),
    "decoder.block.*.layer.1.EncDecAttention.[qkv]": ColwiseParallel(),
    "decoder.block.*.layer.1.EncDecAttention.o": RowwiseParallel(),
    "encoder.block.*.layer.1.DenseReluDense.wi": ColwiseParallel(),
    "encoder.block.*.layer.1.DenseReluDense.wo": RowwiseParallel(),
    "decoder.block.*.layer.2.DenseReluDense.wi": ColwiseParallel(),
    "decoder.block.*.layer.2.DenseReluDense.wo": RowwiseParallel(),
}
TRANSFORMERS = {"hf_llama": LLAMA, "hf_bert": BERT, "hf_t5": T5}
CONTEXT: dict[str, Any] = {"": ContextParallel()}
HEADS: dict[str, Any] = {"": ContextParallel(), "layers.*.attention": ContextParallel(exchange_heads=True)}
EXPERTS: dict[str, Any] = {"experts": ExpertParallel()}
TWO_LINEARS: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def words(B: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 13, (B, 6)), torch.randint(0, 13, (B, 6))


def regression(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 5), torch.randn(B, 3)


def sequences(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 6, 5), torch.randn(B, 6, 6)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.02, eps=1e-4, fused=True)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(
        model.parameters(), 0.02, eps=(1e-3, 1e-3)
    )  # rows that aren't used have no gradient but rounding


def cases() -> Iterator[Case]:
    def decoder(name: str, plan: dict[str, Any], optim: Any = adamw, **options: Any) -> Case:
        step = steps.basic(steps.tokens, clip=1.0)
        return Case(f"tensor_{name}", partial(Decoder, **options), step, words, optim, plan=plan)

    yield Case("tensor_mlp", models.mlp, steps.basic(), regression, adamw, plan=TWO_LINEARS)
    yield decoder("decoder", PLAN)
    yield decoder("decoder_sequence", SEQUENCE, layers=2)
    yield decoder("decoder_tied", PLAN, tied=True)
    yield decoder("decoder_six_heads", PLAN, heads=6)
    yield decoder("decoder_two_heads", SEQUENCE, heads=2)
    yield decoder("decoder_adafactor", PLAN, adafactor)
    yield decoder("decoder_context", CONTEXT, layers=2)
    yield decoder("decoder_context_heads", HEADS)
    yield decoder("decoder_context_uneven_heads", HEADS, heads=2)
    yield Case("tensor_experts", Mixture, steps.basic(), sequences, adamw, plan=EXPERTS)
