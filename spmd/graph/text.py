"""Programs as readable text: one line a node, `name: dtype[shape] layout = op(args)  # source`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from spmd._torch import OpOverload
from spmd.graph.provenance import source_of

if TYPE_CHECKING:
    from spmd.graph.local import LocalGraph
    from spmd.graph.step import StepGraph

SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
    torch.uint8: "u8",
}


def program_text(graph: StepGraph | LocalGraph) -> str:
    """The whole program, inputs first."""
    lines = []
    step: Any = getattr(graph, "step", graph)
    names = [f"{spec.role}: {spec.name}" for spec in step.inputs]
    for i, node in enumerate(graph.graph.nodes):
        lines.append(node_text(node, names[i] if node.op == "placeholder" and i < len(names) else None))
    return "\n".join(lines)


def node_text(node: fx.Node, comment: str | None = None) -> str:
    """One line for one node."""
    if node.op == "output":
        return f"return {format_arg(node.args[0], {})}"
    layouts = node.meta.get("layouts")
    typed = f"{node.name}: {value_text(node.meta.get('val'))}" + (
        " " + ",".join(map(str, layouts)) if layouts and None not in layouts else ""
    )
    if node.op == "placeholder":
        return typed + (f"  # {comment}" if comment else "")
    notes = [source.short] if (source := source_of(node)) else []
    if note := node.meta.get("collective"):
        notes.append(f"{note.role} {note.tensor} {note.before}->{note.after}")
    return f"{typed} = {target_text(node.target)}({args_text(node, {})})" + (f"  # {'; '.join(notes)}" if notes else "")


def target_text(target: Any) -> str:
    """What a node calls, by a name that's the same in every process."""
    return str(target) if isinstance(target, (OpOverload, str)) else getattr(target, "__name__", str(target))


def value_text(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{SHORT.get(val.dtype, str(val.dtype).removeprefix('torch.'))}[{','.join(map(str, val.shape))}]"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(map(value_text, val))})"
    return "-" if val is None else type(val).__name__.removeprefix("Sym").lower()


def args_text(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The arguments of a call; `names` gives nodes another name than their own."""
    parts = [format_arg(a, names) for a in node.args] + [f"{k}={format_arg(v, names)}" for k, v in node.kwargs.items()]
    return ", ".join(parts)


def format_arg(a: Any, names: Mapping[fx.Node, str]) -> str:
    """An argument as text that's the same on every rank: numbers that differ stand as formulas of the rank."""
    if isinstance(a, fx.Node):
        return names.get(a, a.name)
    if isinstance(a, (tuple, list)):
        return f"[{', '.join(format_arg(x, names) for x in a)}]"
    return getattr(a, "formula", None) or str(a)


def digest(lines: Iterable[str]) -> str:
    """A short name of a text."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def fingerprint_lines(graph: LocalGraph) -> list[str]:
    """The program of a rank, one line a node, equal on all ranks that run the same program: no local shapes, no group names."""
    step = graph.step
    placeholders = graph.graph.find_nodes(op="placeholder", sort=True)
    names = {node: spec.name for node, spec in zip(placeholders, step.inputs, strict=False)}
    lines = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            continue
        args = args_text(node, names)
        if note := node.meta.get("collective"):
            args = ", ".join(
                format_arg(a, names) for a in node.args[:-1]
            )  # the last names the group, which ranks call differently
            args += f", axis {note.axis}, {note.role} of {note.tensor}"
        source = source_of(node)
        lines.append(f"{node.name} = {target_text(node.target)}({args})" + (f"  # {source}" if source else ""))
    inputs = zip(step.inputs, step.placeholders, graph.inputs, strict=True)
    lines += sorted(  # state that was there when the step was traced comes in another order than state that wasn't
        f"{spec.role} {spec.name}: {value_text(whole.meta['val'])} {', '.join(map(str, layouts or ()))}"
        for spec, whole, layouts in inputs
    )
    return lines
