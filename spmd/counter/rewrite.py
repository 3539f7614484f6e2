"""A captured step whose random ops draw by counter.

`number` gives each random op of the captured step its number, and the step its key as an input; `rewrite`, at a concrete batch, puts draws in the ops'
places. Numbers are given at capture, so a batch size, a mode or a recomputed region changes none.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import FakeTensor, FakeTensorMode, OpOverload, tree_leaves
from spmd.capture.result import Capture, Slot
from spmd.counter import keys
from spmd.counter.draws import DRAWS, Draw
from spmd.errors import CaptureError, Offence
from spmd.graph.provenance import where
from spmd.graph.random import draws_numbers
from spmd.graph.step import Input, Role, StepGraph
from spmd.sharding.decompose import decompose

NUMBER = "draw"  # node.meta: the number of a random op


def number(captured: Capture, held: MutableMapping[str, torch.Tensor]) -> None:
    """Number the random ops of a fresh capture, and give it a key for each device that they draw on. `held` has the keys' tensors, by device.

    Raises:
        CaptureError: the step passes a generator of its own to an op.
    """
    step = captured.step
    drawing = [n for n in step.graph.nodes if n.op == "call_function" and draws_numbers(n)]
    own = [n for n in drawing if n.kwargs.get("generator") is not None]
    if own:
        remedy = 'leave the generator out, or compile with randomness="eager"'
        raise CaptureError(
            Offence(f"{n.target} draws from a generator of its own", where(n), remedy=remedy) for n in own
        )
    for i, node in enumerate(drawing):
        node.meta[NUMBER] = i
    for device in sorted({str(device_of(n)) for n in drawing}):
        held.setdefault(device, torch.zeros((), dtype=torch.int64, device=device))
        spec = Input(Role.RANDOM, f"random key on {device}", key=device)
        before = step.placeholders[-1:]
        with step.graph.inserting_after(before[0]) if before else step.graph.inserting_before():
            node = step.graph.placeholder(f"random_key_{device.replace(':', '_')}")
        with FakeTensorMode():
            node.meta["val"] = torch.empty((), dtype=torch.int64, device=device)
        step.inputs = (*step.inputs, spec)
        captured.slots = (*captured.slots, Slot(spec, container=held, key=device))
    step.module.recompile()


def rewrite(step: StepGraph) -> StepGraph:
    """`step`, at a concrete batch, with draws in the place of numbered ops. In place."""
    found = {
        spec.key: node for spec, node in zip(step.inputs, step.placeholders, strict=True) if spec.role is Role.RANDOM
    }
    for node in step.graph.nodes if found else ():
        if NUMBER in node.meta:
            place(step.graph, node, found[str(device_of(node))])
    if found:
        step.graph.eliminate_dead_code()
        step.module.recompile()
    return step


def place(graph: fx.Graph, node: fx.Node, key: fx.Node) -> None:
    """Put the draw of one random op in its place."""
    target: Any = node.target
    function = DRAWS.get(target._opname)
    plain = not any(isinstance(x.meta.get("val"), (torch.SymInt, torch.SymFloat)) for x in node.all_input_nodes)
    if function is not None and plain:
        like = tree_leaves(node.meta["val"])[0]

        def traced(*args: Any, **kwargs: Any) -> Any:
            draw = Draw(kwargs.pop("key"), node.meta[NUMBER], like)
            return function(draw, named(target, args, kwargs))

        node.kwargs = {**node.kwargs, "key": key}
        decompose(graph, node, traced)
    else:
        node.args = (key, node.meta[NUMBER], *node.args)
        node.target = Native(target)


def named(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, defaults included."""
    known = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return {**known, **dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}


def device_of(node: fx.Node) -> torch.device:
    return tree_leaves(node.meta["val"])[0].device


@dataclass(frozen=True)
class Native:
    """An op that draws by a method of its own, from a generator seeded for this draw: on the whole, and then cut. Called as op(key, number, ...)."""

    op: OpOverload

    @property
    def __name__(self) -> str:
        return self.op._opname

    @property
    def tags(self) -> list[torch.Tag]:
        return [torch.Tag.nondeterministic_seeded]

    def __call__(self, key: torch.Tensor, number: int, *args: Any, **kwargs: Any) -> Any:
        if isinstance(key, FakeTensor):
            return self.op(*args, **kwargs)
        seed = keys.streamed(int(key), number * keys.WORDS)
        devices = [] if key.device.type == "cpu" else [key.device]
        with torch.random.fork_rng(devices, device_type=key.device.type if devices else "cuda"):
            torch.manual_seed(seed)
            return self.op(*args, **kwargs)
