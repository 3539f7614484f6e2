"""Where a node comes from: the user's line, the module, the phase of the step."""

from __future__ import annotations

import linecache
import os
from dataclasses import dataclass

import torch.fx as fx


@dataclass(frozen=True)
class Source:
    """A line of the user's program."""

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    @property
    def short(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.code}"


def source_of(node: fx.Node) -> Source | None:
    """The line that `node` was traced from."""
    return node.meta.get("source")


def where(node: fx.Node) -> str:
    """The line that `node` was traced from, as text for messages; empty if unknown."""
    return str(source_of(node) or "")


def step_name(node: fx.Node) -> str:
    """Name of the step's own node that `node` was made for, through all mesh axes that have been cut."""
    return node.meta.get("step", node.name)
