"""Functions whose backward isn't the derivative keep it, whatever form they have and however they mix the batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from spmd.modes import DataParallelMode
from tests.fuzz.ranks import Ranks


class Rounded(Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * g, None


class Clipped(Function):
    """By the norm of each sample's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm(dim=1, keepdim=True).clamp(min=0.01)


class OfTheBatch(Function):
    """By the norm of the whole batch's gradient, and its mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (g - g.mean(0)) / g.norm()


class Apart(Function):
    """The form with a context set up apart; keeps what's neither input nor output; one output has no gradient."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = x.sigmoid()
        return inner * w, inner, (inner > 0.5).sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, inner, count = output
        ctx.mark_non_differentiable(count)
        ctx.save_for_backward(inner, inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_inner: Tensor, g_count: Any) -> tuple[Tensor, Tensor]:
        inner, w = ctx.saved_tensors
        return 2 * g * w + g_inner, (g * inner).sum(0) * 0.5


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.sign()


class Nothing(Function):
    """No gradient for its first argument; the second one's is of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g * ctx.saved_tensors[0]


KINDS: dict[str, Any] = {
    "straight through": lambda x, w: Rounded.apply(3 * x),
    "reversal": lambda x, w: Reversed.apply(x, 0.3),
    "clipped by sample": lambda x, w: Clipped.apply(x),
    "normalized by batch": lambda x, w: OfTheBatch.apply(x),
    "context apart": lambda x, w: sum(Apart.apply(x, w)[:2]) + Apart.apply(x, w)[2],
    "once": lambda x, w: Once.apply(x),
    "nothing": lambda x, w: Nothing.apply(x, x * w),
    "inside a checkpoint": lambda x, w: checkpoint(
        lambda x: OfTheBatch.apply(Rounded.apply(3 * x)), x, use_reentrant=False
    ),
    "detached": lambda x, w: x + (x.round() - x).detach(),
    "hook": lambda x, w: hooked(x),
}


def hooked(x: Tensor) -> Tensor:
    y = x * 1.0
    y.register_hook(lambda g: g / g.norm())
    return y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inlet, self.outlet = kind, nn.Linear(5, 7), nn.Linear(7, 3)
        self.weight = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(KINDS[self.kind](self.inlet(x), self.weight))


def train(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_of_ones_own_is_kept(kind: str, style: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = Model(kind)
        plain = copy.deepcopy(model)
        optims = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, plain)]
        x, y = torch.randn(6, 5), torch.randn(6, 3)
        ranks = Ranks(train, (model, optims[0], x[:2], y[:2]), DataParallelMode(style), 3, 6)
        for _ in range(2):
            (loss,), _ = ranks(model, optims[0], x, y)
            torch.testing.assert_close(loss, train(plain, optims[1], x, y), rtol=1e-9, atol=1e-12)
        state = ranks.state()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(state[name], p.detach(), rtol=1e-9, atol=1e-12, msg=name)
    finally:
        torch.set_default_dtype(torch.float32)
