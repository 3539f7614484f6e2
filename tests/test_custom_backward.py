"""Custom autograd Functions whose backward isn't the derivative, of every form that torch has for them: the step keeps what they say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.kinds import ALL, BATCH, ENDS, hold


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reversed(Function):
    """A number as an argument, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class Clipped(Function):
    """By the norm over the whole batch, in the form with `setup_context`."""

    @staticmethod
    def forward(x: Tensor, limit: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.limit = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (ctx.limit / grad.norm()).clamp(max=1), None


class PerSampleClipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm(dim=1, keepdim=True).clamp(min=1e-2)


class Normalised(Function):
    """The gradient is centred and scaled over the batch: every sample's depends on all others'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad - grad.mean(0)) / (grad.std(0) + 0.1) / len(grad)


class Shifted(Function):
    """A sample gets its neighbour's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.roll(1, 0) + grad.flip(0)


class Ranked(Function):
    """Only the largest half of the batch learns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        size = x.square().sum(1)
        return torch.where((size >= size.median())[:, None], grad * x, 0.0)


class Partly(Function):
    """None for the weight: it learns nothing, though it's used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad * weight.abs(), None


class AsAsked(Function):
    """`needs_input_grad`, and a gradient of the weight that is summed by hand and isn't the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        ours = grad @ weight.sign() if ctx.needs_input_grad[0] else None
        return ours, grad.t() @ x.sign() + x.abs().max() if ctx.needs_input_grad[1] else None


class Saving(Function):
    """Saves what is neither an input nor an output, and keeps some of it on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, spread = x.sigmoid(), x.var(0)
        ctx.save_for_backward(gate)
        ctx.spread = spread
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate,) = ctx.saved_tensors
        return grad * gate * (1 + ctx.spread)


class SavingOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp().clamp(max=3)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * out.sqrt()


class Marking(Function):
    """Two outputs, one of them an index without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.max(1, keepdim=True)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.width = x.shape[1]
        return values, places

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return 0.5 * grad * F.one_hot(places[:, 0], ctx.width) + 0.1 * grad


class Unmaterialized(Function):
    """An output that nothing uses: its gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x + 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        assert second is None
        return None if first is None else first * 3


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.05, 0.05)


class Noisy(Function):
    """Random numbers in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full_like(x, 0.7))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return grad * mask + 0.1 * torch.randn_like(grad)


class Inner(Function):
    """Autograd inside a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = (x.softmax(0) * grad).sum()
        return torch.autograd.grad(out, x)[0]


class Twice(Function):
    """A backward that can be differentiated, and whose derivative isn't that of the forward either."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * Reversed.apply(x.square(), 0.5)


class Model(nn.Module):
    """A branch for each function, with a layer of its own below it."""

    def __init__(self, functions: Sequence[Callable[..., Tensor]]) -> None:
        super().__init__()
        self.below = nn.ModuleList(nn.Linear(5, 7) for _ in functions)
        self.above = nn.Linear(7, 3)
        self.weight, self.square = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(7, 7))
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        return self.above(sum(f(self, below(x)) for f, below in zip(self.functions, self.below, strict=True)))


def bare(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda model, h: apply(h)


@torch.library.custom_op("spmd_backward::rounded", mutates_args=())
def rounded(x: Tensor) -> Tensor:
    return x.round()


rounded.register_fake(torch.empty_like)
rounded.register_autograd(lambda ctx, grad: grad * 0.5)

KINDS: dict[str, Callable[..., Tensor]] = {
    "straight through": bare(StraightThrough.apply),
    "reversed": lambda model, h: Reversed.apply(h, 0.3),
    "clipped by the batch's norm": lambda model, h: Clipped.apply(h, 0.01),
    "clipped by sample": bare(PerSampleClipped.apply),
    "normalised over the batch": bare(Normalised.apply),
    "shifted over the batch": bare(Shifted.apply),
    "ranked in the batch": bare(Ranked.apply),
    "none for the weight": lambda model, h: Partly.apply(h, model.weight),
    "none for the input": lambda model, h: h + Partly.apply(model.weight, h.detach().mean(0)),
    "as asked": lambda model, h: AsAsked.apply(h, model.square),
    "as asked of a constant": lambda model, h: h + AsAsked.apply(h.detach(), model.square),
    "saves between": bare(Saving.apply),
    "saves the output": bare(SavingOutput.apply),
    "marks an index": lambda model, h: h * Marking.apply(h)[0] + F.one_hot(Marking.apply(h)[1][:, 0], 7),
    "unmaterialized": lambda model, h: Unmaterialized.apply(h)[0],
    "in place": lambda model, h: InPlace.apply(h.clone()),
    "noisy": bare(Noisy.apply),
    "autograd within": bare(Inner.apply),
    "in a checkpoint": lambda model, h: checkpoint(Saving.apply, h, use_reentrant=False),
    "noisy in a checkpoint": lambda model, h: checkpoint(Noisy.apply, h, use_reentrant=False),
    "in a reentrant checkpoint": lambda model, h: checkpoint(Normalised.apply, h, use_reentrant=True),
    "of parameters": lambda model, h: F.linear(h, StraightThrough.apply(model.square * 3) / 3, Normalised.apply(model.weight)),
    "in a hook": lambda model, h: hooked(h),
    "detached": lambda model, h: h + (h.round() - h).detach(),
    "an op's own": bare(rounded),
    "one after the other": lambda model, h: Reversed.apply(StraightThrough.apply(Shifted.apply(h)), 2.0),
}  # fmt: skip


def hooked(h: Tensor) -> Tensor:
    """A gradient changed on its way by a tensor hook."""
    h = h * 1
    h.register_hook(lambda grad: grad / grad.abs().amax(0).clamp(min=1e-3))
    return h.tanh()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def build(functions: Sequence[Callable[..., Tensor]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Model(functions)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("part", range(3))
def test_backwards_that_arent_the_derivative_are_kept(part: int) -> None:
    hold(functools.partial(build, list(KINDS.values())[part::3]), update, layouts=[ENDS[part % 2]], turns=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_alone_in_every_style(kind: str) -> None:
    hold(functools.partial(build, [KINDS[kind]]), update, layouts=ALL, turns=4)


def test_a_gradient_of_such_a_gradient() -> None:
    def penalised(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, y) + (grad.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    hold(functools.partial(build, [bare(Twice.apply)]), penalised, layouts=ENDS)


def test_what_the_derivative_would_give_is_something_else() -> None:
    """The kinds above tell a compiler that forgets them from one that doesn't."""
    x = torch.linspace(-1, 1, BATCH * 7, dtype=torch.float64).view(BATCH, 7).requires_grad_()
    for apply, derivative in (
        (StraightThrough.apply, torch.round),
        (Normalised.apply, torch.tanh),
        (Shifted.apply, torch.sin),
    ):
        ours, theirs = (torch.autograd.grad((f(x) * x.detach().cos()).sum(), x)[0] for f in (apply, derivative))
        assert (ours - theirs).abs().max() > 0.01
