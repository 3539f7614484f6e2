"""Sink: the backward pass of propagation. What is replicated and only ever wanted in parts is computed in parts."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch.fx as fx

from spmd._torch import c10d_functional
from spmd.graph.step import StepGraph
from spmd.sharding.layout import Layout, R, Sharded
from spmd.sharding.plan import Choice, Plan
from spmd.sharding.rule import ROWS, Call, Rule, Transfer


def sink(step: StepGraph, plan: Plan) -> None:
    """Compute on the part what is replicated but only ever wanted as one part: zeros, masks, expands over the batch."""
    uses: dict[fx.Node, set[Any]] = {}
    for x, want in zip(step.results, plan.outputs, strict=True):
        if isinstance(x, fx.Node):
            uses.setdefault(x, set()).add(want)
    for node in reversed(step.graph.nodes):
        choice = plan.choices.get(node)
        if choice is None:
            if node.target is operator.getitem:
                uses.setdefault(node.args[0], set()).add("part")
            continue
        wanted = uses.get(node, set())
        if len(wanted) == 1 and len(choice.outs) == 1 and choice.outs[0] == R and node not in plan.settled:
            (target,) = wanted
            if isinstance(target, Sharded):
                lower(choice, target, plan)
        for x, w in zip(choice.call.tensors, choice.wants, strict=True):
            uses.setdefault(x, set()).add("any" if w is None else w)


def lower(choice: Choice, target: Sharded, plan: Plan) -> None:
    """Make a replicated choice yield `target`, where a rule allows it without moving anything."""
    rule, call = choice.rule, choice.call
    if rule is None or rule.whole or any(w is not None and w != R for w in choice.wants):
        return
    if call.target is c10d_functional.wait_tensor.default:  # what is on its way can't be cut
        return
    found: Transfer | None
    if all(labels is None for labels in rule.inputs):
        found = ([None] * len(rule.inputs), [target]) if rule.sizes else None
    elif rule.outputs[0] and rule.outputs[0][target.dim] == ROWS:
        found = [R if labels else None for labels in rule.inputs], [target]
    else:
        found = next(iter(inverse(call, rule, target, plan.world)), None)
    if found and all(w is None or plan.layouts[x] == R for x, w in zip(call.tensors, found[0], strict=True)):
        choice.wants, choice.outs = found
        plan.layouts[call.node] = target


def inverse(call: Call, rule: Rule, target: Sharded, world: int) -> Iterable[tuple[list[Layout | None], list[Layout]]]:
    """Transfers of `rule` that give exactly `target`."""
    for i, shape in enumerate(call.inputs):
        if rule.inputs[i] is None:
            continue
        for d, size in enumerate(shape):
            if math.prod((target.outer, target.n, target.inner)) == size:
                found = rule.transfer(i, Sharded(d, target.outer, target.n, target.inner), world)
                if found and found[1] == [target]:
                    yield found
