"""Plan: what propagation decides on one axis, for partition to carry out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from spmd.sharding.layout import Layout
from spmd.sharding.rule import Call, Rule


@dataclass
class Choice:
    """How one node runs."""

    call: Call
    rule: Rule | None
    wants: list[Layout | None]  # per tensor input; None: as it is
    outs: list[Layout]  # per leaf of the node's value


@dataclass
class Plan:
    """The layouts of every value on one axis."""

    world: int
    blocks: int | None = 1
    layouts: dict[fx.Node, Any] = field(
        default_factory=dict
    )  # Layout, or a nest of them for a node that yields several tensors
    choices: dict[fx.Node, Choice] = field(default_factory=dict)
    settled: dict[fx.Node, Layout] = field(
        default_factory=dict
    )  # values that are moved once, where they appear, and read so: partial gradients, and what a mode wants
    views: dict[fx.Node, fx.Node] = field(default_factory=dict)  # views: what they are of, whose gather they share
    roots: dict[fx.Node, fx.Node] = field(default_factory=dict)  # the same through casts: always a stored tensor
    outputs: list[Layout | None] = field(default_factory=list)
    fallbacks: list[fx.Node] = field(default_factory=list)  # ops without a rule that gathered something
