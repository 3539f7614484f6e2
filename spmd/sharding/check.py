"""Holding a rule to real data: the op as it is partitioned, run on every rank's part, against the op on the whole."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from spmd._torch import (
    FakeTensorMode,
    OpOverloadPacket,
    resolve_overload,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from spmd.errors import Offence, PlacementError
from spmd.graph.axis import Axis
from spmd.graph.step import Input, Output, Role, StepGraph
from spmd.sharding.apart import Failed, run_apart
from spmd.sharding.example import same
from spmd.sharding.layout import Layout, Partial, R, Replicated, Sharded, join, shard, take
from spmd.sharding.partition import partition
from spmd.sharding.plan import Choice, Plan
from spmd.sharding.register import REDUCTIONS, Op, resolve
from spmd.sharding.rule import Call, Rule, Transfer
from spmd.sharding.sources import rule_for

Case = tuple[int, list[Layout], list[Layout]]  # ranks, layouts of the inputs, layouts of the outputs
WORLDS = (2, 3)
SECONDS = 60.0


def check_rule(op: Op, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Hold the rule of an op to real data: on 2 and 3 ranks, the op on parts, joined, gives what it gives on the whole.

    Args:
        op: as for `register_rule`.
        args, kwargs: what the op is called with. Take odd sizes, all unlike, and float64 where the op has it. It runs on the CPU, each case in a
            child process, since wrong shards can crash a kernel.

    Returns:
        What has been tried and holds, such as "2 ranks: S(0), R -> S(0)".
    Raises:
        PlacementError: the op has no rule, or its rule is wrong; every case that fails is listed.
    """
    call, tensors = example_call(op, args, kwargs)
    rule = rule_for(call)
    if rule is None:
        raise PlacementError(Offence(f"{call.target} has no rule for this call", remedy="register_rule gives it one"))
    tried: list[str] = []
    offences: list[Offence] = []
    for case in cases(call, rule):
        if offences and case[0] != WORLDS[0]:
            break  # more ranks would tell the same again
        try:
            wrong = run_apart(lambda case=case: complaint(call, rule, case, tensors), SECONDS)  # type: ignore[misc]
        except Failed as error:
            wrong = str(error)
        tried.append(title(case))
        if wrong:
            offences.append(
                Offence(f"{call.target}, {title(case)}: {wrong}", remedy="`_` keeps a dim from being split")
            )
    if offences:
        raise PlacementError(offences)
    return tuple(tried)


def title(case: Case) -> str:
    world, wants, outs = case
    return f"{world} ranks: {', '.join(map(str, wants))} -> {', '.join(map(str, outs))}"


def example_call(op: Op, args: Any, kwargs: Any) -> tuple[Call, list[torch.Tensor]]:
    """A call of `op` in a graph of its own, and its tensors."""
    key, _ = resolve(op)
    target: Any = torch.ops
    for part in key.split("."):
        target = getattr(target, part)
    leaves, tree = tree_flatten((args, kwargs))
    leaves = [x.detach().cpu() if isinstance(x, torch.Tensor) else x for x in leaves]
    args, kwargs = tree_unflatten(leaves, tree)
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, resolve_overload(target._qualified_op_name, *args, **kwargs))
    return call_of(target, args, kwargs)


def call_of(target: Any, args: Any, kwargs: Any) -> tuple[Call, list[torch.Tensor]]:
    """A call with real tensors as a node of a graph, and the tensors."""
    with torch.no_grad():
        value = target(*args, **kwargs)
    leaves, tree = tree_flatten((args, kwargs))
    fake, graph = FakeTensorMode(), fx.Graph()
    describe = lambda x: fake.from_tensor(x) if isinstance(x, torch.Tensor) else x  # noqa: E731

    def lift(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = describe(x)
        return node

    args, kwargs = tree_unflatten([lift(x) for x in leaves], tree)
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = tree_map(describe, value)
    return Call(node), [x for x in leaves if isinstance(x, torch.Tensor)]


def cases(call: Call, rule: Rule) -> Iterator[Case]:
    """Every way to run `call` in parts that `rule` allows: each dim of each input split plainly and inside a larger dim, each linear set."""
    for world in WORLDS:
        seen = set()
        for i, shape in enumerate(call.inputs):
            for s in (layout for d, n in enumerate(shape) for layout in shards(d, n, world)):
                found = rule.transfer(i, s, world) if rule.inputs[i] is not None and not rule.whole else None
                if found and str(found) not in seen and not local(found):
                    seen.add(str(found))
                    yield world, [w or R for w in found[0]], found[1]
        for group in rule.linear:
            if all(call.tensors[i].meta["val"].dtype.is_floating_point for i in group):
                yield (
                    world,
                    [Partial() if i in group else R for i in range(len(call.inputs))],
                    [Partial()] * len(call.values),
                )


def local(transfer: Transfer) -> bool:
    """Whether it gives each rank a value of its own, which isn't the whole's: statistics of its part of the batch."""
    return any(isinstance(x, Partial) and x.op not in REDUCTIONS for x in (*transfer[0], *transfer[1]))


def shards(d: int, size: int, world: int) -> Iterator[Sharded]:
    if size > 1:
        yield shard(d, size)
    for k in (2, 3):
        if size % k == 0 and size > k:
            yield Sharded(d, k, size // k, 1)
            yield Sharded(d, 1, size // k, k).canonical(world)


def complaint(call: Call, rule: Rule, case: Case, tensors: Sequence[torch.Tensor]) -> str:
    """How the joined parts differ from the whole; empty if they don't. Raises what the local programs raise."""
    world, wants, outs = case
    step, own = alone(call)
    given = iter(tensors)
    args, kwargs = map_arg((own.node.args, own.node.kwargs), lambda _: next(given))
    assert callable(call.target)
    expected = tree_leaves(call.target(*args, **kwargs), is_leaf=lambda x: x is None)
    plan = plan_of(step, own, rule, case)
    results = []
    partial = [x for x, layout in zip(tensors, wants, strict=True) if isinstance(layout, Partial)]
    for r in range(world):
        local = partition(step, plan, Axis(world, r, "0"))
        parts = [piece(x, layout, world, r) for x, layout in zip(tensors, wants, strict=True)]
        results.append(local.module(*parts, lambda: None))
    for q, (whole, layout) in enumerate(zip(expected, outs, strict=True)):
        if whole is None:
            continue
        pieces = [r[q] for r in results]
        if isinstance(layout, Replicated) and not all(same(p, whole) for p in pieces):
            return f"output {q} isn't the whole on every rank"
        summed = isinstance(layout, Partial) and whole.dtype != torch.bool
        scale = [*pieces, *partial] if summed else []  # what rounding is relative to
        if not same(join(pieces, layout).nan_to_num(), whole.nan_to_num(), *scale):
            return f"output {q}, joined as {layout}, isn't what the op gives on the whole"
    return ""


def alone(call: Call) -> tuple[StepGraph, Call]:
    """`call` as a step of its own, one input for each tensor."""
    graph = fx.Graph()
    inputs: list[Input] = []

    def lift(x: fx.Node) -> Any:
        val = x.meta["val"]
        if not isinstance(val, torch.Tensor):
            return 0.75  # a number of run time
        node = graph.placeholder(f"x{len(inputs)}")
        node.meta["val"] = val
        inputs.append(Input(Role.USER, node.name))
        return node

    args, kwargs = map_arg((call.node.args, call.node.kwargs), lift)
    assert callable(call.target)
    node = graph.call_function(call.target, args, kwargs)
    node.meta["val"] = call.node.meta["val"]
    results = elements(graph, node)
    graph.output(tuple(results))
    outputs = tuple(Output(Role.USER, f"y{q}") for q in range(len(results)))
    return StepGraph(fx.GraphModule(torch.nn.Module(), graph), tuple(inputs), outputs), Call(node)


def elements(graph: fx.Graph, node: fx.Node) -> list[fx.Node | None]:
    """What a node yields, one node for each tensor; None for what the op leaves out."""
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return [node]
    found: list[fx.Node | None] = []
    for q, element in enumerate(val):
        if element is None:
            found.append(None)
        else:
            item = graph.call_function(operator.getitem, (node, q))
            item.meta["val"] = element
            found += elements(graph, item)
    return found


def plan_of(step: StepGraph, call: Call, rule: Rule, case: Case) -> Plan:
    world, wants, outs = case
    plan = Plan(world)
    plan.layouts.update(zip(step.placeholders, wants, strict=True))
    plan.choices[call.node] = Choice(call, rule, list(wants), outs)
    _, tree = tree_flatten(call.node.meta["val"], is_leaf=lambda x: x is None)
    plan.layouts[call.node] = tree_unflatten(outs, tree)
    for item in step.graph.nodes:
        if item.target is operator.getitem:
            plan.layouts[item] = plan.layouts[item.args[0]][item.args[1]]
    plan.outputs = [out if isinstance(x, fx.Node) else None for x, out in zip(step.results, outs, strict=True)]
    return plan


def piece(x: torch.Tensor, layout: Layout, world: int, rank: int) -> torch.Tensor:
    """A rank's part; of a partial sum, summands that are all unlike the whole."""
    if isinstance(layout, Partial):
        noise = torch.Generator().manual_seed(3)
        first = [torch.randn(x.shape, generator=noise, dtype=torch.float64).to(x.dtype) for _ in range(world - 1)]
        return first[rank] if rank < world - 1 else x - sum(first)
    return take(x, layout, world, rank).contiguous()
