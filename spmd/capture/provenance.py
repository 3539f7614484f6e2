"""Writes on each node, as it is made, where it comes from: phase, user's line, module, checkpoint region.

The Python frames are walked here, because torch keeps only frames named `forward`. Backward nodes take their forward's line and
module: the autograd engine gives both the same sequence number.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import spmd
from spmd._torch import MODULE_CALL, PythonKeyTracer, current_autograd_node, next_sequence_number
from spmd.capture.marks import node_of
from spmd.graph.provenance import Source
from spmd.graph.step import ENTERS, LEAVES

_STDLIB = sysconfig.get_paths()["stdlib"]
_SITE = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
_SPMD = tuple(str(Path(p).resolve()) for p in spmd.__path__)
_NOT_USER = (str(Path(torch.__file__).parent), *_SPMD, *spmd.__path__)


def is_user_file(file: str) -> bool:
    """Whether `file` is neither torch, nor spmd, nor Python's own library."""
    if file.startswith(_NOT_USER) or file.startswith("<frozen"):
        return False
    return not file.startswith(_STDLIB) or file.startswith(_SITE)


@dataclass
class Tracker:
    """What is going on right now, and what is written on the next node."""

    phase: str = ""  # "update" inside optimizer.step
    modules: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # id(module) -> FQN
    checkpoint: int = 0  # region of activation checkpointing, 0 outside
    stored: Callable[[], dict[str, torch.Tensor]] = dict  # what parameters, buffers and arguments hold now
    after_gradients: bool = False  # some parameter has its gradient
    _forward: dict[int, fx.Node] = field(default_factory=dict)  # sequence number -> first forward node
    _user: dict[CodeType, bool] = field(default_factory=dict)
    _sources: dict[tuple[CodeType, int], Source] = field(default_factory=dict)

    def write(self, node: fx.Node) -> None:
        """Provenance of a node that is being made."""
        meta, running = node.meta, current_autograd_node()
        source = self.here()
        meta["module"] = self.modules[-1] if self.modules else ""
        if running is None:
            meta["phase"] = self._phase_outside_backward()
            if meta["phase"] == "forward":
                self._forward.setdefault(next_sequence_number() - 1, node)
        else:
            meta["phase"] = "backward"
            forward = self._forward.get(running._sequence_nr())
            if forward is not None:
                source, meta["module"] = forward.meta.get("source", source), forward.meta["module"]
        if source is not None:
            meta["source"] = source
        if self.checkpoint and running is None:
            meta["checkpoint"] = self.checkpoint

    def border(self, module: nn.Module, key: str, values: Any) -> None:
        """Note on the nodes of a module's arguments or results which those are: by position, or by keyword."""
        name = self.names.get(id(module))
        places = (
            values.items()
            if isinstance(values, dict)
            else enumerate(values if isinstance(values, (tuple, list)) else (values,))
        )
        for place, value in places:
            if name is not None and isinstance(value, torch.Tensor) and (node := node_of(value)) is not None:
                node.meta[key] = (*node.meta.get(key, ()), (name, place))

    def _phase_outside_backward(self) -> str:
        if self.phase:
            return self.phase
        # Clipping, hand-written updates and averages run without grad, outside modules, once gradients exist.
        return "update" if self.after_gradients and not self.modules and not torch.is_grad_enabled() else "forward"

    def here(self) -> Source | None:
        """The innermost user line on the Python stack."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            user = self._user.get(code)
            if user is None:
                user = self._user[code] = is_user_file(code.co_filename)
            if user:
                return self._source(frame)
            frame = frame.f_back
        return None

    def _source(self, frame: FrameType) -> Source:
        code, line = frame.f_code, frame.f_lineno
        key = (code, line)
        found = self._sources.get(key)
        if found is None:
            found = self._sources[key] = Source(code.co_filename, line, code.co_qualname)
        return found


@contextmanager
def recording(tracker: Tracker) -> Iterator[None]:
    """Every node made inside carries provenance."""
    original: Callable[..., Any] = PythonKeyTracer.create_node
    original_call: Callable[..., Any] = getattr(nn.Module, MODULE_CALL)

    def create_node(self: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = original(self, *args, **kwargs)
        tracker.write(node)
        return node

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tracker.border(self, ENTERS, kwargs)  # of which hooks for all modules aren't told
        return original_call(self, *args, **kwargs)

    def enter(module: nn.Module, inputs: Any) -> None:
        tracker.modules.append(tracker.names.get(id(module), tracker.modules[-1] if tracker.modules else ""))
        tracker.border(module, ENTERS, inputs)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if tracker.modules:
            tracker.modules.pop()
        tracker.border(module, LEAVES, output)

    PythonKeyTracer.create_node = create_node  # type: ignore[method-assign]
    setattr(nn.Module, MODULE_CALL, call)
    hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        PythonKeyTracer.create_node = original  # type: ignore[method-assign]
        setattr(nn.Module, MODULE_CALL, original_call)
        for hook in hooks:
            hook.remove()


def user_line(error: BaseException) -> Source | None:
    """The innermost user line in an exception's traceback."""
    found, tb = None, error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if is_user_file(code.co_filename):
            found = Source(code.co_filename, tb.tb_lineno, code.co_qualname)
        tb = tb.tb_next
    return found
