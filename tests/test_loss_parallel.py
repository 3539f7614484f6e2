"""loss_parallel: cross entropy over classes in parts is torch's, and moves numbers a target only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.errors import PlacementError
from spmd.modes import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from tests.oracle.world import World

CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 1},
    "all ignored, summed": {"ignore_index": 1, "reduction": "sum", "labels": [1] * 6},
    "weights": {"weight": True},
    "everything": {"weight": True, "ignore_index": 1, "label_smoothing": 0.1},
    "smooth, none": {"label_smoothing": 0.3, "reduction": "none", "ignore_index": 1},
    "positions": {"shape": (3, 2), "weight": True},
    "no batch": {"shape": ()},
}


class Sizes(TorchDispatchMode):
    """Elements of each collective's input."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.sizes += [x.numel() for x in tensors]
        return func(*args, **(kwargs or {}))


def one(classes: int, given: dict[str, Any]) -> None:
    """One case: value, gradient, and what moves."""
    options = dict(given)
    shape, labels = options.pop("shape", (6,)), options.pop("labels", None)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    dim = 1 if shape else 0
    x = torch.randn(*shape[:1], classes, *shape[1:])
    y = torch.randint(0, classes, shape) if labels is None else torch.tensor(labels)
    if options.pop("weight", False):
        options["weight"] = torch.rand(classes)
    a = x.clone().requires_grad_()
    expected = F.cross_entropy(a, y, **options)
    scale = torch.rand(expected.shape)
    (expected * scale).sum().backward()
    b = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
    with Sizes() as moved:
        with loss_parallel():
            found = nn.CrossEntropyLoss(**options)(b, y)
        assert isinstance(found, DTensor) and found.placements == (Replicate(),)
        (found.to_local() * scale).sum().backward()
    assert moved.sizes == [y.numel(), (3 if "label_smoothing" in options else 2) * y.numel()]
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    assert b.grad is not None and b.grad.placements == b.placements
    torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-12, atol=1e-12)


def all_of_them(classes: tuple[int, ...]) -> None:
    torch.set_default_dtype(torch.float64)
    for n in classes:
        for name, given in CASES.items():
            try:
                one(n, given)
            except Exception as error:
                error.add_note(f"{name} over {n} classes")
                raise


@pytest.mark.parametrize(("W", "classes"), [(2, (12, 13)), (3, (13,)), (4, (13, 3))])
def test_it_is_torchs_loss(world: World, W: int, classes: tuple[int, ...]) -> None:
    world.run(all_of_them, W, classes)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13, bias=False))


def extremes() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with loss_parallel():
        x = torch.randn(4, 8)
        x[:, :4], x[0, 5] = -torch.inf, 200.0
        y = torch.tensor([5, 4, 6, 7])
        a, b = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        losses = F.cross_entropy(a, y), F.cross_entropy(b, y)  # a plain tensor goes to torch
        torch.testing.assert_close(losses[1].full_tensor(), losses[0])
        for loss in losses:
            loss.backward()
        assert a.grad is not None and b.grad is not None and a.grad.isfinite().all()
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)
        half = distribute_tensor(torch.randn(301, 8, dtype=torch.bfloat16), mesh, [Shard(1)])
        found = F.cross_entropy(half, many := torch.randint(0, 8, (301,)))  # bfloat16 can't count to 301
        exact = F.cross_entropy(half.full_tensor().double(), many)
        assert torch.equal(found.full_tensor(), exact.bfloat16())
        for label in (8, -3):
            with pytest.raises(RuntimeError, match="out of bounds"):
                F.cross_entropy(b, torch.tensor([0, 1, 2, label]))
        with pytest.raises(PlacementError, match="class probabilities"):
            F.cross_entropy(b, torch.rand(4, 8))
        with pytest.raises(ValueError, match=r"shape \[3\], the logits ask for \[4\]"):
            F.cross_entropy(b, y[:3])
        with pytest.raises(ValueError, match="label_smoothing is 2"):
            F.cross_entropy(b, y, label_smoothing=2)
        square = distribute_tensor(
            x, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), [Replicate(), Shard(1)]
        )
        with pytest.raises(PlacementError, match="on one axis"):
            F.cross_entropy(square, y)


def test_extremes_and_what_is_refused(world: World) -> None:
    world.run(extremes, 2)


def train(net: nn.Module, tokens: Tensor, loss_of: Any) -> list[Tensor]:
    """Two steps; losses and final parameters, whole."""
    optim = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        with loss_of():
            loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten(), ignore_index=2)
            loss.backward()  # torch's has to be within
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    found = [*losses, *(p.detach() for p in net.parameters())]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in found]


def with_a_model() -> None:
    from contextlib import nullcontext

    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    plan = {"0": RowwiseParallel(), "1": ColwiseParallel(use_local_output=False)}
    tokens = torch.randint(0, 13, (3, 4))
    expected = train(model(), tokens, nullcontext)
    for context in (loss_parallel, torchs.loss_parallel):
        found = train(parallelize_module(model(), mesh, plan), tokens, context)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_model_trains_with_it_and_with_torchs(world: World) -> None:
    world.run(with_a_model, 2)
