"""What wraps parts of a step: torch.func, checkpoints, autocast, torch.compile, loss scaling. Equal to eager, or refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import checkpoint as ckpt

from spmd.errors import CaptureError, SpmdError
from tests.replay import check, labelled, mlp, refused, train

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def per_sample(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss over the norm of each sample's own gradient, as in private training."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    return (F.cross_entropy(model(x), y, reduction="none") / norms).mean()


def without_saving(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(lambda t: 1 * t, lambda t: t):
        return F.cross_entropy(model(x), y)


EXACT: dict[str, Loss] = {
    "grad": lambda m, x, y: grad(lambda z: m(z).square().sum())(x).square().mean() + F.cross_entropy(m(x), y),
    "vmap": lambda m, x, y: F.cross_entropy(vmap(m)(x), y),
    "per sample": per_sample,
    "jacrev": lambda m, x, y: jacrev(lambda z: m(z).sum(0))(x).square().mean(),
    "jacfwd": lambda m, x, y: jacfwd(lambda z: m(z).sum(0))(x).square().mean(),
    "jvp": lambda m, x, y: jvp(m, (x,), (torch.ones_like(x),))[1].square().mean(),
    "vjp": lambda m, x, y: vjp(m, x)[1](torch.ones(x.shape[0], 5, dtype=x.dtype))[0].square().mean(),
    "hessian": lambda m, x, y: hessian(lambda z: m(z).square().sum())(x[0]).square().mean(),
    "hvp": lambda m, x, y: torch.autograd.functional.hvp(lambda z: m(z).square().sum(), x, x, create_graph=True)[1].square().mean(),
    "sequential": lambda m, x, y: F.cross_entropy(ckpt.checkpoint_sequential(m, 2, x, use_reentrant=False), y),
    "options": lambda m, x, y: F.cross_entropy(ckpt.checkpoint(m, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none"), y),
    "selective": lambda m, x, y: F.cross_entropy(ckpt.checkpoint(m, x, use_reentrant=False, context_fn=lambda: ckpt.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])), y),
    "nested": lambda m, x, y: F.cross_entropy(ckpt.checkpoint(lambda z: ckpt.checkpoint(m, z, use_reentrant=False), x, use_reentrant=False), y),
    "saved elsewhere": without_saving,
    "torch.compile": lambda m, x, y: F.cross_entropy(torch.compile(lambda z: m(z))(x), y),
    "categorical": lambda m, x, y: -torch.distributions.Categorical(logits=m(x)).log_prob(y).mean(),
    "normal": lambda m, x, y: torch.distributions.Normal(m(x), F.softplus(m(x))).rsample().square().mean(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("name", EXACT)
def test_equal_to_eager(name: str) -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = EXACT[name](model, x, y)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    model = mlp()
    check(step, model, torch.optim.SGD(model.parameters(), 0.1), labelled(), tolerance=1e-10, sizes=(6, 4))


def test_gradients_from_a_function_of_the_parameters() -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        params = dict(model.named_parameters())
        grads, loss = grad_and_value(lambda p: F.cross_entropy(functional_call(model, p, (x,)), y))(params)
        for name, p in params.items():
            p.grad = grads[name]
        optim.step()
        optim.zero_grad()
        return loss

    model = mlp()
    check(step, model, torch.optim.AdamW(model.parameters(), 1e-2), labelled())


def test_autocast_nested_and_switched_off_inside() -> None:
    def step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model[0](x)
            with torch.autocast("cpu", enabled=False):
                hidden = torch.tanh(hidden.float()) + model[0](x)
            with torch.autocast("cpu", torch.float16):
                out = model[2](hidden)
            loss = F.cross_entropy(out, y)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return out.detach()

    model = mlp(torch.float32)
    check(step, model, torch.optim.SGD(model.parameters(), 0.1), labelled(torch.float32), tolerance=1e-6)


@pytest.mark.parametrize("skip", [False, True])
def test_loss_scaling_by_hand(skip: bool) -> None:
    """Also with the update masked where a gradient isn't finite."""

    def step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        (loss * 1024).backward()
        finite = torch.stack([p.grad.isfinite().all() for p in model.parameters()]).all()
        for p in model.parameters():
            p.grad.div_(1024)
            if skip:
                p.grad = torch.where(finite, p.grad, 0.0)
        optim.step()
        optim.zero_grad()
        return loss.detach()

    model = mlp()
    check(step, model, torch.optim.AdamW(model.parameters(), 1e-2), labelled())


generator = torch.Generator().manual_seed(3)
scaler = torch.amp.GradScaler("cpu")


def anomalous(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.set_detect_anomaly(True):
        return model(x).sum()


REFUSED: dict[str, tuple[Loss, str]] = {
    "generator": (lambda m, x, y: torch.rand(5, generator=generator).sum() * m(x).sum(), "default generator"),
    "generator in place": (lambda m, x, y: torch.empty(5).normal_(generator=generator).sum() * m(x).sum(), "default generator"),
    "cond": (lambda m, x, y: torch.cond(x.sum() > 0, lambda z: m(z).sum(), lambda z: m(z).mean(), (x,)), "torch.where"),
    "while loop": (lambda m, x, y: while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 2), (torch.tensor(0), m(x)))[1].sum(), "torch.where"),
    "scan": (lambda m, x, y: scan(lambda c, t: (c + t, c * t), torch.zeros(5).double(), m(x))[1].sum(), "Python loop"),
    "map": (lambda m, x, y: map_rows(m, x).sum(), "torch.vmap"),
    "anomaly": (lambda m, x, y: anomalous(m, x), "check_nan=False"),
    "scaler": (lambda m, x, y: scaler.step(torch.optim.SGD(m.parameters(), 0.1)), "bfloat16 autocast"),
    "packed": (lambda m, x, y: m(nn.utils.rnn.pack_padded_sequence(x[:, :, None], torch.full((x.shape[0],), 8), True).data.view(-1, 8)).sum(), "mask"),
    "nested tensors": (lambda m, x, y: m(torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)).values().mean(), "pad the samples"),
    "numpy": (lambda m, x, y: m(x).sum() * float(x.numpy().sum()), "write it in torch"),
    "one hot": (lambda m, x, y: (m(x) * F.one_hot(y)).sum(), "F.one_hot(y, num_classes)"),
    "random state": (lambda m, x, y: torch.random.set_rng_state(torch.random.get_rng_state()), "draw outside the step"),
}  # fmt: skip


def test_gradients_that_are_searched_for_nans_are_refused_where_that_is_set_outside() -> None:
    with torch.autograd.set_detect_anomaly(True):
        refused(CaptureError, lambda m, o, x, y: m(x).sum(), "detect_anomaly", "undecorated")


def test_anomaly_detection_that_looks_at_no_values_is_fine() -> None:
    def step(model: nn.Module, optim: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return train(model, optim, x, y)

    model = mlp()
    check(step, model, torch.optim.SGD(model.parameters(), 1e-2), labelled())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line_and_the_remedy(name: str) -> None:
    loss, remedy = REFUSED[name]
    refused(SpmdError, lambda m, o, x, y: loss(m, x, y), remedy, "test_capture_transforms.py")
