"""LocalGraph: the program of one rank, as the partitioner writes it and as passes rewrite it.

Placeholders are those of the step graph, in the same order, followed by `settle` where there is more than one rank. A stored tensor
(parameter, buffer, optimizer state) comes in as its persistent buffer, padded to the common chunk, and is updated in place by `copy_` nodes; user
inputs and gradients come in as the rank's own part. The output tuple has one element for each output of the step: the rank's part
of a user output, gradient or newly made state, a constant, or None for what was stored in place.

Node metadata beside the step graph's: `collective` (a Collective, on the node that starts one), `layouts` (per output tensor, one layout a mesh axis).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.fx as fx
from torch.fx.node import has_side_effect

from spmd.graph.provenance import Source
from spmd.graph.step import StepGraph

if TYPE_CHECKING:
    from spmd.sharding.layout import Layout

Layouts = tuple["Layout", ...]  # one a mesh axis, in mesh order


@dataclass(frozen=True)
class Collective:
    """What one collective is for. Passes and reports go by this, never by the structure of the graph."""

    role: str  # "param_gather", "state_gather", "grad_reduce", "value"
    op: str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
    axis: int  # mesh axis
    value: str  # name of the step graph's node that is moved
    fqn: str  # parameter it belongs to, "" otherwise
    nbytes: int  # bytes of the whole tensor
    before: str  # layout
    after: str
    reason: str  # the consumer that asked, in words
    source: Source | None = None  # the user's line
    across: str = ""  # how it lies along the mesh axes before its own
    members: tuple[Collective, ...] = ()  # those that a bucket stands for

    @property
    def tensor(self) -> str:
        """What it moves: a parameter's FQN or a node's name; the first of a bucket and how many more."""
        return (self.fqn or self.value) + (f" and {len(self.members) - 1} more" if self.members else "")


@has_side_effect
def settle(wait: Callable[[], None]) -> None:
    """Wait until all ranks are known to run this program with this batch. Stands before the first node that another rank or the generator could notice."""
    wait()


@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    name: str
    seconds: float
    nodes: tuple[int, int]  # before, after
    collectives: tuple[int, int]
    digest: str  # of the program after it, equal on all ranks
    diff: str = ""  # of the program's text, where it was asked for


@dataclass
class LocalGraph:
    """One rank's program."""

    module: fx.GraphModule
    step: StepGraph
    inputs: tuple[Layouts | None, ...]  # layouts of step.inputs; None for numbers
    outputs: tuple[Layouts | None, ...]  # layouts of step.outputs; None for constants and numbers
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]  # this rank's place in the mesh
    fallbacks: list[Any] = field(default_factory=list)  # ops that ran on replicated inputs for want of a rule
    reasons: Mapping[str, str] = field(default_factory=dict)  # why an input lies as it does, where its mode has chosen
    history: list[PassRecord] = field(default_factory=list)  # the passes that it has been through

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def collectives(self) -> list[Collective]:
        """Every collective, in program order."""
        return [n.meta["collective"] for n in self.graph.nodes if "collective" in n.meta]

    def __str__(self) -> str:
        from spmd.graph.text import program_text

        return program_text(self)
