"""Holds a program to the oracle, and says how it failed.

The oracle runs twice, the second time with rounding errors added to its parameters, arguments and gradients: a program that these
alone change is no test of anything (a tie broken by a rounding error, the sign of a gradient that is zero), and is left out.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spmd.errors import SpmdError
from spmd.modes import DataParallelMode
from tests.fuzz.program import Program
from tests.fuzz.ranks import Ranks
from tests.fuzz.rounding import Rounding, nudger
from tests.oracle.oracle import distance, mismatch

TOLERANCE = 1e-9
SHAKE = 1e-14  # the relative rounding error that the oracle's second run starts from
SHAKEN = 2e-11  # and how much of it may show
LARGE = 1e5
SMALL = 6  # elements of a parameter that "default" splits: weights do, most biases don't


@dataclass
class Finding:
    """What a check found. `kind` is "equal", "unfit", "refused", "crash" or "wrong"; only the last three are failures."""

    kind: str
    detail: str = ""
    fallbacks: Counter[str] = field(default_factory=Counter)  # ops without a rule that gathered their inputs
    gathers: int = 0  # gathers of what is neither a parameter nor a state

    @property
    def failed(self) -> bool:
        return self.kind in ("refused", "crash", "wrong")


@dataclass
class Run:
    """What a run leaves: outputs of each step, and the state by name."""

    outputs: list[list[Any]]
    state: Mapping[str, Tensor]


def check(program: Program) -> Finding:
    """The program on all ranks, in this process, against the plain step over the global batch."""
    torch.set_default_dtype(torch.float64)
    try:
        reference = plain(program)
        shaken = plain(program, SHAKE)
    except Exception as error:
        return Finding("unfit", f"{type(error).__name__}: {error}")
    finally:
        torch.set_default_dtype(torch.float32)
    if not sound(reference) or differences(reference, shaken, SHAKEN):
        return Finding("unfit", "ill-conditioned")
    torch.set_default_dtype(torch.float64)
    try:
        if program.counter:  # numbers that eager doesn't give: one rank has them as well
            alone = replace(program, world=1, samples=program.batch, style="replicate", passes="none")
            reference = run(alone, *ranks_of(alone))
        return compiled(program, reference)
    finally:
        torch.set_default_dtype(torch.float32)


def ranks_of(program: Program) -> tuple[Ranks, nn.Module, torch.optim.Optimizer]:
    model = program.model()
    optimizer = program.optim(model)
    mode = DataParallelMode(program.style, input_batch_dim=program.dim, min_numel=SMALL)
    share = [t.chunk(program.world, program.dim)[0] for t in program.arguments(program.batch, 100)]
    seed = 3 if program.counter else None
    args = (model, optimizer, *share)
    return Ranks(program.step(), args, mode, program.mesh, program.batch, program.passes, seed=seed), model, optimizer


def run(program: Program, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    torch.manual_seed(5)
    steps = range(program.steps)
    outputs = [ranks(model, optimizer, *program.arguments(program.batch, 100 + index))[0] for index in steps]
    return Run(outputs, ranks.state())


def compiled(program: Program, reference: Run) -> Finding:
    try:
        ranks, model, optimizer = ranks_of(program)
    except SpmdError as error:
        return Finding("refused", f"{type(error).__name__}: {error.offences[0]}\n{_cause(error)}")
    except Exception:
        return Finding("crash", traceback.format_exc(limit=-4))
    fallbacks = Counter(str(node.target) for node in ranks.programs[0].fallbacks)
    gathers = sum(c.role == "value" and c.op == "all_gather" for c in ranks.programs[0].collectives)
    try:
        found = run(program, ranks, model, optimizer)
    except Exception:
        return Finding("crash", traceback.format_exc(limit=-4), fallbacks, gathers)
    wrong = differences(reference, found, TOLERANCE)
    if wrong and any(differences(reference, plain(program, SHAKE, turn), SHAKEN) for turn in range(1, 9)):
        return Finding("unfit", "ill-conditioned", fallbacks, gathers)
    return Finding("wrong" if wrong else "equal", "\n".join(wrong), fallbacks, gathers)


def _cause(error: BaseException) -> str:
    cause = error.__cause__
    return "" if cause is None else "".join(traceback.format_exception(cause, limit=-6))


def plain(program: Program, shake: float = 0.0, turn: int = 0) -> Run:
    """The undecorated step, on one device over the global batch; with other rounding errors of about `shake`, others at each `turn`."""
    model = program.model()
    optimizer = program.optim(model)
    step = program.step()
    nudge = nudger(shake, turn) if shake else lambda x: x
    if shake:
        with torch.no_grad():
            for p in dict.fromkeys(model.parameters()):
                p.copy_(nudge(p))
                if p.requires_grad:
                    p.register_hook(nudge)
    outputs = []
    torch.manual_seed(5)
    for index in range(program.steps):
        x, y, k = program.arguments(program.batch, 100 + index)
        with Rounding(shake / 10, turn) if shake else nullcontext():
            result = pytree.tree_leaves(step(model, optimizer, nudge(x), nudge(y), k))
        outputs.append([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in result])
    return Run(outputs, state_of(model, optimizer))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names: dict[int, str] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        names.setdefault(id(tensor), name)
        state[name] = tensor.detach().clone()
        if tensor.grad is not None:
            state[f"{name}.grad"] = tensor.grad.clone()
    for p, entries in optimizer.state.items():
        state |= {f"{names[id(p)]}.{key}": v.clone() for key, v in entries.items() if isinstance(v, Tensor)}
    return state


def sound(run: Run) -> bool:
    tensors = [v for v in [*pytree.tree_leaves(run.outputs), *run.state.values()] if isinstance(v, Tensor)]
    return all(bool(t.isfinite().all()) and bool((t.abs() < LARGE).all()) for t in tensors)


def differences(expected: Run, found: Run, tolerance: float) -> list[str]:
    """The values that differ, worst first, relative to the tolerance of DESIGN section 9."""
    complaints, ratios = [], {}

    def meet(name: str, a: Any, b: Any) -> None:
        complaint = mismatch(a, b)
        if complaint:
            complaints.append(f"{name}: {complaint}")
        elif isinstance(a, Tensor):
            ratios[name] = distance(a, b, 0.02) / tolerance

    for step, (a, b) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        for index, pair in enumerate(zip(a, b, strict=True)):
            meet(f"step {step} output {index}", *pair)
    for name, tensor in expected.state.items():
        if name in found.state:
            meet(name, tensor, found.state[name])
        elif not name.endswith(".grad"):
            complaints.append(f"{name}: missing")
    worst = sorted(ratios.items(), key=lambda item: -item[1])
    return [*complaints, *(f"{name}: {ratio:.3g} times the tolerance" for name, ratio in worst[:5] if ratio > 1)]
