"""StepGraph: the whole train step as one functional graph over global tensors, with a typed role for each input and output.

Node metadata, set at capture and kept by everything after:
  val       the fake tensor (or tuple, or symbolic number) that the node yields
  phase     "forward", "backward" or "update"
  source    the user's line (provenance.Source)
  module    FQN of the module that ran it, "" outside modules
  enters, leaves  (module's FQN, place) for each call of a module of which the node is an argument or a result; its place or keyword
  grad_of   FQN of the parameter whose accumulated gradient the node is
  varies    after `at()`: how each dim of each tensor depends on the global batch, see `at`
  layouts, uneven  once the graph has been cut along other mesh axes: the layouts there, and dims whose size differs from rank to rank
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import sympy
import torch
import torch.fx as fx

ENTERS, LEAVES = "enters", "leaves"


class Role(StrEnum):
    """What an input or output of the step is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "optimizer state"
    GRADIENT = "gradient"  # a .grad that lives from one call to the next
    HYPER = "hyper-parameter"  # a Python number read anew at each call, e.g. lr
    RANDOM = "random state"  # the key of counter-based random numbers, another at each call
    USER = "user"


STORED = (Role.PARAMETER, Role.BUFFER, Role.STATE)  # roles whose tensors lie in persistent storage, updated in place


@dataclass(frozen=True)
class Input:
    """One placeholder. Names are unique within a graph."""

    role: Role
    name: str  # "layers.0.weight", "layers.0.weight.exp_avg", "optim.param_groups[0].lr", "batch.mask"
    root: str = ""  # name of the module or optimizer that holds it
    owner: str = ""  # STATE, GRADIENT: name of the parameter it belongs to
    key: str = ""  # STATE: its key in optimizer.state[parameter]
    batch_dim: int | None = None  # USER: the dim that carries the batch


@dataclass(frozen=True)
class Output:
    """One element of the output tuple."""

    role: Role
    name: str
    updates: int | None = None  # index of the input that it's the new value of
    alias_of: str = ""  # USER: name of the parameter or buffer that the user returns itself
    grad_of: str = ""  # USER: name of the parameter whose gradient it is

    @property
    def parameter(self) -> str:
        """Name of the parameter whose gradient it is; "" where it's none."""
        return self.grad_of or (self.name.removesuffix(".grad") if self.role is Role.GRADIENT else "")

    @property
    def owner(self) -> str:
        """STATE: name of the parameter it belongs to."""
        return self.name.rpartition(".")[0].rpartition("/")[2]


@dataclass(frozen=True)
class Batch:
    """The symbol of the global batch size and the size it was traced with. `hint` equals no other size of the step."""

    symbol: sympy.Symbol
    hint: int


@dataclass
class StepGraph:
    """The captured global program.

    `module.graph` holds one placeholder for each of `inputs`, in order, then the nodes, then one flat output tuple in the
    order of `outputs` (an element is a node or a Python constant). Everything is functional: no node writes to another's value.
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    batch: Batch | None = None  # None: static, or already at a concrete batch
    size: int | None = None  # the concrete global batch, after `at`
    guards: tuple[Any, ...] = field(
        default=(), repr=False
    )  # sympy conditions on batch and scalars under which the graph is valid
    shapes: dict[str, torch.Size] = field(default_factory=dict, repr=False)  # of inputs and outputs, whole; after `at`

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        return self.graph.find_nodes(op="placeholder", sort=True)

    @property
    def results(self) -> tuple[Any, ...]:
        """What the graph returns: nodes and constants, one for each of `outputs`."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def indices(self, *roles: Role) -> Iterator[int]:
        """Indices of the inputs with one of `roles`."""
        return (i for i, x in enumerate(self.inputs) if x.role in roles)

    def __str__(self) -> str:
        from spmd.graph.text import program_text

        return program_text(self)
