"""Parallel styles: what tensor parallelism does to one module. The same styles work eagerly (`parallelize_module`) and compiled (`TensorParallelMode`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from spmd.errors import PlacementError

Layouts = tuple[Placement | None, ...]  # None: left as it is
Given = Placement | Sequence[Placement | None] | None
ByName = Mapping[str, Placement | None] | tuple[tuple[str, Placement | None], ...]


@dataclass(frozen=True)
class Description:
    """How one module lies on a mesh axis.

    parameters: placement of each of the module's own parameters, by its local name. Those that aren't named are replicated; if none is, all are left.
    inputs, desired_inputs: of the positional arguments: how a plain tensor is to be understood, and how the module gets it.
    kwargs: the same for keyword arguments, by name.
    outputs, desired_outputs: how the results come out, and how they leave.
    context: what attention inside moves where all around it is in parts of the sequence: whole "keys" (and values) to the queries, or everything to
        parts of the "heads"; compiled only.
    use_local_input, use_local_output: whether arguments and results come as plain tensors (this rank's part) or as DTensors; eager only.
    """

    parameters: Mapping[str, Placement] = field(default_factory=dict)
    inputs: Layouts = ()
    desired_inputs: Layouts = ()
    kwargs: Mapping[str, tuple[Placement | None, Placement | None]] = field(default_factory=dict)
    outputs: Layouts = ()
    desired_outputs: Layouts = ()
    context: Literal["", "keys", "heads"] = ""
    use_local_input: bool = False
    use_local_output: bool = True


class ParallelStyle:
    """How to parallelize one module. Styles are immutable; one object may serve any number of modules.

    A style of one's own overrides `describe`, which serves both ways of running, or `apply`, which is for `parallelize_module` only.

    Example:
        @dataclass(frozen=True)
        class ShardedTable(ParallelStyle):
            def describe(self, module):
                return Description({"table": Shard(0)}, inputs=(Replicate(),), desired_inputs=(Replicate(),),
                                   outputs=(Partial(),), desired_outputs=(Replicate(),))
    """

    def describe(self, module: nn.Module) -> Description:
        """What the style means for `module`, which isn't changed.

        Raises:
            PlacementError: it isn't for modules of this kind.
        """
        raise PlacementError(f"{type(self).__name__} doesn't say what it means: override describe(module)")

    @property
    def describes(self) -> bool:
        """Whether it says what it means, rather than only doing it."""
        return type(self).describe is not ParallelStyle.describe

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard `module` over the one axis of `mesh`, in place, and return it: its parameters become DTensors, hooks redistribute what goes in and out."""
        from spmd.modes.parallelize import apply_description

        return apply_description(self.describe(module), module, mesh)


def layouts(given: Given) -> Layouts:
    if given is None:
        return ()
    return (given,) if isinstance(given, Placement) else tuple(given)


def normalize(style: ParallelStyle, *names: str) -> None:
    """Layouts as tuples, and those by name as sorted pairs: what was given may change later, the style doesn't."""
    for name in names:
        given = getattr(style, name)
        by_name = name.endswith("_kwarg_layouts")
        object.__setattr__(style, name, tuple(sorted(dict(given).items())) if by_name else layouts(given))


def beyond(placement: Placement | None, rank: int) -> bool:
    """Whether it splits a dim that a tensor of `rank` dims doesn't have."""
    return isinstance(placement, Shard) and not -rank <= placement.dim < rank


def unfit(style: ParallelStyle, module: nn.Module, kinds: str) -> PlacementError:
    return PlacementError(f"{type(style).__name__} is for {kinds}, not for {type(module).__name__}")


@dataclass(frozen=True)
class ColwiseParallel(ParallelStyle):
    """Split what a module puts out: the rows of a Linear's weight and its bias, the columns of an Embedding's table.

    input_layouts: how a plain input is to be understood; None: replicated. output_layouts: how the output leaves; None: split on its last dim.
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True

    def describe(self, module: nn.Module) -> Description:
        if isinstance(module, nn.Linear):
            parameters: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
        elif isinstance(module, nn.Embedding):
            parameters = {"weight": Shard(1)}
        else:
            raise unfit(self, module, "nn.Linear and nn.Embedding")
        return Description(
            parameters,
            inputs=(self.input_layouts or Replicate(),),
            desired_inputs=(Replicate(),),
            outputs=(Shard(-1),),
            desired_outputs=(self.output_layouts or Shard(-1),),
            use_local_output=self.use_local_output,
        )


@dataclass(frozen=True)
class RowwiseParallel(ParallelStyle):
    """Split what a module takes in: the columns of a Linear's weight, the rows of an Embedding's table. The bias is added once.

    input_layouts: how a plain input is to be understood; None: split on its last dim, for an Embedding replicated. output_layouts: how the output
    leaves; None: replicated (an all-reduce); a Shard is a reduce-scatter.
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True

    def describe(self, module: nn.Module) -> Description:
        if isinstance(module, nn.Linear):
            parameters: dict[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
            wanted: Placement = Shard(-1)
        elif isinstance(module, nn.Embedding):
            parameters, wanted = {"weight": Shard(0)}, Replicate()
        else:
            raise unfit(self, module, "nn.Linear and nn.Embedding")
        return Description(
            parameters,
            inputs=(self.input_layouts or wanted,),
            desired_inputs=(wanted,),
            outputs=(Partial(),),
            desired_outputs=(self.output_layouts or Replicate(),),
            use_local_output=self.use_local_output,
        )


@dataclass(frozen=True)
class SequenceParallel(ParallelStyle):
    """Run a norm or a dropout on parts of the sequence; its parameters stay whole.

    sequence_dim: dim of the input that is split.
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def describe(self, module: nn.Module) -> Description:
        split = (Shard(self.sequence_dim),)
        whole = {name: Replicate() for name, _ in module.named_parameters(recurse=False)}
        return Description(whole, split, split, {}, split, split, use_local_output=self.use_local_output)


@dataclass(frozen=True)
class PrepareModuleInput(ParallelStyle):
    """Redistribute what a module gets. Its parameters are left as they are.

    input_layouts, desired_input_layouts: of the first positional arguments, how they come and how the module gets them; None leaves one alone.
    input_kwarg_layouts, desired_input_kwarg_layouts: the same for keyword arguments.
    Raises:
        PlacementError: as many layouts as desired layouts are needed, and the same keyword arguments.
    """

    input_layouts: Given = None
    desired_input_layouts: Given = None
    input_kwarg_layouts: ByName = ()
    desired_input_kwarg_layouts: ByName = ()
    use_local_output: bool = False

    def __post_init__(self) -> None:
        normalize(self, "input_layouts", "desired_input_layouts", "input_kwarg_layouts", "desired_input_kwarg_layouts")
        check_lengths(self, "input_layouts", "desired_input_layouts")
        has, wants = list(dict(self.input_kwarg_layouts)), list(dict(self.desired_input_kwarg_layouts))
        if has != wants:
            what = f"{type(self).__name__}: input_kwarg_layouts has {has}, desired_input_kwarg_layouts has {wants}"
            raise PlacementError(f"{what}; give both the same names")

    def describe(self, module: nn.Module) -> Description:
        has, wants = dict(self.input_kwarg_layouts), dict(self.desired_input_kwarg_layouts)
        return Description(
            inputs=layouts(self.input_layouts),
            desired_inputs=layouts(self.desired_input_layouts),
            kwargs={name: (has[name], wants[name]) for name in has},
            use_local_input=self.use_local_output,
        )


@dataclass(frozen=True)
class PrepareModuleOutput(ParallelStyle):
    """Redistribute what a module puts out; None leaves a result alone. Its parameters are left as they are.

    Raises:
        PlacementError: as many layouts as desired layouts are needed.
    """

    output_layouts: Given = None
    desired_output_layouts: Given = None
    use_local_output: bool = True

    def __post_init__(self) -> None:
        normalize(self, "output_layouts", "desired_output_layouts")
        check_lengths(self, "output_layouts", "desired_output_layouts")

    def describe(self, module: nn.Module) -> Description:
        has, wants = layouts(self.output_layouts), layouts(self.desired_output_layouts)
        return Description(outputs=has, desired_outputs=wants, use_local_output=self.use_local_output)


@dataclass(frozen=True)
class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one."""

    input_layouts: Given = None
    desired_input_layouts: Given = None
    input_kwarg_layouts: ByName = ()
    desired_input_kwarg_layouts: ByName = ()
    use_local_input: bool = False
    output_layouts: Given = None
    desired_output_layouts: Given = None
    use_local_output: bool = True

    def __post_init__(self) -> None:
        for half in self.halves():  # each checks its own
            for name in vars(half).keys() - {"use_local_output"}:
                object.__setattr__(self, name, getattr(half, name))

    def halves(self) -> tuple[PrepareModuleInput, PrepareModuleOutput]:
        kwargs = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        into = PrepareModuleInput(self.input_layouts, self.desired_input_layouts, *kwargs, self.use_local_input)
        return into, PrepareModuleOutput(self.output_layouts, self.desired_output_layouts, self.use_local_output)

    def describe(self, module: nn.Module) -> Description:
        into, out = (half.describe(module) for half in self.halves())
        return replace(
            into, outputs=out.outputs, desired_outputs=out.desired_outputs, use_local_output=out.use_local_output
        )


def check_lengths(style: ParallelStyle, has: str, wants: str) -> None:
    a, b = getattr(style, has), getattr(style, wants)
    if len(a) != len(b):
        what = f"{type(style).__name__}: {has} has {len(a)} entries, {wants} has {len(b)}"
        raise PlacementError(f"{what}; give one of each for every tensor")
