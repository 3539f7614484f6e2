"""capture(): the whole train step as one StepGraph, with ties to the user's objects and guards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from spmd._torch import DTensor, GuardOnDataDependentSymNode, PythonReferenceAnalysis, sympy_interp
from spmd.capture.arguments import Arguments, batch_dims, flatten
from spmd.capture.effects import pretended, refuse, settle
from spmd.capture.fakes import pick_hint
from spmd.capture.finish import Finished, finish
from spmd.capture.guards import Guards
from spmd.capture.inputs import Entry, check_state, list_inputs
from spmd.capture.objects import Objects, discover, memory, successor
from spmd.capture.optim import check_supported
from spmd.capture.refuse import explain
from spmd.capture.result import Capture
from spmd.capture.sizes import note_varying_dims
from spmd.capture.stand_ins import Replacement, stand_ins
from spmd.capture.trace import Plan, Trace, Traced
from spmd.errors import InputError, Offence, SpmdError
from spmd.graph.step import Role, StepGraph


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dim: int = 0,
    replicated: tuple[str, ...] = (),
    global_batch: Callable[[int], int] = lambda local: local,
    lifted: frozenset[str] = frozenset(),
    replacements: Sequence[Replacement] = (),
) -> Capture:
    """Traces `fn(*args, **kwargs)` once, at the global batch, without changing any of the objects it works on.

    Args:
        fn: the undecorated step: a function, method or partial.
        args, kwargs: the arguments of the current call on this rank; tensors are its share of the batch.
        batch_dim: dim that carries the batch in every tensor argument that isn't 0-dim.
        replicated: paths of arguments that don't carry it, such as "batch.mask".
        global_batch: this rank's batch size -> the global one.
        lifted: names of Python numbers to read anew at each call, as `Changed.name` gives them. lr always is.
        replacements: (FQN, submodule) -> the module that's traced in its place; the first one that gives another counts.

    Returns:
        The capture. Its graph is symbolic in the global batch where that's exact, else static at this call's. HYPER outputs that are Python
        values are for the caller to put into `slot.container[slot.key]` of what they update.

    Raises:
        InputError, StateError, CaptureError, SideEffectError: nothing has run and nothing has changed.
    """
    return _Session(fn, args, dict(kwargs or {}), batch_dim, replicated, global_batch, lifted, replacements).run()


class _Session:
    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_dim: int,
        replicated: tuple[str, ...],
        global_batch: Callable[[int], int],
        lifted: frozenset[str],
        replacements: Sequence[Replacement],
    ) -> None:
        self.fn, self.lifted = fn, lifted
        self.objects: Objects = discover(fn, args, kwargs)
        self.arguments: Arguments = flatten(fn, args, kwargs)
        check_supported(self.objects.optimizers, self.objects.named)
        check_state(self.objects, self.arguments)
        self.stand_ins = stand_ins(self.objects, replacements)
        self.dims, self.local = batch_dims(self.arguments, batch_dim, replicated)
        self.batch = None if self.local is None else global_batch(self.local)

    def run(self) -> Capture:
        traced, finished = self._trace()
        self._check_aliases(finished)
        inputs = frozenset(s.input.name for s in finished.slots if s.input.role is Role.HYPER) - finished.specialised
        guards = Guards(self.objects, self.arguments, self.dims, inputs, finished.matters)
        return Capture(
            finished.step,
            finished.slots,
            self.objects.modules,
            self.objects.optimizers,
            guards,
            traced.out_spec,
            finished.init,
            finished.cleared,
        )

    def _trace(self) -> tuple[Traced, Finished]:
        """Symbolic in the batch if that holds at this call's batch, else static."""
        if self.batch is not None and self.batch > 1:
            try:
                plan = Plan(None, pick_hint(self.batch, self._sizes()))
                traced, finished = self._attempt(plan)
                if valid_at(finished.step, self.batch, traced):
                    return traced, finished
            except SpmdError:
                raise
            except Exception:
                pass
        try:
            traced, finished = self._attempt(Plan(self.batch, None))
        except Exception as error:
            raise explain(error, self.objects, self.local, self.batch, self._runs_at) from error
        if self.batch is not None and self.batch > 1:
            self._compare(finished.step)
        return traced, finished

    def _runs_at(self, batch: int) -> bool:
        try:
            self._attempt(Plan(batch, None))
        except Exception:
            return False
        return True

    def _compare(self, step: StepGraph) -> None:
        """A static trace doesn't know which dims carry the batch; a second one at another size tells, if the step takes the same path there."""
        assert self.batch is not None
        size = pick_hint(self.batch, self._sizes())
        try:
            _, twin = self._attempt(Plan(size, None))
        except Exception:
            return
        note_varying_dims(step.graph, twin.step.graph, self.batch, size)

    def _check_aliases(self, finished: Finished) -> None:
        """An argument that shares memory with what the step writes would change with it; the graph can't see that."""
        where = {memory(t.tensor): t.name for t in self.objects.tensors.values()}
        offences = []
        written = {o.name for o in finished.step.outputs if o.role is Role.USER and o.updates is not None}
        for path, leaf in zip(self.arguments.paths, self.arguments.leaves, strict=True):
            if (
                not isinstance(leaf, torch.Tensor)
                or isinstance(leaf, DTensor)
                or id(successor(leaf)) in self.objects.tensors
            ):
                continue
            pointer = memory(leaf)
            other = where.get(pointer) if pointer else None
            if other is not None and (other in self.objects.names() or {path, other} & written):
                offences.append(
                    Offence(
                        f"{path} shares memory with {other}, which the step writes",
                        remedy=f"pass a copy: {path}.clone()",
                    )
                )
            where.setdefault(pointer, path)
        if offences:
            raise InputError(offences)

    def _sizes(self) -> set[int]:
        tensors = [
            *(t.tensor for t in self.objects.tensors.values()),
            *(v for v in self.arguments.leaves if isinstance(v, torch.Tensor)),
        ]
        return {n for t in tensors for n in t.shape}

    def _attempt(self, plan: Plan) -> tuple[Traced, Finished]:
        """One trace; another by the capturable path for optimizers that branch on their step count, or with the numbers as inputs that the step changes."""
        with self.stand_ins.in_place():
            trace = Trace(self.fn, self.objects, self.arguments, self._entries(), plan)
        try:
            with self.stand_ins.in_place():
                traced = trace.run()
        except GuardOnDataDependentSymNode:
            stuck = {
                t.name
                for t in trace.optimizers
                if t.stepping and any("capturable" in g for g in t.optimizer.param_groups)
            }
            if not stuck - plan.capturable:
                raise
            return self._attempt(replace(plan, capturable=plan.capturable | stuck))
        if trace.unlifted - self.lifted:
            self.lifted |= trace.unlifted
            return self._attempt(plan)
        self._effects(trace, traced, plan)
        return traced, finish(traced)

    def _entries(self) -> list[Entry]:
        return list_inputs(self.objects, self.arguments, self.dims, self.lifted)

    def _effects(self, trace: Trace, traced: Traced, plan: Plan) -> None:
        """Refuses side effects, unless a second trace shows that they happen once only."""
        changes = trace.effects.changes
        if not changes:
            return
        if not all(c.settles for c in changes):
            refuse([c for c in changes if not c.is_tensor])
        with pretended(changes) as stand_ins, self.stand_ins.in_place():
            again = Trace(self.fn, self.objects, self.arguments, self._entries(), plan)
            second = again.run()
            reads_old = any(id(item.entry.value) in stand_ins for item in second.lifted)
            refuse([c for c in again.effects.changes if not c.is_tensor])
            if reads_old or str(second.module.graph) != str(traced.module.graph):
                refuse(changes)
        settle(changes)


def valid_at(step: StepGraph, batch: int, traced: Traced) -> bool:
    """Whether a symbolic graph holds at a global batch size: the symbol is free and every branch goes as traced."""
    symbol = traced.faker.batch.symbol if traced.faker.batch else None
    if symbol is None:
        return True
    if symbol in traced.faker.env.replacements:
        return False
    return guards_hold(step, batch)


def guards_hold(step: StepGraph, batch: int | None, numbers: Mapping[sympy.Symbol, float] | None = None) -> bool:
    """Whether the branches that the trace took go the same way at a global batch size, and at today's `numbers` where they're given.

    Conditions on symbols without a value (numbers of another call, values known only at run time) are passed over.
    """
    known: dict[Any, Any] = dict(numbers or {})
    if step.batch is not None and batch is not None:
        known[step.batch.symbol] = batch
    conditions = (g for g in step.guards if g.free_symbols and g.free_symbols <= known.keys())
    return all(sympy_interp(PythonReferenceAnalysis, known, g) for g in conditions)
