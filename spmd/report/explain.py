"""Explanation: what a compiled step will do, told before it runs: placements, collectives with their lines and reasons, fallbacks."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from spmd.cost import compute_seconds, device_of, link_of, seconds
from spmd.graph.local import Collective, LocalGraph, PassRecord
from spmd.graph.provenance import step_name, where
from spmd.graph.step import STORED
from spmd.sharding.layout import buffer_shape
from spmd.sharding.rule import Call
from spmd.sharding.sources import why_none


@dataclass(frozen=True)
class PlacedTensor:
    """An input of the step and how it lies on the mesh."""

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    nbytes: int  # on this rank, padding included
    reason: str = ""  # why it lies so, where its mode has chosen


@dataclass(frozen=True)
class Fallback:
    """An op that has no sharding rule: its inputs are replicated, which is exact and costs their gathers."""

    op: str
    source: str
    nbytes: int = 0  # of the tensors that are gathered for it, or for it and others
    reason: str = ""  # why it has no rule


@dataclass(frozen=True)
class Explanation:
    """What `CompiledStep.explain` returns; printing it shows tables."""

    placements: tuple[PlacedTensor, ...]
    collectives: tuple[Collective, ...]
    fallbacks: tuple[Fallback, ...]
    passes: tuple[PassRecord, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)  # of compute and of collectives, as spmd.cost models them: no forecast

    @classmethod
    def of(cls, local: LocalGraph) -> Explanation:
        return cls(
            tuple(placed(local)),
            tuple(local.collectives),
            tuple(Fallback(str(n.target), where(n), gathered(n, local), why_none(Call(n))) for n in local.fallbacks),
            tuple(local.history[1:]),  # the first is the graph as it was partitioned
            times(local),
        )

    def counts(self) -> Counter[str]:
        """Number of collectives by role."""
        return Counter(c.role for c in self.collectives)

    def __rich__(self) -> Group:
        stored = sum(p.nbytes for p in self.placements if p.role in {str(r) for r in STORED})
        moved = sum(c.nbytes for c in self.collectives)
        head = Text(
            f"at rest on this rank: {size(stored)} of parameters, buffers and states; collectives a step: {len(self.collectives)}, {size(moved)}"
        )
        compute, communication = (f"{1000 * t:.3g} ms" for t in self.seconds)
        model = Text(
            f"by the models of spmd.cost: compute {compute}, collectives {communication} if nothing hides them"
        )
        tables: list[Any] = [head, model, self.placement_table(), self.collective_table()]
        if self.fallbacks:
            tables.append(self.fallback_table())
        if self.passes:
            tables.append(self.pass_table())
        return Group(*tables)

    def placement_table(self) -> Table:
        told = any(p.reason for p in self.placements)
        columns = ["role", "tensor", "shape", "placement", "bytes here", *(["reason"] if told else [])]
        table = Table(*columns, title="placements", title_justify="left")
        for p in self.placements:
            shape = "x".join(map(str, p.shape)) or "scalar"
            table.add_row(p.role, p.name, shape, p.layout, size(p.nbytes), *([p.reason] if told else []))
        return table

    def collective_table(self) -> Table:
        table = Table(
            "role",
            "collective",
            "tensor",
            "move",
            "bytes",
            "line",
            "reason",
            title="collectives, in program order",
            title_justify="left",
        )
        for c in self.collectives:
            table.add_row(
                c.role,
                c.op,
                c.tensor,
                f"{c.before} -> {c.after}",
                size(c.nbytes),
                c.source.short if c.source else "",
                c.reason,
            )
        return table

    def fallback_table(self) -> Table:
        title = "ops without a sharding rule: run on replicated inputs (spmd.sharding.register_rule gives them one)"
        table = Table("op", "gathered", "line", "no rule because", title=title, title_justify="left")
        for f in self.fallbacks:
            table.add_row(f.op, size(f.nbytes), f.source, f.reason)
        return table

    def pass_table(self) -> Table:
        table = Table("pass", "seconds", "nodes", "collectives", title="passes", title_justify="left")
        for p in self.passes:
            arrows = (f"{before} -> {after}" for before, after in (p.nodes, p.collectives))
            table.add_row(p.name, f"{p.seconds:.2f}", *arrows)
        return table

    def __str__(self) -> str:
        return render(self)


def gathered(node: fx.Node, local: LocalGraph) -> int:
    """Bytes of the inputs of a node of the step that are moved; of a view, those of the tensor that it's a view of."""
    moved = {one.value: one.nbytes for c in local.collectives for one in (c.members or (c,))}
    total = 0
    for x in node.all_input_nodes:
        while (
            step_name(x) not in moved
            and (schema := getattr(x.target, "_schema", None))
            and schema.returns[0].alias_info
        ):
            x = x.all_input_nodes[0]
        total += moved.get(step_name(x), 0)
    return total


def times(local: LocalGraph) -> tuple[float, float]:
    """Modelled seconds of compute and of collectives on this rank."""
    kind = next((x.device.type for n in local.graph.nodes if isinstance(x := n.meta.get("val"), torch.Tensor)), "cpu")
    link = link_of(kind)
    moved = sum(seconds(c.op, c.nbytes, local.mesh_shape[c.axis], link) for c in local.collectives)
    return compute_seconds(local.graph, device_of(kind)), moved


def placed(local: LocalGraph) -> list[PlacedTensor]:
    rows = []
    for ph, spec, layouts in zip(local.step.placeholders, local.step.inputs, local.inputs, strict=True):
        val: Any = ph.meta["val"]
        if layouts is None or not isinstance(val, torch.Tensor):
            continue
        shape = buffer_shape(val.shape, layouts, local.mesh_shape, local.coordinate)
        nbytes = torch.Size(shape).numel() * val.element_size()
        rows.append(
            PlacedTensor(
                str(spec.role),
                spec.name,
                tuple(val.shape),
                val.dtype,
                ",".join(map(str, layouts)),
                nbytes,
                local.reasons.get(spec.name, ""),
            )
        )
    return rows


def render(x: Any, width: int = 160) -> str:
    """A rich object as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(x)
    return out.getvalue()


def size(n: int) -> str:
    """Bytes for people: 1536 -> '1.5 KB'."""
    value = float(n)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"
