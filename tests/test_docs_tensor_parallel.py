"""The code of docs/tensor_parallel.md runs, and does what one device does."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import spmd
import spmd.modes
from tests.oracle import models
from tests.oracle.plans import Decoder
from tests.oracle.world import World

PAGE = Path(__file__).parent.parent / "docs/tensor_parallel.md"


def train_step(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    found: Any = model(tokens)
    logits = found if isinstance(found, Tensor) else found.logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach()


def equal(model: nn.Module, same: nn.Module) -> None:
    """Gradients, and a parameter that's in parts at least."""
    assert any(isinstance(p, DTensor) for p in model.parameters())
    for (fqn, p), q in zip(model.named_parameters(), same.parameters(), strict=True):
        assert p.grad is not None
        found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(found, q.grad, rtol=1e-9, atol=1e-12, msg=lambda m, fqn=fqn: f"{fqn}: {m}")


def page() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, gpt2 = Decoder(), models.transformers_model("gpt2").double().eval()
    compiled, whole, gpt2_compiled, gpt2_whole = map(copy.deepcopy, (model, model, gpt2, gpt2))
    tokens, labels = torch.randint(0, 13, (3, 6)), torch.randint(0, 13, (3, 6))
    names: dict[str, Any] = {
        **vars(torch.distributed.tensor), **vars(spmd.modes), "F": F, "spmd": spmd, "dataclass": __import__("dataclasses").dataclass,
        "mesh": init_device_mesh("cpu", (2,)), "train_step": train_step,
        "model": model, "gpt2": gpt2, "tokens": tokens, "labels": labels,
    }  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 3
    assert len(re.search(r"@dataclass.*?\n\n(?=\w)", blocks[2], re.S)[0].splitlines()) <= 20  # type: ignore[index]
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    expected = train_step(whole, tokens, labels)
    torch.testing.assert_close(names["loss"].full_tensor().detach(), expected)
    equal(model, whole)
    torch.testing.assert_close(names["compiled_step"](compiled, tokens, labels), expected)
    equal(compiled, whole)
    expected = train_step(gpt2_whole, tokens, labels)
    torch.testing.assert_close(train_step(gpt2, tokens, labels), expected)
    equal(gpt2, gpt2_whole)
    torch.testing.assert_close(names["gpt2_step"](gpt2_compiled, tokens, labels), expected)
    equal(gpt2_compiled, gpt2_whole)
    assert gpt2.transformer.h[0].mlp.c_fc.weight.placements == gpt2_compiled.transformer.h[0].mlp.c_fc.weight.placements


def test_the_page(world: World) -> None:
    world.run(page, 2)
