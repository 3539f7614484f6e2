"""Torch functions that behave otherwise while a step is traced. Each patch is undone at the end of the trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
import torch.utils.checkpoint as checkpoint
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from spmd._torch import (
    HigherOrderOperator,
    get_mkldnn_enabled,
    op_effects,
    set_mkldnn_enabled,
    symbolic_functions,
    torch_decompositions,
)
from spmd.capture.functions import counted_batches
from spmd.capture.provenance import Tracker
from spmd.capture.random import eager_dropout
from spmd.errors import CaptureError, Offence, SideEffectError

_SYMBOLIC = (torch.SymInt, torch.SymFloat)


@contextmanager
def patched(tracker: Tracker) -> Iterator[None]:
    """All of them."""
    with ExitStack() as stack:
        stack.enter_context(_checkpoint(tracker))
        stack.enter_context(_dropout())
        stack.enter_context(_rnn_dropout())
        stack.enter_context(_no_dist(tracker))
        stack.enter_context(_no_scheduler(tracker))
        stack.enter_context(_no_mkldnn())
        stack.enter_context(_effects(tracker))
        stack.enter_context(_no_higher_order(tracker))
        stack.enter_context(_no_anomaly_checks(tracker))
        stack.enter_context(_symbolic_math())
        stack.enter_context(counted_batches())
        stack.enter_context(replaced(GradScaler, step=_refuse_scaler(tracker, GradScaler.step)))
        stack.enter_context(replaced(AveragedModel, update_parameters=_update_average))
        yield


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """`owner.name = value` for each, undone at exit."""
    before = {k: getattr(owner, k) for k in attributes}
    for k, v in attributes.items():
        setattr(owner, k, v)
    try:
        yield
    finally:
        for k, v in before.items():
            setattr(owner, k, v)


@contextmanager
def _no_mkldnn() -> Iterator[None]:
    """mkldnn's LSTM needs a workspace that fakes don't have."""
    before = get_mkldnn_enabled()
    set_mkldnn_enabled(False)
    try:
        yield
    finally:
        set_mkldnn_enabled(before)


@contextmanager
def _symbolic_math() -> Iterator[None]:
    """`math.sqrt(1 - beta**step)` and the like would turn a number that is an input into a constant."""

    def either(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: symbolic(x) if isinstance(x, _SYMBOLIC) else plain(x)

    power = math.pow

    def either_power(x: Any, y: Any) -> Any:
        return x**y if isinstance(x, _SYMBOLIC) or isinstance(y, _SYMBOLIC) else power(x, y)

    with replaced(math, pow=either_power, **{k: either(getattr(math, k), f) for k, f in symbolic_functions.items()}):
        yield


def _update_average(self: AveragedModel, model: nn.Module) -> None:
    """`AveragedModel.update_parameters` without its branch on the number of updates so far: the first one is a copy."""

    def tensors(of: nn.Module, inside: nn.Module) -> list[torch.Tensor]:
        return [*inside.parameters(), *inside.buffers()] if self.use_buffers else list(of.parameters())

    averages, models = tensors(self, self.module), tensors(model, model)
    averages, models = [a.detach() for a in averages], [m.detach() for m in models]
    if self.multi_avg_fn is not None:
        news = [a.clone() for a in averages]
        for dtype in dict.fromkeys(a.dtype for a in news):
            these = [i for i, a in enumerate(news) if a.dtype == dtype]
            self.multi_avg_fn([news[i] for i in these], [models[i] for i in these], self.n_averaged)
    else:
        average = self.avg_fn or get_swa_avg_fn()
        news = [average(a, m, self.n_averaged) for a, m in zip(averages, models, strict=True)]
    for a, m, new in zip(averages, models, news, strict=True):
        a.copy_(torch.where(self.n_averaged == 0, m, new))
    if not self.use_buffers:
        for a, m in zip(self.module.buffers(), model.buffers(), strict=True):
            a.detach().copy_(m.detach())
    self.n_averaged += 1


@contextmanager
def _effects(tracker: Tracker) -> Iterator[None]:
    """The check behind `torch.linalg.inv` and others stays in the graph as a node without a result, which raises on every rank alike."""
    original = op_effects.has_effects

    def has_effects(op: Any) -> bool:
        if op is torch.ops.aten._linalg_check_errors.default or not original(op):
            return False
        what = f"{op} acts on something outside the graph"
        raise CaptureError(Offence(what, where=str(tracker.here() or ""), remedy="call it outside the step"))

    with replaced(op_effects, has_effects=has_effects):
        yield


@contextmanager
def _no_higher_order(tracker: Tracker) -> Iterator[None]:
    """Ops that take functions would be one node each, with graphs of their own inside that nobody has split."""
    original = HigherOrderOperator.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (remedy := _HIGHER_ORDER.get(self.name())) is None:
            return original(self, *args, **kwargs)
        what = f"torch's {self.name().removesuffix('_impl')} can't be captured: what it calls isn't part of the step's graph"
        raise CaptureError(Offence(what, where=str(tracker.here() or ""), remedy=remedy))

    with replaced(HigherOrderOperator, __call__=call):
        yield


_LOOP = "write it as a Python loop over a fixed count, which is unrolled"
_HIGHER_ORDER = {
    "cond": "compute both sides and choose with torch.where",
    "while_loop": f"{_LOOP}, with torch.where to keep what is done",
    "scan": _LOOP,
    "associative_scan": f'{_LOOP}, or call it with combine_mode="generic"',
    "map_impl": "call the function on the whole batch, or torch.vmap it",
}


@contextmanager
def _no_anomaly_checks(tracker: Tracker) -> Iterator[None]:
    """Anomaly detection looks for NaNs after each backward function: a branch on values."""
    original = torch.set_anomaly_enabled
    remedy = "run the undecorated step under it, or leave the check out: torch.autograd.detect_anomaly(check_nan=False)"

    def refuse(where: str) -> None:
        what = "torch.autograd.detect_anomaly looks for NaNs in every gradient, which is a branch on values"
        raise CaptureError(Offence(what, where=where, remedy=remedy))

    def enable(mode: bool, check_nan: bool = True) -> None:
        if mode and check_nan:
            refuse(str(tracker.here() or ""))
        original(mode, check_nan)

    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        refuse("")
    with replaced(torch, set_anomaly_enabled=enable):
        yield


@contextmanager
def _checkpoint(tracker: Tracker) -> Iterator[None]:
    """Activation checkpointing is a plain call whose region is noted on its nodes: recomputing while tracing would draw dropout again."""
    count = 0

    @contextmanager
    def region() -> Iterator[None]:
        nonlocal count
        count += 1
        outer, tracker.checkpoint = tracker.checkpoint, count
        before, recomputed = tracker.stored(), torch.is_grad_enabled()
        try:
            yield
        finally:
            tracker.checkpoint = outer
        written = [name for name, value in tracker.stored().items() if before.get(name, value) is not value]
        if written and recomputed:
            what = f"a checkpointed region writes to {', '.join(written)}; recomputing it would write again"
            remedy = "keep what writes (batch norm's running statistics, say) out of torch.utils.checkpoint"
            raise CaptureError(Offence(what, str(tracker.here() or ""), remedy=remedy))

    def without_reentry(fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with region():
            yield

    class WithReentry:
        @staticmethod
        def apply(fn: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            with region():
                return fn(*args)

    with replaced(checkpoint, _checkpoint_without_reentrant_generator=without_reentry, CheckpointFunction=WithReentry):
        yield


@contextmanager
def _dropout() -> Iterator[None]:
    """The Python dispatcher would make `native_dropout` of it, which rounds otherwise than eager on CPU in low precision."""
    op = torch.ops.aten.dropout.default
    before = dict(op.py_kernels)
    op.py_kernels.update(dict.fromkeys(before, eager_dropout))
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


@contextmanager
def _rnn_dropout() -> Iterator[None]:
    """torch 2.13's decomposition of LSTM, GRU and RNN loses the dropout between layers: it's given one layer at a time."""
    one_layer = torch_decompositions._rnn_helper

    def layers(
        x: Any,
        hidden: Any,
        params: Any,
        biases: bool,
        count: int,
        p: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer: Any,
    ) -> tuple[Any, list[Any]]:
        width = 2 if bidirectional else 1
        x, last = x.transpose(0, 1) if batch_first else x, []
        for i in range(count):
            if i and train and p:
                x = torch.dropout(x, p, True)
            part = slice(i * width, (i + 1) * width)
            x, h = one_layer(x, hidden[part], params[part], biases, 1, 0.0, train, bidirectional, False, layer)
            last += h
        return x.transpose(0, 1) if batch_first else x, last

    with replaced(torch_decompositions, _rnn_helper=layers):
        yield


@contextmanager
def _no_dist(tracker: Tracker) -> Iterator[None]:
    """The step says what one device does; ranks and collectives are what compiling adds."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            Offence(
                "the step uses torch.distributed (a rank, a world size or a collective)",
                where=str(tracker.here() or ""),
                remedy="write the step for one device over the whole batch, or read ranks outside it",
            )
        )

    with replaced(c10d, _rank_not_in_group=refuse):
        yield


@contextmanager
def _no_scheduler(tracker: Tracker) -> Iterator[None]:
    """A scheduler's step would run while tracing only."""
    with ExitStack() as stack:
        for cls in _subclasses(LRScheduler):
            if "step" in vars(cls):
                stack.enter_context(replaced(cls, step=_refuse_scheduler(tracker, cls.step)))
        yield


def _refuse_scheduler(tracker: Tracker, original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        raise SideEffectError(
            Offence(
                f"{type(self).__name__}.step() inside the step: the learning rate would change at the first call only",
                where=str(tracker.here() or ""),
                remedy="call scheduler.step() in the training loop, after the compiled step; the new lr is read at each call",
            )
        )

    return step


def _refuse_scaler(tracker: Tracker, original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return original(self, *args, **kwargs)
        raise CaptureError(
            Offence(
                "GradScaler skips the step where a gradient isn't finite, which is a branch on a value",
                where=str(tracker.here() or ""),
                remedy="use bfloat16 autocast without a scaler, or scale by hand and choose with torch.where",
            )
        )

    return step


def _subclasses(cls: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _subclasses(sub)
