"""Train steps, written as a user would on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

Loss = Callable[[Tensor, Tensor], Tensor]


# ---- losses


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    """Mean over the entries where the target is positive: their number differs by rank."""
    mask = (target > 0).to(output.dtype)
    return ((output - target).square() * mask).sum() / mask.sum()


def sum_squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


def tokens(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over [B, T, V] logits; -100 is ignored."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """Class weights and label smoothing: the denominator is a sum of weights."""
    weight = torch.linspace(0.5, 2.0, output.shape[-1], dtype=output.dtype)
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), weight=weight, label_smoothing=0.1)


def similarity(output: Tensor, target: Tensor) -> Tensor:
    """In-batch contrastive: every sample against every other."""
    logits = F.normalize(output, dim=1) @ F.normalize(target, dim=1).T / 0.2
    return F.cross_entropy(logits, torch.arange(output.shape[0]))


# ---- the usual step, in its variants


def basic(
    loss: Loss = F.mse_loss, zero: str = "last", set_to_none: bool = True, clip: float | None = None, norm: float = 2.0
) -> Callable[..., Tensor]:
    """forward, backward, clip, step, zero_grad; `zero` says when."""

    def step(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        if zero == "first":
            optim.zero_grad(set_to_none=set_to_none)
        value = loss(model(x), y)
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type=norm)
        optim.step()
        if zero == "last":
            optim.zero_grad(set_to_none=set_to_none)
        return value.detach()

    return step


def clip_returning_norm(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optim.step()
    optim.zero_grad()
    return loss.detach(), norm


def accumulate_stacked(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """x: [3, B, ...]; three micro-batches."""
    total = torch.zeros(())
    for index in range(3):
        loss = F.mse_loss(model(x[index]), y[index]) / 3
        loss.backward()
        total += loss.detach()
    optim.step()
    optim.zero_grad()
    return total


def accumulate_chunks(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Thirds of the global batch."""
    total = torch.zeros(())
    for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
        loss = F.mse_loss(model(part), target) / 3
        loss.backward()
        total += loss.detach()
    optim.step()
    optim.zero_grad()
    return total


def accumulate_valid(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Micro-batches with unequal numbers of valid tokens: one mean over all of them."""
    optim.zero_grad()
    count = (y != -100).sum()
    total = torch.zeros(())
    for index in range(3):
        loss = F.cross_entropy(model(x[index]).flatten(0, 1), y[index].flatten(), reduction="sum") / count
        loss.backward()
        total += loss.detach()
    optim.step()
    return total


# ---- without an optimizer


def manual_sgd(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    return loss.detach()


def manual_data(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """`p.data = ...` and autograd.grad."""
    loss = F.mse_loss(model(x), y)
    for parameter, grad in zip(model.parameters(), torch.autograd.grad(loss, tuple(model.parameters())), strict=True):
        parameter.data = parameter.data - 0.1 * grad
    return loss.detach()


def forward_only(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        output = model(x)
        return F.mse_loss(output, y), output


def gradients_only(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Returns gradients; touches nothing."""
    loss = F.mse_loss(model(x), y)
    return (loss.detach(), *torch.autograd.grad(loss, tuple(model.parameters())))


# ---- more than one model


def gan(
    generator: nn.Module, critic: nn.Module, g_optim: Optimizer, c_optim: Optimizer, real: Tensor, noise: Tensor
) -> dict[str, Tensor]:
    """One critic and one generator update."""
    fake = generator(noise)
    ones, zeros = torch.ones(real.shape[0], 1), torch.zeros(real.shape[0], 1)
    c_loss = F.binary_cross_entropy_with_logits(critic(real), ones)
    c_loss = c_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
    c_optim.zero_grad()
    c_loss.backward()
    c_optim.step()
    g_loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
    g_optim.zero_grad()
    g_loss.backward()
    g_optim.step()
    return {"critic": c_loss.detach(), "generator": g_loss.detach()}


def gan_of_one(both: nn.ModuleDict, g_optim: Optimizer, c_optim: Optimizer, real: Tensor, noise: Tensor) -> Any:
    """`gan` where one module holds both: its losses take turns."""
    return gan(both["generator"], both["critic"], g_optim, c_optim, real, noise)


def gradient_penalty(critic: nn.Module, optim: Optimizer, real: Tensor, fake: Tensor) -> Tensor:
    """WGAN-GP: the penalty differentiates a gradient."""
    weight = torch.rand(real.shape[0], 1)
    mixed = (weight * real + (1 - weight) * fake).requires_grad_()
    (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (grad.norm(2, dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optim.zero_grad()
    loss.backward()
    optim.step()
    return loss.detach()


def teacher(student: nn.Module, ema: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A student, and a teacher that is its moving average."""
    output = student(x)
    with torch.no_grad():
        target = ema(x)
    loss = F.mse_loss(output, y) + F.mse_loss(output, target)
    loss.backward()
    optim.step()
    optim.zero_grad()
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), student.parameters(), strict=True):
            average.lerp_(parameter, 0.1)
    return loss.detach()


# ---- inputs and outputs


def nested(model: nn.Module, optim: Optimizer, batch: dict[str, Any], scale: Tensor) -> dict[str, Any]:
    """A dict with a tuple with a list in; the same kind of thing out."""
    x, (y, [bonus]) = batch["x"], batch["targets"]
    output = model(x)
    loss = (F.mse_loss(output, y) + bonus.mean() + (output * batch["mask"]).mean()) * scale
    loss.backward()
    optim.step()
    optim.zero_grad()
    predictions = output.detach()
    distances = torch.cdist(predictions, predictions.square())
    return {
        "loss": loss.detach(),
        "outputs": (predictions, [predictions.argmax(1), distances, 2 * len(x)]),
        "none": None,
    }


def mixup(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Mixes every sample with a random other one of the global batch."""
    order, weight = torch.randperm(x.shape[0]), torch.rand(x.shape[0], 1)
    loss = F.mse_loss(model(weight * x + (1 - weight) * x[order]), weight * y + (1 - weight) * y[order])
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def noisy(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Random numbers of several kinds, of the batch's shape and not."""
    x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.randn(5)
    output = F.dropout(model(x), 0.3) * torch.bernoulli(torch.full_like(y, 0.7))
    loss = F.mse_loss(output, y + torch.empty_like(y).uniform_(-0.1, 0.1))
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def autocast(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    loss = F.mse_loss(output.to(y.dtype), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def halved(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Parameters and activations in bfloat16, the loss in float32."""
    loss = F.mse_loss(model(x.bfloat16()).float(), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def sets_rate(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The schedule is in the step itself."""
    optim.param_groups[0]["lr"] *= 0.5
    return basic()(model, optim, x, y)


def two_rates(model: nn.Module, fast: Optimizer, slow: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Two optimizers over two parts of one model."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    fast.step()
    slow.step()
    model.zero_grad()
    return loss.detach()


def closure_of_optimizer(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """`optim.step(closure)`."""

    def closure() -> Tensor:
        optim.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return optim.step(closure).detach()  # type: ignore[arg-type, attr-defined]


def item_returned(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> tuple[float, int]:
    """Python numbers out: a loss, and a size that depends on the batch."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item(), 2 * x.shape[0] + 1


def branch_on_size(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Another loss for large batches."""
    loss = F.mse_loss(model(x), y) if x.shape[0] > 8 else F.l1_loss(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def python_arguments(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor, scale: float, flag: bool) -> Tensor:
    output = model(x)
    loss = scale * (F.mse_loss(output, y) if flag else F.l1_loss(output, y))
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def backward_twice(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Two backwards through one graph."""
    output = model(x)
    first, second = F.mse_loss(output, y), output.square().sum()
    first.backward(retain_graph=True)
    second.backward()
    optim.step()
    optim.zero_grad()
    return first.detach() + second.detach()


# ---- steps that close over what they train


def closing(model: nn.Module, optim: Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    weights = dict(model.named_parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) + 0.01 * sum(weight.square().sum() for weight in weights.values())
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return step


class Trainer:
    """A step that is a method."""

    def __init__(self, model: nn.Module, optim: Optimizer) -> None:
        self.model, self.optim = model, optim

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        return loss.detach()


def method(model: nn.Module, optim: Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    return Trainer(model, optim).step


# ---- transformers


def transformers_labels(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The loss that the model computes from labels."""
    loss = model(input_ids=x, labels=y).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    return loss.detach()


def transformers_masked(model: nn.Module, optim: Optimizer, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """With an attention mask."""
    loss = tokens(model(input_ids=x, attention_mask=mask).logits, y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def transformers_images(model: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(pixel_values=x).logits, y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


# ---- averages, and two passes


def sharpness_aware(model: nn.Module, optim: Any, x: Tensor, y: Tensor) -> Tensor:
    """SAM: the gradient at the worst point nearby."""
    F.mse_loss(model(x), y).backward()
    optim.climb()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def moving_average(model: nn.Module, average: nn.Module, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = basic()(model, optim, x, y)
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.1)
    return loss


def averaged(model: nn.Module, average: Any, optim: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """torch.optim.swa_utils.AveragedModel, updated in the step."""
    loss = basic()(model, optim, x, y)
    average.update_parameters(model)
    return loss
