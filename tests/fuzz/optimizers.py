"""Optimizers of the programs: torch's with options, and hand-written ones that aren't elementwise or keep odd states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from tests.fuzz.vocabulary import Draw, pick


class Lion(optim.Optimizer):
    """The sign of an interpolation of gradient and momentum."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)


class SignSGD(optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.sign()


class Orthogonal(optim.Optimizer):
    """Whole-matrix: momentum, brought near an orthogonal matrix by Newton and Schulz's iteration; vectors follow plain SGD."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                update = state["momentum"].mul_(group["momentum"]).add_(p.grad)
                p.add_(self.orthogonal(update) if p.dim() >= 2 else update, alpha=-group["lr"])

    @staticmethod
    def orthogonal(matrix: Tensor) -> Tensor:
        x = matrix.flatten(1) / (matrix.norm() + 1e-3)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x.reshape(matrix.shape)


class Shampoo(optim.Optimizer):
    """Preconditioners of the rows and columns of each matrix, kept as states of another shape."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.reshape(p.shape[0], -1) if p.dim() else p.grad.reshape(1, 1), self.state[p]
                if not state:
                    state["left"], state["right"] = torch.eye(grad.shape[0]), torch.eye(grad.shape[1])
                state["left"] += grad @ grad.T
                state["right"] += grad.T @ grad
                update = torch.linalg.solve(state["left"], grad) @ torch.linalg.inv(state["right"])
                p.sub_(update.reshape(p.shape), alpha=group["lr"])


class Trusted(optim.Optimizer):
    """LARS: each parameter's rate follows the ratio of its norm to its gradient's."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                ratio = p.norm() / (p.grad.norm() + 0.1)
                centred = p.grad - p.grad.mean()
                p.add_(centred * ratio.clamp(max=2.0), alpha=-group["lr"])


class Factored(optim.Optimizer):
    """Second moments of rows and columns; the update clipped by its root mean square, as Adafactor does it."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square, state = p.grad.square() + 1e-4, self.state[p]
                if p.dim() < 2:
                    update = p.grad / square.mean().sqrt()
                else:
                    if "row" not in state:
                        state["row"], state["column"] = torch.zeros(p.shape[:-1]), torch.zeros_like(p[..., 0, :])
                    row = state["row"].lerp_(square.mean(-1), 0.2)
                    column = state["column"].lerp_(square.mean(-2), 0.2)
                    scale = row.unsqueeze(-1) * column.unsqueeze(-2) / row.mean(-1, keepdim=True).unsqueeze(-1)
                    update = p.grad * scale.rsqrt()
                p.sub_(update / (update.square().mean().sqrt()).clamp(min=1.0), alpha=group["lr"])


Options = dict[str, Callable[[Draw, tuple[int, ...]], Any]]
DECAY, YES = pick(0.0, 0.1), pick(False, True)

OPTIMIZERS: dict[str, tuple[Callable[..., optim.Optimizer], Options]] = {
    "SGD": (optim.SGD, {"momentum": pick(0.0, 0.9), "weight_decay": DECAY, "maximize": YES}),
    "Nesterov": (optim.SGD, {"momentum": pick(0.9), "nesterov": pick(True), "foreach": YES}),
    "Adam": (optim.Adam, {"weight_decay": DECAY, "amsgrad": YES, "foreach": pick(None, True, False)}),
    "AdamW": (optim.AdamW, {"amsgrad": YES, "fused": pick(None, True), "betas": pick((0.9, 0.999), (0.5, 0.8))}),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": YES, "weight_decay": DECAY}),
    "RAdam": (optim.RAdam, {"weight_decay": DECAY}),
    "Adamax": (optim.Adamax, {"weight_decay": DECAY}),
    "Adadelta": (optim.Adadelta, {"rho": pick(0.9, 0.5)}),
    "Adagrad": (optim.Adagrad, {"lr_decay": pick(0.0, 0.1), "initial_accumulator_value": pick(0.1)}),
    "RMSprop": (optim.RMSprop, {"centered": YES, "momentum": pick(0.0, 0.9), "weight_decay": DECAY}),
    "Rprop": (optim.Rprop, {"etas": pick((0.5, 1.2), (0.7, 1.1))}),
    "ASGD": (optim.ASGD, {"t0": pick(1, 1000000), "weight_decay": DECAY}),
    "Adafactor": (optim.Adafactor, {"weight_decay": DECAY}),
    "Lion": (Lion, {"weight_decay": DECAY}),
    "SignSGD": (SignSGD, {}),
    "Orthogonal": (Orthogonal, {"momentum": pick(0.9, 0.5)}),
    "Shampoo": (Shampoo, {}),
    "Trusted": (Trusted, {}),
    "Factored": (Factored, {}),
}


def build(name: str, params: list[nn.Parameter], options: dict[str, Any], groups: bool) -> optim.Optimizer:
    """The optimizer over all parameters; in two groups with different rates with `groups`."""
    kind, _ = OPTIMIZERS[name]
    if not groups or len(params) < 2:
        return kind(params, lr=0.02, **options)
    half = len(params) // 2
    return kind([{"params": params[:half]}, {"params": params[half:], "lr": 0.005}], lr=0.02, **options)


def draw_options(draw: Draw, name: str) -> dict[str, Any]:
    """Options as drawn, without those that are torch's defaults anyway."""
    found = {key: option(draw, ()) for key, option in OPTIMIZERS[name][1].items()}
    return {key: value for key, value in found.items() if value not in (None, False, 0.0)}


NAMES = st.sampled_from(
    ["SGD"] * len(OPTIMIZERS) + list(OPTIMIZERS)
)  # the rest costs time, and finds the same in the model
