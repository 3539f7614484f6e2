"""Programs of one compiled function: which one a call runs, and how the ranks agree on it.

Each call finds a program whose guards hold. The program itself has the ranks vote, before anything that another rank or the
stored state would notice. If any rank has no program, all leave the call there and take the slow path together: every rank compiles what
it lacks, then they compare outcome, program and state, bind, and call again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import sympy
import torch
from torch.distributed.tensor import DTensor

from spmd.capture import Capture, Slot, capture, flatten_leaves, guards_hold
from spmd.counter.rewrite import number
from spmd.errors import CaptureError, Offence, StateError, VerifyError
from spmd.graph.local import LocalGraph
from spmd.graph.step import STORED, Role
from spmd.graph.text import fingerprint_lines
from spmd.modes import ParallelMode
from spmd.runtime.agreement import Agreement, Sync, Votes
from spmd.runtime.binding import Binding, placed
from spmd.runtime.counter import CounterDraws
from spmd.runtime.execute import Executor
from spmd.runtime.progress import Stages
from spmd.runtime.random import Draws
from spmd.runtime.vote import Elsewhere, Vote
from spmd.runtime.world import World

Read = Callable[[Sequence[Any]], Any]  # a value of the call, from its leaves
SIZES = 16  # batch sizes of one captured step whose programs are kept
LIMIT = 24  # programs of one function; more means that something changes at every call


@dataclass
class Program:
    """One program of this rank, for one captured step and one batch size."""

    captured: Capture
    local: LocalGraph
    init: LocalGraph | None = None  # makes the optimizer state that doesn't exist yet
    run: Executor | None = None
    key: int = 0  # digest of the programs of all ranks, once they have agreed

    def __post_init__(self) -> None:
        self.lines = fingerprint_lines(self.local)
        self.stages = [(record.name, record.digest) for record in self.local.history]
        later = sorted((c for c in self.local.collectives if c.axis), key=lambda c: c.axis)  # in program order on each
        self.moves = "; ".join(
            f"{c.op} of {', '.join(f'{x.tensor} {x.across}' for x in c.members or (c,))} on axis {c.axis}"
            for c in later
        )
        slots = self.captured.slots
        whole = [s for s in slots if s.input.role is Role.USER and s.input.batch_dim is None]
        self.shared = [(s.input.name, reader(s)) for s in whole]  # tensors that every rank must hold alike
        carriers = [s for s in slots if s.leaf is not None and s.input.batch_dim is not None]
        self.carriers = [(s.input.name, reader(s)) for s in carriers]
        self.numbers = [(s.input.name, reader(s)) for s in slots if s.input.role is Role.HYPER]

    def shared_inputs(self, leaves: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        return plain_tensors(self.shared, leaves)

    def share(self, leaves: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        """This rank's share of the batch."""
        return plain_tensors(self.carriers, leaves)

    def numbers_text(self, leaves: Sequence[Any]) -> str:
        """Today's hyper-parameters, to be compared over the ranks."""
        return ", ".join(f"{name} = {read(leaves)!r}" for name, read in self.numbers)


def plain_tensors(reads: Sequence[tuple[str, Read]], leaves: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    found = ((name, read(leaves)) for name, read in reads)
    return [(name, x) for name, x in found if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]


def reader(slot: Slot) -> Read:
    """How to read what is behind an input that no storage holds."""
    if slot.leaf is not None:
        return itemgetter(slot.leaf)
    container, key, tensor = slot.container, slot.key, slot.tensor
    return (lambda leaves: container[key]) if container is not None else (lambda leaves: tensor)


@dataclass
class Variant:
    """One captured step and its programs by global batch size."""

    captured: Capture
    programs: dict[int | None, Program] = field(default_factory=dict)
    binding: Binding | None = None  # once one of the programs has run

    def __post_init__(self) -> None:
        users = [s for s in self.captured.slots if s.leaf is not None and s.input.batch_dim is not None]
        self.served: tuple[Any, ...] | None = None  # batch and numbers for which the graph is known to hold
        branched = {symbol for guard in self.captured.step.guards for symbol in guard.free_symbols}
        self.numbers = [(symbol, read) for symbol, read in numbers(self.captured) if symbol in branched]
        self.carriers: list[tuple[Any, Any]] = [(s.leaf, s.input.batch_dim) for s in users]

    def local_batch(self, leaves: Sequence[Any]) -> int | None:
        """The batch size that the arguments of a call carry; None for none, -1 where they disagree."""
        sizes = {leaves[leaf].shape[dim] for leaf, dim in self.carriers}
        return None if not sizes else sizes.pop() if len(sizes) == 1 else -1

    def serves(self, batch: int | None, leaves: Sequence[Any]) -> bool:
        """Whether the captured graph is valid for a global batch of this size and for today's numbers."""
        step, today = self.captured.step, (batch, [read(leaves) for _, read in self.numbers])
        if today == self.served:
            return True
        if step.batch is None and step.size != batch:
            return False
        holds = guards_hold(step, batch, dict(zip((symbol for symbol, _ in self.numbers), today[1], strict=True)))
        self.served = today if holds else self.served
        return holds


def numbers(captured: Capture) -> Iterator[tuple[sympy.Symbol, Read]]:
    """The symbol of each number that is an input, and how to read it from the leaves of a call."""
    for slot, node in zip(captured.slots, captured.step.placeholders, strict=True):
        if isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat)):
            yield node.meta["val"].node.expr, reader(slot)


class Programs:
    def __init__(
        self,
        fn: Callable[..., Any],
        mode: ParallelMode,
        build: Callable[[Capture, int | None, World, Stages], Program],
        world: Callable[[], World],
        seed: int | None,
        sync: Sync,
        counter: CounterDraws | None = None,
    ) -> None:
        self.fn, self.mode, self.build, self.sync, self.seed = fn, mode, build, sync, seed
        self.counter = counter
        self._find_world = world
        self.world: World | None = None
        self.trace_count = 0
        self.reset()

    def reset(self) -> None:
        self.variants: list[Variant] = []
        self.lifted: frozenset[str] = frozenset()
        self.changes: Counter[str] = Counter()
        self._latest: Program | None = None

    @property
    def latest(self) -> Program:
        if self._latest is None:
            raise CaptureError(
                Offence(
                    "no program has been compiled yet",
                    remedy="call the step first, or pass arguments: step.program(model, optim, x, y)",
                )
            )
        return self._latest

    def _join(self) -> World:
        if self.world is None:
            self.world = self._find_world()
            splits = [mode.splits_batch for mode in self.mode.over(self.world.shape, self.world.names)]
            mine, self.shares = self.world.place(splits)
            self.copies = (mine, self.shares) if self.shares < self.world.size else None
            self.agreement = Agreement(self.world)
            self.draws = self.counter or Draws(self.agreement, self.seed)
        return self.world

    # ------------------------------------------------------------------------------------------------- a call

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        world = self._join()
        for _ in range(2):
            leaves, program = self._ready(args, kwargs)
            if program is not None and world.size == 1:
                return self._alone(program, leaves)
            if world.size > 1:
                try:
                    return self._voted(program, leaves)
                except Elsewhere:
                    pass
            self._compile(args, kwargs)
        raise VerifyError(f"the program compiled for this call doesn't fit it: {self._misfit(args, kwargs)}")

    def _misfit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        changed = self.variants[0].captured.guards.check(self.fn, args, kwargs)
        return str(changed or "a stored tensor isn't in its place")

    def _alone(self, program: Program, leaves: Sequence[Any]) -> Any:
        with self.draws.around():
            if self.draws.seeded:
                self.draws.settle(Votes((), ()))
            return self._start(program)(leaves)

    def _voted(self, program: Program | None, leaves: Sequence[Any]) -> Any:
        """Run `program`; within it the ranks vote, before anything that one of them would notice of another."""
        vote = Vote(self.agreement, self.draws, program, leaves, self.copies)
        if program is None:
            vote.settle()
            raise Elsewhere
        with self.draws.around():
            try:
                return self._start(program)(leaves, vote.settle)
            except Exception as error:  # whatever it is, the other ranks must hear of it
                vote.fail(error)

    def _start(self, program: Program) -> Executor:
        self._latest = program
        assert program.run is not None
        return program.run

    def _ready(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Program | None]:
        """The leaves of a call and the bound program that it can run."""
        try:
            leaves = flatten_leaves(args, kwargs)
            variant = self._variant(args, kwargs, leaves)
        except Exception:
            return (), None  # the slow path meets it again, and tells all ranks
        program = variant.programs.get(self._batch(variant, leaves)) if variant else None
        return leaves, program if program is not None and program.run is not None else None

    def _batch(self, variant: Variant, leaves: Sequence[Any]) -> int | None:
        """The global batch size of a call."""
        local = variant.local_batch(leaves)
        return None if local is None else local * self.shares

    def _variant(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> Variant | None:
        for variant in self.variants:
            if (
                variant.binding is not None and not variant.binding.check()
            ):  # takes in what was loaded or assigned since
                continue
            if variant.captured.guards.check(self.fn, args, kwargs) is None and variant.serves(
                self._batch(variant, leaves), leaves
            ):
                return variant
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state of the random numbers that are the step's own."""
        if self.counter is not None:
            return self.counter.state_dict()
        self._join()
        return self.draws.state_dict() if self.seed is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.counter is None:
            self._join()
        own = self.counter if self.counter is not None else self.draws if self.seed is not None else None
        expected = own.state_dict().keys() if own is not None else {}.keys()
        if state.keys() != expected:
            raise StateError(
                Offence(
                    f"the state of random numbers has {sorted(state)}, this step's has {sorted(expected)}",
                    remedy="compile with the same randomness=, and with seed= where it was given",
                )
            )
        if own is not None:
            own.load_state_dict(state)

    # ------------------------------------------------------------------------------------------------- compiling

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
        """The program for these arguments, not bound yet if it's new. Local to this rank."""
        self._join()
        return self._prepare(args, kwargs, Stages(f"spmd: {self._name}", show=False))[1]

    @property
    def _name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], stages: Stages) -> tuple[Variant, Program]:
        leaves = flatten_leaves(args, kwargs)
        variant = self._variant(args, kwargs, leaves)
        if variant is None:
            self._lift_what_changes(args, kwargs)
            with stages("trace"):
                captured = capture(
                    self.fn,
                    args,
                    kwargs,
                    batch_dim=self.mode.input_batch_dim,
                    replicated=self.mode.replicated_inputs,
                    global_batch=lambda local: local * self.shares,
                    lifted=self.lifted,
                    replacements=[override.replacement for override in self.mode.overrides],
                )
            if self.counter is not None:
                number(captured, self.counter.keys)
            self.trace_count += 1
            variant = Variant(captured)
            self.variants.insert(0, variant)
        batch = self._batch(variant, leaves)
        if batch not in variant.programs:
            while len(variant.programs) >= SIZES:
                variant.programs.pop(next(iter(variant.programs)))
            variant.programs[batch] = self.build(variant.captured, batch, self._join(), stages)
        return variant, variant.programs[batch]

    def _lift_what_changes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A number that has changed twice becomes an input."""
        if not self.variants:
            return
        changed = self.variants[0].captured.guards.check(self.fn, args, kwargs)
        if changed is not None:
            self.changes[changed.name] += 1
            if changed.liftable and self.changes[changed.name] > 1:
                self.lifted |= {changed.name}
        if len(self.variants) >= LIMIT:
            (name, times), *_ = self.changes.most_common(1) or [("the batch", 0)]
            raise CaptureError(
                Offence(
                    f"the step has been traced {len(self.variants)} times; {name} changed {times} times",
                    remedy="keep it constant, or pass it as a tensor",
                )
            )

    def _compile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The slow path: all ranks, in step."""
        world, agreement = self._join(), self.agreement
        stages = Stages(f"spmd: {self._name} compiled", show=world.rank == 0)
        variant, program, error = None, None, None
        try:
            variant, program = self._prepare(args, kwargs, stages)
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        size = program.local.step.size if program is not None else None
        share = (
            f"its share of the batch has {size // self.shares} samples" if size is not None else "it passes no batch"
        )
        agreement.resolve(error, share)
        assert variant is not None and program is not None
        with stages("agree"):
            program.key = agreement.same_program(program.lines, program.stages, program.moves)
            if self.counter is not None:
                self.counter.agree(agreement)
            new, unbound = agreement.begin([int(program.run is None), int(variant.binding is None)]).wait().high
            if unbound:
                agreement.same_state(self._plain_state(program), self.sync)
        if new:
            with stages("bind"):
                self._bind(variant, program, bool(unbound))
        stages.report()

    def _plain_state(self, program: Program) -> list[tuple[str, torch.Tensor | None]]:
        """Tensors that no compiled function holds yet: each rank has its own whole copy. None for the others."""
        stored = [s for s in program.captured.slots if s.input.role in STORED and s.tensor is not None]
        return [(s.input.name, s.tensor if placed(s.tensor) is None else None) for s in stored if s.tensor is not None]

    def _bind(self, variant: Variant, program: Program, unbound: bool) -> None:
        """Put the program on its storage. Every rank calls; `unbound`: some rank has no binding for it yet."""
        captured = variant.captured
        before = [(s.tensor, s) for s in captured.slots if s.tensor is not None]
        fresh = variant.binding is None
        with self._announced(unbound):
            variant.binding = variant.binding or Binding(captured, program.local.inputs, self._join())
        assert variant.binding is not None
        try:
            with self._announced(unbound):
                if fresh and program.init is not None:
                    Executor(program.init, variant.binding)()
        except Exception:
            variant.binding = None  # its states don't exist
            raise
        if fresh:
            captured.guards.rebind({id(old): s.tensor for old, s in before})
        program.run = program.run or Executor(program.local, variant.binding, captured.out_spec)

    @contextmanager
    def _announced(self, all_ranks: bool) -> Iterator[None]:
        """What goes wrong here on one rank is heard of by all, if they all come here."""
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        if all_ranks:
            self.agreement.resolve(error, "")
        elif error is not None:
            raise error
