"""What a step may do with gradients, data, hooks, closures, outputs: each would be a wrong program, were it not handled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmd.capture import capture
from spmd.graph.step import Role
from tests.replay import Replay, adamw, check, difference, labelled, mlp, train


def test_zero_grad_first_or_last_is_one_program() -> None:
    def first(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optim.step()
        return loss.detach()

    for step, cleared in ((first, False), (train, True)):
        model = mlp()
        optim = torch.optim.SGD(model.parameters(), 0.1)
        args = (model, optim, *labelled()(6))
        fresh = capture(step, args)
        step(*args)
        assert fresh.guards.check(step, args, {}) is None
        again = capture(step, args)
        assert str(fresh.step) == str(again.step)
        assert bool(fresh.cleared) is cleared
        assert [o.name for o in fresh.step.outputs if o.role is Role.GRADIENT] == (
            [] if cleared else [f"{n}.grad" for n, _ in model.named_parameters()]
        )


def test_gradients_accumulate_across_calls() -> None:
    def accumulate(model: nn.Module, optim: None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    model = mlp()
    args = (model, None, *labelled()(6))
    fresh = capture(accumulate, args)
    assert not [i for i in fresh.step.inputs if i.role is Role.GRADIENT]
    accumulate(*args)
    changed = fresh.guards.check(accumulate, args, {})
    assert changed and changed.name == "0.weight.grad"
    second = capture(accumulate, args)
    assert [i.name for i in second.step.inputs if i.role is Role.GRADIENT] == [
        f"{n}.grad" for n, _ in model.named_parameters()
    ]
    replay = Replay(second)
    replay(*args)
    accumulate(*args)
    for name, p in model.named_parameters():
        assert difference(replay.stored[f"{name}.grad"], p.grad) < 1e-12


@pytest.mark.parametrize("how", ["stack", "chunk"])
def test_micro_batches_mark_one_gradient(how: str) -> None:
    def micro(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for a, b in zip(x.chunk(3), y.chunk(3), strict=True) if how == "chunk" else [(x, y), (2 * x, y)]:
            loss = F.cross_entropy(model(a), b) / 3
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optim.step()
        optim.zero_grad()
        return losses

    model = mlp()
    captured = check(micro, model, adamw(model), labelled(), sizes=(6, 9, 6) if how == "chunk" else (6, 4, 6))
    marks = [n.meta["grad_of"] for n in captured.step.graph.nodes if "grad_of" in n.meta]
    assert sorted(marks) == sorted(n for n, _ in model.named_parameters())


def test_data_assignment_is_an_update() -> None:
    def clamp(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = train(model, optim, x, y)
        for p in model.parameters():
            p.data = p.data.clamp(-0.1, 0.1)
        return out

    model = mlp()
    check(clamp, model, adamw(model), labelled())


def test_tensor_hooks_run() -> None:
    model = mlp()
    next(model.parameters()).register_hook(lambda g: 3 * g)

    def halve(p: torch.Tensor) -> None:
        p.grad.mul_(0.5)

    list(model.parameters())[1].register_post_accumulate_grad_hook(halve)
    check(train, model, torch.optim.SGD(model.parameters(), 0.1), labelled())


def test_tensors_closed_over() -> None:
    weights, model = torch.rand(5, dtype=torch.float64), mlp()
    model.table = torch.randn(16, dtype=torch.float64)  # a plain attribute, not a buffer
    first = model[0].weight

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (
            F.cross_entropy(model(x), y, weight=weights)
            + first.square().sum()
            + (model[0](x) * model.table).sum() * 0.01
        )
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    captured = check(step, model, torch.optim.SGD(model.parameters(), 0.1), labelled())
    outside = [s for s in captured.slots if s.input.role is Role.USER and s.leaf is None]
    assert {id(s.tensor) for s in outside} == {id(weights), id(model.table)}
    assert [s.input.name for s in outside if s.tensor is weights] == ["weights"]


def test_names_that_arguments_and_parameters_share() -> None:
    """The only module's parameters go by their own names, so others may have the same."""
    weight = torch.rand(3)

    def step(model: nn.Module, optim: None, bias: torch.Tensor) -> torch.Tensor:
        loss = (model(bias) * weight).square().sum()
        loss.backward()
        return loss.detach()

    captured = check(step, nn.Linear(5, 3).double(), None, lambda n: (torch.randn(n, 5).double(),))
    names = [x.name for x in captured.step.inputs]
    assert sorted(names) == ["bias", "bias (argument)", "weight", "weight (outside)"]


def test_everything_closed_over() -> None:
    model = mlp()
    optim = adamw(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return train(model, optim, x, y)

    captured = capture(step, labelled()(6))
    assert list(captured.modules) == ["model"] and list(captured.optimizers) == ["optim"]
    assert [i.name for i in captured.step.inputs if i.role is Role.USER] == ["x", "y"]


def test_an_input_written_to_is_an_output() -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return train(model, optim, x, y)

    model = mlp()
    captured = check(step, model, adamw(model), labelled())
    assert [o.name for o in captured.step.outputs if o.role is Role.USER and o.updates is not None] == ["x"]


def test_no_fake_tensor_is_left_behind() -> None:
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.last = nn.Linear(8, 5), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.a(x)
            return self.last

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model(x)
        loss = F.cross_entropy(model.last, y)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    model = Stash().double()
    capture(step, (model, adamw(model), *labelled()(6)))
    assert model.last is None and all(p.grad is None for p in model.parameters())


def test_double_backward() -> None:
    def penalty(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.cross_entropy(out, y) + grad.norm(dim=1).sub(1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    model = mlp()
    check(penalty, model, adamw(model), labelled())


def test_outputs() -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return {
            "loss": loss,
            "n": x.shape[0] * 2,
            "name": "a",
            "w": model[0].weight,
            "g": model[0].weight.grad,
            "item": loss.item(),
            "none": None,
        }

    model = mlp()
    captured = capture(step, (model, None, *labelled()(6)))
    by_name = dict(
        zip(
            ["loss", "n", "name", "w", "g", "item"],
            (o for o in captured.step.outputs if o.role is Role.USER),
            strict=False,
        )
    )
    assert by_name["w"].alias_of == "0.weight" and by_name["g"].grad_of == "0.weight"
    out = Replay(captured)(model, None, *labelled()(4))
    assert out["n"] == 8 and out["name"] == "a" and out["none"] is None and isinstance(out["item"], float)


def test_nested_arguments() -> None:
    def step(model: nn.Module, batch: dict[str, Any], scale: float) -> torch.Tensor:
        return (model(batch["x"]) * scale * batch["mask"]).sum() + batch["pair"][1].sum()

    batch = {
        "x": torch.randn(6, 8, dtype=torch.float64),
        "mask": torch.rand(5, dtype=torch.float64),
        "pair": [torch.ones(6), torch.ones(6)],
    }
    captured = capture(step, (mlp(), batch, 2.0), replicated=("batch.mask",))
    names = {i.name: i.batch_dim for i in captured.step.inputs if i.role is Role.USER}
    assert names == {"batch.x": 0, "batch.mask": None, "batch.pair[0]": 0, "batch.pair[1]": 0}


def test_two_models_and_two_optimizers() -> None:
    def gan(G: nn.Module, D: nn.Module, og: Any, od: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        od.zero_grad()
        fake = G(torch.randn(x.shape[0], 8, dtype=x.dtype))
        d = F.softplus(D(fake.detach())).mean() + F.softplus(-D(x)).mean()
        d.backward()
        od.step()
        og.zero_grad()
        g = F.softplus(-D(fake)).mean()
        g.backward()
        og.step()
        return d.detach(), g.detach()

    G, D = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, n)).double() for n in (8, 1))
    models = (G, D, adamw(G), adamw(D))
    captured = capture(gan, (*models, torch.randn(6, 8, dtype=torch.float64)))
    replay = Replay(captured)
    for size in (6, 4, 6):
        state = torch.get_rng_state()
        ours = replay(*models, torch.randn(size, 8, dtype=torch.float64))
        torch.set_rng_state(state)
        theirs = gan(*models, torch.randn(size, 8, dtype=torch.float64))
        assert max(map(difference, ours, theirs)) < 1e-12
        assert difference(replay.stored["G.0.weight"], G[0].weight) < 1e-12
