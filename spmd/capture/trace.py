"""One run of the user's step under make_fx, with fake tensors in the place of real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from spmd._torch import (
    FunctionalTensor,
    FunctionalTensorMode,
    TracingContext,
    compile_session,
    enable_python_dispatcher,
    lazy_size_nodes,
    make_fx,
    non_strict_tracing,
    pytree,
    set_multithreading_enabled,
    tracing,
)
from spmd.capture import decomp
from spmd.capture.arguments import Arguments
from spmd.capture.effects import Effects
from spmd.capture.fakes import Faker
from spmd.capture.gradients import GradientWatch
from spmd.capture.inputs import Entry, ItemView
from spmd.capture.marks import Marks, inner, lift, lift_number, node_of
from spmd.capture.numbers import Written, mappings, snapshot, written
from spmd.capture.objects import Objects, successor
from spmd.capture.optim import OptimizerTrace, patched_steps
from spmd.capture.patches import patched, replaced
from spmd.capture.provenance import Tracker, recording
from spmd.capture.refuse import located
from spmd.capture.result import Slot
from spmd.capture.swap import Substitution, lookup_in, swapped_modules
from spmd.errors import Offence, SideEffectError, SpmdError
from spmd.graph.step import Input, Output, Role

_set_rng_state = torch.set_rng_state
SENTINEL = 0x5EED_AB1E  # tracing draws nothing: a generator that isn't in this state afterwards was seeded by the step


@dataclass
class Plan:
    """How to trace: with which batch, and which optimizers by the capturable path."""

    size: int | None  # concrete global batch; None: symbolic
    hint: int | None
    capturable: frozenset[str] = frozenset()


@dataclass
class Lifted:
    """A tensor that the step closed over, found in mid-trace and made an input."""

    entry: Entry
    node: fx.Node


@dataclass
class Traced:
    """The raw outcome of one run."""

    module: fx.GraphModule
    entries: list[Entry]
    lifted: list[Lifted]
    outputs: list[Output]
    out_spec: pytree.TreeSpec
    marks: Marks
    watch: GradientWatch
    faker: Faker
    alive: set[str] = field(default_factory=set)  # parameters whose gradient exists at the end


class Trace:
    """State of one run. `body` is what make_fx traces."""

    def __init__(
        self, fn: Callable[..., Any], objects: Objects, arguments: Arguments, entries: list[Entry], plan: Plan
    ) -> None:
        self.fn, self.objects, self.arguments, self.entries, self.plan = fn, objects, arguments, entries, plan
        self.faker = Faker(plan.size, plan.hint)
        self.marks = Marks()
        self.watch = GradientWatch(node_of)
        self.tracker = Tracker(names={id(m): n for n, m in objects.submodules()})
        self.tracker.stored = self._stored
        self.effects = Effects(objects)
        self.by_id: dict[int, torch.Tensor] = {}  # id of a real tensor -> what stands for it
        self.lifted: list[Lifted] = []
        self.outputs: list[Output] = []
        self.values: list[Any] = []
        self.names: dict[int, str] = {}  # id of a traced parameter -> name
        self.alive: set[str] = set()
        self.groups = list(objects.groups())
        self.copies: dict[int, Any] = {}  # id of a group or state of an optimizer -> what stands for it
        self.unlifted: set[str] = set()  # numbers of groups that the step changes, though they aren't inputs
        self.optimizers = [
            OptimizerTrace(name, o, self.marks, name in plan.capturable, self._parameter_name, objects.state_name)
            for name, o in objects.optimizers.items()
        ]

    def run(self) -> Traced:
        fakes = [
            self.faker.tensor(e.value, e.input.batch_dim) if e.is_tensor else self.faker.number(e.value, e.input.name)
            for e in self.entries
        ]
        with self._context(), self.effects.watched():
            module = make_fx(
                self.body, tracing_mode="fake", decomposition_table=decomp.table(), _allow_non_fake_inputs=True
            )(*fakes)
        return Traced(
            module,
            self.entries,
            self.lifted,
            self.outputs,
            self.out_spec,
            self.marks,
            self.watch,
            self.faker,
            self.alive,
        )

    @contextmanager
    def _context(self) -> Iterator[None]:
        rng = torch.get_rng_state()
        with ExitStack() as stack:
            for manager in (
                compile_session(),  # is_compiling(): libraries then don't branch on values
                non_strict_tracing(),
                torch.compiler.set_stance("force_eager"),  # what torch.compile wraps runs as it was written
                set_multithreading_enabled(False),
                enable_python_dispatcher(),
                tracing(TracingContext(self.faker.mode)),
                patched(self.tracker),
                self.watch.patched_zero_grad(),
                recording(self.tracker),
                patched_steps(self.optimizers, self._enter_update, self._leave_update),
                FunctionalTensorMode(),
                replaced(torch, set_rng_state=_refuse_rng_state),
                replaced(torch.random, set_rng_state=_refuse_rng_state),
            ):
                stack.enter_context(manager)
            try:
                torch.manual_seed(SENTINEL)
                before = torch.get_rng_state()
                yield
                if not torch.equal(torch.get_rng_state(), before):
                    raise SideEffectError(
                        Offence(
                            "the step seeds or advances torch's random generator by itself",
                            remedy="seed outside the step, or give spmd.compile a seed",
                        )
                    )
            finally:
                _set_rng_state(rng)

    def _enter_update(self) -> None:
        self.tracker.phase = "update"

    def _leave_update(self) -> None:
        self.tracker.phase = ""

    def body(self, *fakes: Any) -> list[Any]:
        """Runs the user's function on traced values; returns the flat outputs."""
        self._wrap(fakes)
        leaves = self._leaves()
        swap = lookup_in(self.by_id, self._lift)
        states = {
            (e.input.root, id(e.keeper), e.slot.key or e.input.key): e.traced
            for e in self.entries
            if e.keeper is not None
        }
        substitution = Substitution(swap, self.watch)
        hypers = [e for e in self.entries if e.slot.container is not None]
        with ExitStack() as stack:
            stack.enter_context(lazy_size_nodes())
            stack.enter_context(swapped_modules(self.objects, self.by_id))
            for trace in self.optimizers:
                stack.enter_context(trace.installed(swap, states, self.copies))
            self._put_numbers(hypers, stack)
            stack.enter_context(self._hooks(substitution))
            self.found = snapshot(self.copies)
            with self.effects.containers(mappings(self.copies)), substitution.everywhere():
                args, kwargs = self.arguments.rebuild(leaves)
                result = self._call(args, kwargs)
            self._collect(result)
        return self.values

    def _stored(self) -> dict[str, torch.Tensor]:
        """What parameters, buffers and arguments hold now: another tensor once they've been written to."""
        named = {e.input.name: e.traced for e in self.entries if e.is_tensor} | dict(_buffers_by_name(self.objects))
        return {name: inner(x) for name, x in named.items() if isinstance(x, torch.Tensor)}

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.fn(*args, **kwargs)
        except SpmdError as error:
            raise located(error) from error

    def _wrap(self, fakes: tuple[Any, ...]) -> None:
        for e, fake in zip(self.entries, fakes, strict=True):
            e.traced = fake
            if not e.is_tensor:
                continue
            # A leaf that requires grad must get the flag after it's wrapped, or autograd takes the wrapper for a derived tensor.
            e.traced = FunctionalTensor.to_functional(fake)
            if e.value.requires_grad and e.input.role is not Role.GRADIENT:
                e.traced.requires_grad_(True)
            if e.input.role is Role.PARAMETER:
                if isinstance(e.value, torch.nn.Parameter):
                    e.traced._is_param = True
                self.watch.names[id(e.traced)] = self.names[id(e.traced)] = e.input.name
            if e.input.role in (Role.PARAMETER, Role.BUFFER):
                self.by_id[id(e.value)] = e.traced
        by_name = {e.input.name: e.traced for e in self.entries if e.input.role is Role.PARAMETER}
        for e in self.entries:
            if e.input.role is Role.GRADIENT:
                by_name[e.input.owner].grad = e.traced

    def _leaves(self) -> list[Any]:
        leaves = [
            self.by_id.get(id(successor(v)), v) if isinstance(v, torch.Tensor) else v for v in self.arguments.leaves
        ]
        for e in self.entries:
            if e.slot.leaf is not None:
                leaves[e.slot.leaf] = e.traced
        return leaves

    def _put_numbers(self, hypers: list[Entry], stack: ExitStack) -> None:
        """Hyper-parameters lie in copies of the groups now; other containers are the user's and get their values back."""
        for e in hypers:
            container, key = e.slot.container, e.slot.key
            assert container is not None
            if isinstance(container, ItemView) and id(container.owner) in self.copies:
                ItemView(self.copies[id(container.owner)], container.key, container.index)[key] = e.traced
            elif id(container) in self.copies:
                self.copies[id(container)][key] = e.traced
            elif e.keeper is None:  # numbers in states have their place already
                stack.callback(container.__setitem__, key, container[key])
                container[key] = e.traced

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that the step reaches from outside: an input that every rank holds whole."""
        name = next((n for n, t in self.objects.free.items() if t is tensor), f"constant_{len(self.lifted)}")
        if any(e.input.name == name for e in self.entries):
            name = f"{name} (outside)"
        input = Input(Role.USER, name)
        entry = Entry(input, Slot(input, tensor), tensor)
        entry.traced, node = lift(self.faker.tensor(tensor), f"outside_{len(self.lifted)}")
        if tensor.requires_grad and tensor.is_leaf:
            entry.traced.requires_grad_(True)
        self.lifted.append(Lifted(entry, node))
        return entry.traced

    def _parameter_name(self, parameter: torch.Tensor) -> str:
        return self.names.get(id(parameter), "?")

    @contextmanager
    def _hooks(self, substitution: Substitution) -> Iterator[None]:
        """The user's tensor hooks, and our own that marks gradients."""
        with ExitStack() as stack:
            for e in self.entries:
                if not e.is_tensor or not e.traced.requires_grad or e.input.role is not Role.PARAMETER:
                    continue
                for hook in (e.value._backward_hooks or {}).values():
                    stack.callback(e.traced.register_hook(substitution.inside(hook)).remove)
                stack.callback(e.traced.register_post_accumulate_grad_hook(self._accumulated).remove)
                for hook in (e.value._post_accumulate_grad_hooks or {}).values():
                    stack.callback(e.traced.register_post_accumulate_grad_hook(substitution.inside(hook)).remove)
            yield

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self.watch.accumulated(parameter)
        self.tracker.after_gradients = True

    def _collect(self, result: Any) -> None:
        with self.watch.muted():
            self._collect_numbers()
            self._collect_tensors()
            self._collect_states()
            self._collect_gradients()
            self._collect_user(result)

    def _put(self, output: Output, value: Any) -> None:
        self.outputs.append(output)
        self.values.append(inner(value) if isinstance(value, torch.Tensor) else value)

    def _collect_tensors(self) -> None:
        """New values of parameters and buffers (re-assigned ones by name) and of arguments written to."""
        now = dict(_buffers_by_name(self.objects))
        for i, e in enumerate(self.entries):
            if e.input.role is Role.PARAMETER or e.input.role is Role.USER:
                self._put(Output(e.input.role, e.input.name, updates=i), e.traced)
            elif e.input.role is Role.BUFFER:
                value = now.get(e.input.name)
                self._put(Output(e.input.role, e.input.name, updates=i), e.traced if value is None else value)
        for j, lifted in enumerate(self.lifted):
            if lifted.entry.is_tensor:
                updates = len(self.entries) + j
                self._put(Output(Role.USER, lifted.entry.input.name, updates=updates), lifted.entry.traced)

    def _collect_numbers(self) -> None:
        """What the step wrote into groups and states, besides the states' tensors."""
        index = {e.input.name: i for i, e in enumerate(self.entries) if e.input.role is Role.HYPER}
        done: set[str] = set()
        for w in written(self.objects, self.groups, self.copies, self.found):
            if isinstance(w.after, tuple):
                self.effects.refuse_written(w.name, w.before, w.after)
            elif w.name not in index and w.is_number:
                self.unlifted.add(w.name)
            elif w.name not in index and not w.can_be_kept:
                self.effects.refuse_written(w.name, w.before, w.after)
            else:
                done.add(w.name)
                i = index[w.name] if w.name in index else self._place(w)
                self._put(Output(Role.HYPER, w.name, updates=i), w.after)
        for i, e in enumerate(self.entries):
            if e.input.role is Role.HYPER and e.is_tensor and e.input.name not in done:
                self._put(Output(Role.HYPER, e.input.name, updates=i), e.traced)

    def _place(self, w: Written) -> int:
        """An input that nothing reads, for the place of a value that wasn't there before."""
        name = f"{w.name} (new)"
        input = Input(Role.HYPER, name, w.root)
        entry = Entry(input, Slot(input, None, w.container, w.key), 0)
        entry.traced, node = lift_number(self.faker.number(0, name), f"outside_{len(self.lifted)}")
        self.lifted.append(Lifted(entry, node))
        return len(self.entries) + len(self.lifted) - 1

    def _collect_states(self) -> None:
        index = {
            (e.input.root, e.input.owner, e.input.key): i
            for i, e in enumerate(self.entries)
            if e.input.role is Role.STATE
        }
        for root, optimizer in self.objects.states():
            trace = next(t for t in self.optimizers if t.name == root)
            for p, state in optimizer.state.items():
                name = self._parameter_name(p)
                for key, value in state.items():
                    if not isinstance(value, torch.Tensor):
                        continue
                    before = index.get((trace.name, name, key))
                    narrow = trace.narrow_dtype(name, key)
                    self._put(
                        Output(Role.STATE, self.objects.state_name(root, name, key), updates=before),
                        value.to(narrow) if narrow else value,
                    )

    def _collect_gradients(self) -> None:
        index = {e.input.owner: i for i, e in enumerate(self.entries) if e.input.role is Role.GRADIENT}
        for e in self.entries:
            if e.input.role is Role.PARAMETER and e.traced.grad is not None:
                self.alive.add(e.input.name)
                self._put(Output(Role.GRADIENT, f"{e.input.name}.grad", updates=index.get(e.input.name)), e.traced.grad)

    def _collect_user(self, result: Any) -> None:
        by_id = {id(e.traced): e.input.name for e in self.entries if e.input.role in (Role.PARAMETER, Role.BUFFER)}
        grads = {
            id(e.traced.grad): e.input.name
            for e in self.entries
            if e.input.role is Role.PARAMETER and e.traced.grad is not None
        }
        leaves, self.out_spec = pytree.tree_flatten(result)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaf = self.by_id.get(id(leaf), leaf)
            self._put(
                Output(Role.USER, f"output[{i}]", alias_of=by_id.get(id(leaf), ""), grad_of=grads.get(id(leaf), "")),
                leaf,
            )


def _refuse_rng_state(*_: Any) -> None:
    raise SideEffectError(
        Offence("the step sets torch's random state", remedy="draw outside the step and pass the numbers in")
    )


def _buffers_by_name(objects: Objects) -> Iterator[tuple[str, torch.Tensor]]:
    for root, module in objects.modules.items():
        for name, buffer in module.named_buffers():
            yield objects.qualify(root, name), buffer
