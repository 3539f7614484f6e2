"""The oracle: the undecorated step on one device over the global batch, against the compiled one on W ranks.

Outputs, parameters, gradients, buffers and optimizer states are compared by name after several steps in
float64: max|difference| <= tolerance * max(max|reference|, lr) per tensor.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from tests.oracle import world
from tests.oracle.case import Case, Parts, Share, argument_path

SEED = 7
STYLES = ("replicate", "fully_shard")

Compile = Callable[[Callable[..., Any], Case, str], Callable[..., Any]]


@dataclass
class Record:
    """What a run left behind, whole and by name."""

    outputs: list[list[Any]] = field(default_factory=list)  # by step, the flattened output
    stable: list[list[bool]] = field(default_factory=list)  # whether each output kept its value to the end
    state: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.1  # the floor of the metric; 0.1 where no optimizer says


def spmd_compile(step: Callable[..., Any], case: Case, style: str) -> Callable[..., Any]:
    """The compiler under test. Styles: one mode's, "a x b" for two axes, "a + tensor" for a plan that shares an axis, "dtensor"."""
    import spmd
    from spmd.modes import DataParallelMode, ParallelMode, TensorParallelMode, compose

    options: dict[str, Any] = {"input_batch_dim": case.dim, "replicated_inputs": case.replicated}
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def mode_of(kind: str, axis: Any = None) -> ParallelMode:
        if kind == "tensor":
            return TensorParallelMode(case.plan, axis=axis, **options)
        return DataParallelMode(kind, axis=axis, min_numel=20 if kind == "default" else None, **options)

    if style == "dtensor":
        mesh = init_device_mesh("cpu", (2, 2) if ranks == 4 else (ranks,)) if ranks > 1 else None
        return spmd.compile(step, parallel_mode=expand(case, mesh), mesh=mesh)
    if " " not in style:
        mesh = init_device_mesh("cpu", (2, ranks // 2)) if style == "hybrid_shard" else None
        return spmd.compile(step, parallel_mode=mode_of(style), mesh=mesh)
    parts = style.split(" x ")
    names = ("first", "second")[: len(parts)]
    mode = compose(*(mode_of(k, axis) for part, axis in zip(parts, names, strict=True) for k in part.split(" + ")))
    mesh = init_device_mesh("cpu", (2, ranks // 2) if len(parts) == 2 else (ranks,), mesh_dim_names=names)
    return spmd.compile(step, parallel_mode=mode, mesh=mesh)


def expand(case: Case, mesh: Any) -> Any:
    """Every matrix is split, over the axes of a larger mesh by different dims."""
    from spmd.modes import DTensorExpandMode, Schema

    if mesh is None:
        return DTensorExpandMode(input_batch_dim=case.dim)
    with torch.random.fork_rng():
        model, *others = case.build(0).models
    split = Schema(mesh, [Shard(i) for i in range(mesh.ndim)])
    inputs = dict.fromkeys(case.replicated, Schema(mesh, [Replicate()] * mesh.ndim))
    schemas = {name: split for name, p in model.named_parameters() if p.dim() > 1 and not others}
    return DTensorExpandMode(schemas, inputs, input_batch_dim=case.dim)


def shares(style: str, W: int) -> int:
    """Into how many shares the ranks cut the batch."""
    return 1 if style == "tensor" else 2 if style.endswith(" x tensor") else W


def check(name: str, style: str, W: int, samples: int | None = None, compile: Compile = spmd_compile) -> float:
    """Run a case of the table both ways, here on this rank of W, and compare. Returns the worst ratio to the tolerance.

    Raises:
        AssertionError: naming the tensors that differ, worst first.
    """
    from tests.oracle.cases import CASES

    return check_case(CASES[name] if samples is None else replace(CASES[name], samples=(samples,)), style, W, compile)


def check_case(case: Case, style: str, W: int, compile: Compile = spmd_compile) -> float:
    """`check` for a case that isn't in the table."""
    torch.set_default_dtype(torch.float64)
    copies = W // shares(style, W)
    W = shares(style, W)
    reference = run(case, W, None)
    made: list[Callable[..., Any]] = []

    def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
        made.append(compile(step, case, style))
        return made[0]

    worst = compare(reference, run(case, W, compiled, copies), case, W, copies)
    traces = getattr(made[0], "trace_count", 0)
    assert case.traces is None or traces <= case.traces, f"{traces} traces, at most {case.traces} expected"
    return worst


# ---- running


def run(case: Case, W: int, compiled: Callable[..., Any] | None, copies: int = 1) -> Record:
    """Run all the steps of a case on the global batch, or with `compiled` on this rank's share of it: one of W, each passed by `copies` ranks."""
    parts = case.build(SEED)
    batches = [global_batch(case, W, index) for index in range(case.steps)]
    step: Callable[..., Any] = case.step
    leading: tuple[Any, ...] = (*parts.models, *parts.optims)
    if case.closure:
        step, leading = step(*leading), ()
    names = argument_names(step, len(leading))
    if compiled is not None:
        step = compiled(step)
        batches = [share(batch, names, case, world.rank() // copies, W) for batch in batches]
    record = Record(lr=_largest_lr(parts))
    torch.manual_seed(SEED + 1)
    live: list[list[Any]] = []
    for index, batch in enumerate(batches):
        live.append(pytree.tree_leaves(step(*leading, *batch)))
        record.outputs.append([whole(leaf) for leaf in live[-1]])
        if parts.scheduler is not None:
            parts.scheduler.step()
        if case.between is not None:
            case.between(parts, index)
    record.stable = [
        [_kept(now, then) for now, then in zip(*pair, strict=True)] for pair in zip(live, record.outputs, strict=True)
    ]
    record.state = snapshot(parts)
    return record


def global_batch(case: Case, W: int, index: int) -> tuple[Any, ...]:
    """The arguments of step `index` over all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 + index)
        return case.batch(W * case.samples[index % len(case.samples)])


def argument_names(step: Callable[..., Any], skip: int) -> list[str]:
    return list(inspect.signature(step).parameters)[skip:]


def share(batch: tuple[Any, ...], names: list[str], case: Case, rank: int, W: int) -> tuple[Any, ...]:
    """Rank `rank`'s contiguous part of every tensor that carries the batch."""

    def part(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or argument_path(names, path) in case.replicated:
            return leaf
        return leaf.chunk(W, case.dim)[rank].clone()

    return pytree.tree_map_with_path(part, batch)


def whole(value: Any) -> Any:
    """A private copy of a value, gathered if it's a DTensor. Collective: every rank calls it in the same order."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def snapshot(parts: Parts) -> dict[str, Any]:
    """Everything the run could have changed, by name."""
    state: dict[str, Any] = {}
    fqns: dict[int, str] = {}
    for index, model in enumerate(parts.models):
        prefix = f"{index}." if len(parts.models) > 1 else ""
        for fqn, parameter in model.named_parameters(prefix.rstrip("."), remove_duplicate=False):
            tied = fqns.setdefault(id(parameter), fqn)
            state[f"parameter {fqn}"] = whole(parameter)
            state[f"tie {fqn}"] = tied
            state[f"trained {fqn}"] = (isinstance(parameter, nn.Parameter), parameter.requires_grad)
            state[f"gradient {fqn}"] = whole(parameter.grad)
        for fqn, buffer in model.named_buffers(prefix.rstrip("."), remove_duplicate=False):
            state[f"buffer {fqn}"] = whole(buffer)
    for number, optim in enumerate(parts.optims):
        for position, group in enumerate(optim.param_groups):
            state[f"members of group {number}.{position}"] = [
                fqns.get(id(p), "not in a model") for p in group["params"]
            ]
            for key, value in group.items():
                if key != "params":
                    state[f"group {number}.{position} {key}"] = whole(value)
        for owner, entries in optim.state.items():
            for key, value in entries.items():
                state[f"state {number} {fqns.get(id(owner), 'not in a model')} {key}"] = whole(value)
    return state


def _largest_lr(parts: Parts) -> float:
    rates = [float(group["lr"]) for optim in parts.optims for group in optim.param_groups]
    return max(rates, default=0.1)


def _kept(now: Any, then: Any) -> bool:
    if not isinstance(now, torch.Tensor) or isinstance(now, (nn.Parameter, DTensor)):
        return True
    return torch.equal(torch.nan_to_num(now), torch.nan_to_num(then))


# ---- comparing


def compare(reference: Record, record: Record, case: Case, W: int, copies: int = 1) -> float:
    """The worst difference over the tolerance of its tensor, at most 1.

    Raises:
        AssertionError: if it's more, or if names, shapes or types differ.
    """
    meeting = _Meeting(reference.lr, case.tolerance)
    for step, (expected_leaves, leaves) in enumerate(zip(reference.outputs, record.outputs, strict=True)):
        if len(expected_leaves) != len(leaves):
            meeting.complaints.append(f"step {step}: {len(leaves)} outputs, expected {len(expected_leaves)}")
            continue
        for index, (expected, found) in enumerate(zip(expected_leaves, leaves, strict=True)):
            dim = case.outputs[index] if index < len(case.outputs) else None
            meeting.meet(f"step {step} output {index}", _own(expected, dim, W, copies), found)
            if reference.stable[step][index] and not record.stable[step][index]:
                meeting.complaints.append(f"step {step} output {index}: changed after it was returned")
    meeting.meet_all(reference.state, record.state)
    return meeting.verdict(f"{case.name}, W={W}")


def compare_state(reference: Record, record: Record, tolerance: float = 1e-9) -> float:
    """`compare` for the states alone."""
    meeting = _Meeting(reference.lr, tolerance)
    meeting.meet_all(reference.state, record.state)
    return meeting.verdict("state")


class _Meeting:
    """Collects what differs between expected and found values."""

    def __init__(self, floor: float, tolerance: float) -> None:
        self.floor, self.tolerance = floor, tolerance
        self.ratios: dict[str, float] = {}
        self.complaints: list[str] = []

    def meet(self, name: str, expected: Any, found: Any) -> None:
        complaint = mismatch(expected, found)
        if complaint:
            self.complaints.append(f"{name}: {complaint}")
        elif isinstance(expected, torch.Tensor):
            self.ratios[name] = distance(expected, found, self.floor) / self.tolerance

    def meet_all(self, expected: dict[str, Any], found: dict[str, Any]) -> None:
        for name in sorted(expected.keys() | found.keys()):
            if name not in found or name not in expected:
                self.complaints.append(f"{name}: {'missing' if name in expected else 'unexpected'}")
            else:
                self.meet(name, expected[name], found[name])

    def verdict(self, title: str) -> float:
        worst = sorted(self.ratios.items(), key=lambda item: -item[1])
        complaints = [
            *self.complaints,
            *(f"{name}: {ratio:.3g} times the tolerance" for name, ratio in worst[:8] if ratio > 1),
        ]
        assert not complaints, f"{title}:\n" + "\n".join(complaints)
        return worst[0][1] if worst else 0.0


def _own(value: Any, dim: Share, W: int, copies: int) -> Any:
    return value if dim is None else value.chunk(W, dim)[world.rank() // copies]


def mismatch(expected: Any, found: Any) -> str | None:
    """Why two values can't be compared as numbers; None if they can, or are equal."""
    if isinstance(expected, torch.Tensor) != isinstance(found, torch.Tensor):
        return f"{_brief(found)}, expected {_brief(expected)}"
    if not isinstance(expected, torch.Tensor):
        same = expected == found or (isinstance(expected, float) and math.isclose(expected, found, rel_tol=1e-9))
        return None if same else f"{found!r}, expected {expected!r}"
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{_brief(found)}, expected {_brief(expected)}"
    return None


def distance(expected: torch.Tensor, found: torch.Tensor, floor: float) -> float:
    """max|difference| / max(max|reference|, floor); equal NaNs and infinities count as equal."""
    if expected.numel() == 0:
        return 0.0
    if not expected.dtype.is_floating_point and not expected.is_complex():
        return 0.0 if torch.equal(expected, found) else math.inf
    expected, found = expected.to(torch.complex128), found.to(torch.complex128)
    same = (expected == found) | (expected.isnan() & found.isnan())
    finite = expected.isfinite()
    if not (same | finite & found.isfinite()).all():
        return math.inf
    difference = torch.where(same, 0.0, expected - found).abs().max().item()
    scale = torch.where(finite, expected, 0.0).abs().max().item()
    return difference / max(scale, floor)


def _brief(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


@functools.cache
def has(package: str) -> bool:
    """Whether an optional package can be imported."""
    import importlib.util

    return importlib.util.find_spec(package) is not None
