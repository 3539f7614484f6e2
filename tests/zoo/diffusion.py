"""Two denoisers, written as their papers have them but small: a U-Net and a diffusion transformer. Both draw times and noise in `forward`."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def waves(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of times, [B, width]."""
    rates = torch.exp(torch.arange(width // 2) * (-math.log(1000.0) / (width // 2)))
    angles = t[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Denoiser(nn.Module):
    """The loss of predicting noise, at a random time for each sample; labels are dropped for classifier-free guidance."""

    alphas: Tensor

    def __init__(self, width: int, classes: int = 5, steps: int = 10) -> None:
        super().__init__()
        self.width, self.classes = width, classes
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(0.01, 0.3, steps), 0))
        self.names = nn.Embedding(classes + 1, width)
        self.times = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, images: Tensor, labels: Tensor) -> SimpleNamespace:
        t = torch.randint(0, len(self.alphas), (len(images),))
        noise = torch.randn_like(images)
        kept = self.alphas[t][:, None, None, None]
        labels = torch.where(torch.rand(len(labels)) < 0.1, self.classes, labels)
        condition = self.times(waves(t, self.width)) + self.names(labels)
        found = self.denoise(kept.sqrt() * images + (1 - kept).sqrt() * noise, condition)
        return SimpleNamespace(loss=F.mse_loss(found, noise))

    def denoise(self, x: Tensor, condition: Tensor) -> Tensor:
        raise NotImplementedError


class Residual(nn.Module):
    def __init__(self, before: int, after: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(2, after), nn.Conv2d(after, after, 3, padding=1)
        self.condition, self.dropout = nn.Linear(width, 2 * after), nn.Dropout(0.1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.condition(F.silu(condition))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        return self.skip(x) + self.conv2(self.dropout(F.silu(h)))


class UNet(Denoiser):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.inward, self.outward = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down = nn.ModuleList([Residual(8, 8, width), Residual(8, 16, width)])
        self.shrink = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up = nn.ModuleList([Residual(32, 16, width), Residual(24, 8, width)])

    def denoise(self, x: Tensor, condition: Tensor) -> Tensor:
        first = self.down[0](self.inward(x), condition)
        second = self.down[1](self.shrink(first), condition)
        flat = second.flatten(2).transpose(1, 2)
        middle = second + self.attention(flat, flat, flat)[0].transpose(1, 2).view_as(second)
        h = self.up[0](torch.cat([middle, second], dim=1), condition)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        return self.outward(F.silu(self.up[1](torch.cat([h, first], dim=1), condition)))


class Modulated(nn.Module):
    """A transformer block whose norms take scale, shift and gate from the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, gate1, c, d, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        q, k, v = self.qkv(self.norm1(x) * (1 + a) + b).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + c) + d)


class DiT(Denoiser):
    places: Tensor

    def __init__(self, width: int = 16, patch: int = 2, size: int = 8) -> None:
        super().__init__(width)
        self.patch = patch
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.register_buffer("places", waves(torch.arange((size // patch) ** 2), width))
        self.blocks = nn.ModuleList(Modulated(width, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3 * patch * patch)

    def denoise(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.embed(x)
        side = h.shape[-1]
        h = h.flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            h = block(h, condition)
        h = self.head(self.norm(h)).unflatten(1, (side, side)).unflatten(-1, (3, self.patch, self.patch))
        return torch.einsum("bhwcpq->bchpwq", h).reshape(x.shape)
