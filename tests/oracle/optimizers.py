"""Optimizers as users write them: counters, lists and dicts in the state, numbers in the groups that the step itself changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Custom(Optimizer):
    """What these have in common: one update for each parameter that has a gradient."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": lr, **self.options(), **defaults})

    def options(self) -> dict[str, Any]:
        return {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.before(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def before(self, group: dict[str, Any]) -> None:
        pass

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Custom):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        p.mul_(1 - group["lr"] * 0.1)
        p.add_(
            torch.tanh(50 * state["momentum"].lerp(grad, 0.1)), alpha=-group["lr"]
        )  # sign, made smooth: no ties at 0
        state["momentum"].lerp_(grad, 0.01)


class CountingAdam(Custom):
    """The step count is a Python number."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if len(state) == 0:
            state["step"] = 0
            state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        state["first"].mul_(0.9).add_(grad, alpha=0.1)
        state["second"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        correction = math.sqrt(1 - 0.99 ** state["step"]) / (1 - 0.9 ** state["step"])
        p.addcdiv_(state["first"], state["second"].sqrt().add_(1e-8), value=-group["lr"] * correction)


class Lars(Custom):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = grad.add(p, alpha=0.01)
        trust = torch.where(p.norm() > 0, p.norm() / (grad.norm() + 1e-6), 1.0)
        buffer = state.setdefault("buffer", torch.zeros_like(p))
        buffer.mul_(0.9).add_(grad * trust)
        p.sub_(group["lr"] * buffer)


class Lamb(Custom):
    def options(self) -> dict[str, Any]:
        return {"betas": (0.9, 0.99), "step": torch.tensor(0.0)}

    def before(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        a, b = group["betas"]
        if not state:
            state.update(first=torch.zeros_like(p), second=torch.zeros_like(p))
        state["first"].lerp_(grad, 1 - a)
        state["second"].lerp_(grad.square(), 1 - b)
        first, second = state["first"] / (1 - a ** group["step"]), state["second"] / (1 - b ** group["step"])
        update = first / (second.sqrt() + 1e-6) + 0.01 * p
        p.sub_(group["lr"] * update * (p.norm().clamp(0, 10) / (update.norm() + 1e-6)))


class Muon(Custom):
    """Orthogonalises the momentum of matrices by Newton-Schulz; plain momentum for the rest."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        buffer = state.setdefault("buffer", torch.zeros_like(p))
        buffer.lerp_(grad, 0.05)
        update = grad.lerp(buffer, 0.95)
        if p.dim() == 2:
            update = self.orthogonal(update) * max(1, p.shape[0] / p.shape[1]) ** 0.5
        p.sub_(update, alpha=group["lr"])

    @staticmethod
    def orthogonal(x: Tensor) -> Tensor:
        turned = x.size(0) > x.size(1)
        x = x.T if turned else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x.T if turned else x


class Shampoo(Custom):
    """One preconditioner for each dim."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        for dim, size in enumerate(p.shape):
            matrix = state.setdefault(f"preconditioner_{dim}", torch.eye(size, dtype=p.dtype))
            flat = grad.movedim(dim, 0).reshape(size, -1)
            matrix.add_(flat @ flat.T)
            values, vectors = torch.linalg.eigh(matrix)
            root = vectors * values.pow(-1 / (2 * p.dim())) @ vectors.T
            grad = torch.tensordot(root, grad, ([1], [dim])).movedim(0, dim)
        p.sub_(group["lr"] * grad)


class Soap(Custom):
    """Adam in the eigenbases of Shampoo's preconditioners, which are turned at every second step."""

    def options(self) -> dict[str, Any]:
        return {"every": 2}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"], state["first"], state["second"] = 0, torch.zeros_like(p), torch.zeros_like(p)
            for dim, size in enumerate(p.shape):
                state[f"matrix_{dim}"] = torch.zeros(size, size, dtype=p.dtype)
                state[f"basis_{dim}"] = torch.eye(size, dtype=p.dtype)
        for dim, size in enumerate(p.shape):
            flat = grad.movedim(dim, 0).reshape(size, -1)
            state[f"matrix_{dim}"].lerp_(flat @ flat.T, 0.1)
        turned = self.turn(grad, state, back=False)
        state["first"].lerp_(turned, 0.1)
        state["second"].lerp_(turned.square(), 0.05)
        p.sub_(group["lr"] * self.turn(state["first"] / (state["second"].sqrt() + 1e-3), state, back=True))
        state["step"] += 1
        if state["step"] % group["every"] == 0:
            for dim, size in enumerate(p.shape):
                mixed = (state[f"matrix_{dim}"] + torch.eye(size, dtype=p.dtype)) @ state[f"basis_{dim}"]
                state[f"basis_{dim}"] = torch.linalg.qr(mixed).Q

    def turn(self, x: Tensor, state: dict[str, Any], back: bool) -> Tensor:
        for dim in range(x.dim()):
            basis = state[f"basis_{dim}"].T if back else state[f"basis_{dim}"]
            x = torch.tensordot(basis, x, ([0], [dim])).movedim(0, dim)
        return x


class ScheduleFree(Custom):
    """SGD without a schedule: the groups count steps and sum weights."""

    def options(self) -> dict[str, Any]:
        return {"k": 0, "weight_sum": 0.0, "scheduled_lr": 0.0}

    def before(self, group: dict[str, Any]) -> None:
        warm = min(1.0, (group["k"] + 1) / 3)
        group["scheduled_lr"] = group["lr"] * warm
        weight = group["scheduled_lr"] ** 2
        group["weight_sum"] += weight
        group["share"] = weight / group["weight_sum"]
        group["k"] += 1

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        z = state.setdefault("z", p.clone())
        p.lerp_(z, group["share"])
        p.add_(grad, alpha=group["scheduled_lr"] * (0.9 * (1 - group["share"]) - 1))
        z.sub_(grad, alpha=group["scheduled_lr"])


class Decaying(Custom):
    """Writes its own learning rate."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * grad)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.7


class Lookahead(Optimizer):
    """Wraps another optimizer; every second step it goes half the way from the slow weights, which lie in the state."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01, every: int = 2) -> None:
        self.inner = torch.optim.SGD(list(parameters), lr, momentum=0.9)
        super().__init__(self.inner.param_groups, {"lr": lr, "every": every, "count": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone())
        self.inner.step()
        for group in self.param_groups:
            group["count"] += 1
            if group["count"] % group["every"] == 0:
                for p in group["params"]:
                    p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class Sam(Optimizer):
    """Climbs to the worst point nearby, then steps from there: two forward and backward passes."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01, rho: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})
        self.inner = torch.optim.SGD(self.param_groups, lr, momentum=0.9)

    @torch.no_grad()
    def climb(self) -> None:
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in members]).norm()
        for p in members:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * self.param_groups[0]["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if "old" in self.state[p]:
                    p.copy_(self.state[p]["old"])
        self.inner.step()


def muon_and_adamw(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    """torch's Muon takes matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)
