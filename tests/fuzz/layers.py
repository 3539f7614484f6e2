"""The vocabulary: modules. Each is built for the shape that it first meets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fuzz.vocabulary import Shape, dim, flag, layer, pick


class Scale(nn.Module):
    """A 0-dim parameter, and one of the last dim's size."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.8))
        self.shift = nn.Parameter(torch.linspace(-0.5, 0.5, n))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Running(nn.Module):
    """A buffer that follows the mean over the first dim, and a counter."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(n))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.average: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(x.reshape(-1, x.shape[-1]).mean(0), 0.3)
            self.count += 1
        return x - self.average


class Codebook(nn.Module):
    """Vector quantisation: each vector's nearest code, straight through."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, n))

    def forward(self, x: Tensor) -> Tensor:
        distance = (x.unsqueeze(-2) - self.codes).square().sum(-1)
        code = self.codes[distance.argmin(-1)]
        return x + (code - x).detach() + 0.1 * (code - x.detach()).square()


class Experts(nn.Module):
    """Two linear layers, mixed by a softmax; both see every vector."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gate = nn.Linear(n, 2)
        self.experts = nn.ModuleList([nn.Linear(n, n), nn.Linear(n, n)])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        return torch.stack([e(x) for e in self.experts], -1).mul(weight.unsqueeze(-2)).sum(-1)


class Words(nn.Module):
    """Values become tokens, tokens become vectors."""

    def __init__(self, padding: bool, bag: bool) -> None:
        super().__init__()
        table = nn.EmbeddingBag(7, 4, mode="mean") if bag else nn.Embedding(7, 4, padding_idx=0 if padding else None)
        self.bag, self.table = bag, table

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach().abs() * 5).long() % 7
        return self.table(tokens.flatten(1) if self.bag else tokens) + x.mean()


class Recurrent(nn.Module):
    """Over the second dim, or over the first."""

    def __init__(self, kind: str, n: int, first: bool) -> None:
        super().__init__()
        self.net = getattr(nn, kind)(n, 3, batch_first=first)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]


class Cell(nn.Module):
    """Two steps of a cell."""

    def __init__(self, kind: str, n: int) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(n, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x)
        state = self.cell(x.sin(), state)
        return state[0] if isinstance(state, tuple) else state


class SelfAttention(nn.Module):
    def __init__(self, n: int, first: bool) -> None:
        super().__init__()
        self.net = nn.MultiheadAttention(n, 2 if n % 2 == 0 else 1, batch_first=first)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, x, x)[0]


class Depthwise(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.net = nn.Conv2d(n, n, 3, padding=1, groups=n)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Positions(nn.Module):
    """A learned vector for each position of the second dim."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape[1], shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


layer("linear", lambda s, out, bias: nn.Linear(s[-1], out, bias=bias), (1, 5), out=pick(3, 4, 5, 6), bias=flag)
layer(
    "mlp",
    lambda s: nn.Sequential(nn.Linear(s[-1], 7), nn.GELU(), nn.Linear(7, s[-1])),
    (1, 5),
)
layer("residual", lambda s: nn.Linear(s[-1], s[-1]), (1, 5), lambda m, x: x + m(x).tanh())
layer("scale", lambda s: Scale(s[-1]), (1, 5))
layer("running", lambda s: Running(s[-1]), (1, 5))
layer("codebook", lambda s: Codebook(s[-1]), (1, 4))
layer("experts", lambda s: Experts(s[-1]), (1, 4))
layer("words", lambda s, padding, bag: Words(padding, bag), (1, 3), padding=flag, bag=flag)
layer("bilinear", lambda s: nn.Bilinear(s[-1], s[-1], 3), (1, 3), lambda m, x: m(x, x.sin()))
layer("prelu", lambda s: nn.PReLU(), (1, 5))
layer("prelu_channels", lambda s: nn.PReLU(s[1]), (2, 5))
layer("layer_norm", lambda s, affine: nn.LayerNorm(s[-1], elementwise_affine=affine), (1, 5), affine=flag)
layer("layer_norm_two", lambda s: nn.LayerNorm(s[-2:]), (3, 5))
layer("rms_norm", lambda s: nn.RMSNorm(s[-1]), (1, 5))
layer("group_norm", lambda s: nn.GroupNorm(2 if s[1] % 2 == 0 else 1, s[1]), (2, 5))
layer(
    "batch_norm",
    lambda s, running, affine: {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(s)](
        s[1], track_running_stats=running, affine=affine
    ),
    (2, 4),
    running=flag,
    affine=flag,
)
layer(
    "batch_norm_eval", lambda s: {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(s)](s[1]).eval(), (2, 4)
)
layer("instance_norm", lambda s: {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d}[len(s)](s[1], affine=True), (3, 4))
layer("conv1d", lambda s, groups: nn.Conv1d(s[1], 4, 2), (3, 3), groups=flag)
layer("conv_transpose1d", lambda s: nn.ConvTranspose1d(s[1], 3, 2), (3, 3))
layer(
    "conv2d", lambda s, stride, bias: nn.Conv2d(s[1], 4, 3, stride, 1, bias=bias), (4, 4), stride=pick(1, 2), bias=flag
)
layer("conv_transpose2d", lambda s: nn.ConvTranspose2d(s[1], 3, 2, stride=2), (4, 4))
layer("depthwise", lambda s: Depthwise(s[1]), (4, 4))
layer("dropout_layer", lambda s: nn.Dropout(0.3), (0, 5))
layer("alpha_dropout", lambda s: nn.AlphaDropout(0.2), (1, 5))
layer("lstm", lambda s, first: Recurrent("LSTM", s[-1], first), (3, 3), first=flag)
layer("gru", lambda s, first: Recurrent("GRU", s[-1], first), (3, 3), first=flag)
layer("rnn", lambda s, first: Recurrent("RNN", s[-1], first), (3, 3), first=flag)
layer("lstm_cell", lambda s: Cell("LSTMCell", s[-1]), (2, 2))
layer("gru_cell", lambda s: Cell("GRUCell", s[-1]), (2, 2))
layer("self_attention", lambda s, first: SelfAttention(s[-1], first), (3, 3), first=flag)
layer(
    "transformer_layer",
    lambda s, drop: nn.TransformerEncoderLayer(s[-1], 1, 5, dropout=drop, batch_first=True),
    (3, 3),
    drop=pick(0.0, 0.1),
)
layer("learned_positions", Positions, (3, 4))
layer("weight_norm", lambda s: nn.utils.parametrizations.weight_norm(nn.Linear(s[-1], 4)), (1, 4))
layer("spectral_norm", lambda s: nn.utils.parametrizations.spectral_norm(nn.Linear(s[-1], 4)), (1, 4))
layer("center", lambda s, dim: nn.Linear(s[-1], 3), (1, 4), lambda m, x, dim: m(x - x.mean(dim, keepdim=True)), dim=dim)
