"""compile() and CompiledStep: the whole pipeline, top to bottom.

capture   the plain step          -> StepGraph, global, symbolic in the batch      spmd/capture
at        a batch size            -> StepGraph with numbers                        spmd/graph
mode      policy                  -> Constraints                                   spmd/modes
propagate, divide, partition      -> LocalGraph, this rank's program               spmd/sharding
passes    optimizations           -> LocalGraph                                    spmd/passes
bind, execute                     -> storage, agreement between ranks, a callable  spmd/runtime
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

from torch.distributed.device_mesh import DeviceMesh

from spmd.capture import Capture
from spmd.counter.rewrite import rewrite
from spmd.graph.axis import Mesh
from spmd.graph.concrete import at
from spmd.graph.local import LocalGraph
from spmd.graph.step import Role, StepGraph
from spmd.graph.verify import verify_local, verify_step
from spmd.modes import DataParallelMode, ParallelMode, registry
from spmd.passes import GraphPass, PassPipeline, Rewrite
from spmd.runtime.binding import placed
from spmd.runtime.counter import CounterDraws
from spmd.runtime.programs import Program, Programs
from spmd.runtime.progress import Stages
from spmd.runtime.world import World

if TYPE_CHECKING:
    from spmd.report.explain import Explanation  # reports stand above: imported when asked for

P = ParamSpec("P")
T = TypeVar("T")
Passes = str | PassPipeline | Sequence[str | GraphPass | Rewrite]
Randomness = Literal["eager", "counter"]


class CompiledStep(Generic[P, T]):
    """A train step that runs on every rank of a mesh. Made by `spmd.compile`; compiles on its first call."""

    def __init__(
        self,
        fn: Callable[P, T],
        mode: ParallelMode,
        mesh: DeviceMesh | None,
        passes: PassPipeline,
        seed: int | None,
        randomness: Randomness,
        sync: Literal["broadcast", "error"],
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.mode, self.mesh, self.passes = fn, mode, mesh, passes
        counter = CounterDraws(seed) if randomness == "counter" else None
        self.programs = Programs(fn, mode, self._compile, functools.partial(World.of, mesh), seed, sync, counter)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one step on this rank's share of the batch. Every rank calls.

        Returns:
            What the step returns: whole-batch values (a loss) whole and equal on all ranks, values that carry the batch as this rank's share.
        Raises:
            SpmdError: the step can't be compiled exactly, or the ranks disagree. Nothing has run and nothing has changed then.
        """
        return self.programs(args, kwargs)

    def _compile(self, captured: Capture, batch: int | None, world: World, stages: Stages) -> Program:
        """Everything between the captured step and the program of this rank. Talks to no other rank and changes nothing."""
        with stages("place"):
            step = local_graph(captured.step, captured, batch, self.mode, world.view)
            init = local_graph(captured.init, captured, batch, self.mode, world.view) if captured.init else None
        with stages("optimize"):
            verify_local(step)
            transforms = PassPipeline.of([override.transform for override in self.mode.overrides])
            step = replace(self.passes, passes=(*transforms.passes, *self.passes.passes)).run(step)
        return Program(captured, step, init)

    @property
    def trace_count(self) -> int:
        """How often the step has been traced."""
        return self.programs.trace_count

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """What a call with these arguments would do: placements, collectives, fallbacks. Runs nothing. All ranks call the first time."""
        from spmd.report.explain import Explanation

        return Explanation.of(self.programs.prepare(args, kwargs).local)

    def program(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """The program that a call with these arguments runs on this rank, as text; without arguments, the last one compiled."""
        return str(self.programs.prepare(args, kwargs).local if args or kwargs else self.programs.latest.local)

    def state_dict(self) -> dict[str, Any]:
        """The state of random numbers that are the step's own, to go on with after a restart. Empty where they come from torch's generators."""
        return self.programs.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the random numbers where a step was when it gave this `state_dict()`. Every rank calls.

        Raises:
            StateError: it's the state of a step with another kind of randomness.
        """
        self.programs.load_state_dict(state_dict)

    def reset(self) -> None:
        """Forget all programs. The model's and the optimizer's tensors stay as they are."""
        self.programs.reset()


def local_graph(step: StepGraph, captured: Capture, batch: int | None, mode: ParallelMode, mesh: Mesh) -> LocalGraph:
    """This rank's program for a captured graph."""
    concrete = rewrite(at(step, batch))
    verify_step(concrete)
    known = {
        s.input.name: found
        for s in captured.slots
        if s.tensor is not None and s.input.role is not Role.GRADIENT and (found := placed(s.tensor)) is not None
        if len(found) == len(mesh.shape)  # else it lies on another mesh, which binding refuses
    }
    return mode.of(captured.submodules()).expand(concrete, mesh, known)


@overload
def compile(
    func: Callable[P, T],
    *,
    parallel_mode: ParallelMode | str | None = ...,
    mesh: DeviceMesh | None = ...,
    passes: Passes = ...,
    seed: int | None = ...,
    randomness: Randomness = ...,
    sync: Literal["broadcast", "error"] = ...,
) -> CompiledStep[P, T]: ...


@overload
def compile(
    func: None = None,
    *,
    parallel_mode: ParallelMode | str | None = ...,
    mesh: DeviceMesh | None = ...,
    passes: Passes = ...,
    seed: int | None = ...,
    randomness: Randomness = ...,
    sync: Literal["broadcast", "error"] = ...,
) -> Callable[[Callable[P, T]], CompiledStep[P, T]]: ...


def compile(
    func: Callable[P, T] | None = None,
    *,
    parallel_mode: ParallelMode | str | None = None,
    mesh: DeviceMesh | None = None,
    passes: Passes = "default",
    seed: int | None = None,
    randomness: Randomness = "eager",
    sync: Literal["broadcast", "error"] = "broadcast",
) -> Any:
    """Compile a plain single-device train step into the program that every rank of a mesh runs.

    Args:
        func: the step: any function, method or partial. Use as a decorator with or without arguments.
        parallel_mode: how tensors lie on the mesh: a mode, or the name of a data parallel style or of a plugin's mode. Default: "fully_shard".
        mesh: the mesh, of as many axes as the mode works on; default: all ranks of the default process group, made from torchrun's environment if it doesn't exist.
        passes: "default", "none", a spec such as "dedup,bucket{cap_mb=25}" or "default,-overlap", a PassPipeline, or a list of passes, specs and
            callables from GraphModule to GraphModule. The variable SPMD_PASSES, a spec, stands above it; "default" in it is what's given here.
        seed: random numbers come from a generator of the step's own with this seed; default: they're those of rank 0's default generator.
        randomness: "eager": the numbers that eager gives on one device, for which every rank draws the whole batch's. "counter": numbers made from
            the seed, the count of steps and the place in the global tensor; they too are equal at any world size, and each rank makes its part
            alone. Without `seed`, a number from rank 0's default generator is the seed, at the first call.
        sync: what to do where ranks start from different parameters: "broadcast" rank 0's and warn, or "error".

    Example:
        @spmd.compile(parallel_mode=DataParallelMode("fully_shard"))
        def train_step(model, optim, x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optim.step()
            optim.zero_grad()
            return loss.detach()
    """
    if func is None:
        options: dict[str, Any] = {"passes": passes, "seed": seed, "randomness": randomness, "sync": sync}
        return functools.partial(compile, parallel_mode=parallel_mode, mesh=mesh, **options)
    if randomness not in ("eager", "counter"):
        raise ValueError(f'randomness={randomness!r} is unknown; it\'s "eager" or "counter"')
    mode = registry.mode(parallel_mode) if isinstance(parallel_mode, str) else parallel_mode or DataParallelMode()
    return CompiledStep(func, mode, mesh, PassPipeline.of(passes, mode.passes()).here(), seed, randomness, sync)
