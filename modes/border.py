"""What goes in and out of a parallelized module, eagerly: hooks that redistribute it as the style's description says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from spmd.errors import InputError, Offence
from spmd.modes.styles import Description, beyond
from spmd.sharding.layout import bounds


class Border:
    """The hooks of one module."""

    def __init__(self, description: Description, module: nn.Module, mesh: DeviceMesh, fqn: str) -> None:
        self.description, self.mesh = description, mesh
        self.name = f"{type(module).__name__} {fqn}".strip()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        d = self.description
        if len(args) < len(d.desired_inputs):
            what = f"{self.name} gets {len(args)} positional arguments, its style describes {len(d.desired_inputs)}"
            raise InputError(Offence(what, remedy="describe keyword arguments by name: input_kwarg_layouts"))
        if offences := list(self.misnamed(module, args, kwargs)):
            raise InputError(offences)
        pairs = enumerate(zip(args, d.inputs, d.desired_inputs, strict=False))
        features = module.in_features if isinstance(module, nn.Linear) else None
        new = [
            self.move(x, a, b, d.use_local_input, f"argument {i}", None if i else features) for i, (x, a, b) in pairs
        ]
        named = {n: self.move(kwargs[n], a, b, d.use_local_input, n) for n, (a, b) in d.kwargs.items() if n in kwargs}
        return (*new, *args[len(new) :]), {**kwargs, **named}

    def misnamed(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Offence]:
        """Keyword arguments that are described and don't come. One that's left out has its default, and may."""
        if missing := [name for name in self.description.kwargs if name not in kwargs]:
            signature = inspect.signature(module.forward)
            positional = signature.bind_partial(*args).arguments
            takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
            for name in missing:
                if name in positional:
                    yield Offence(
                        f"{self.name} gets {name!r} by position, its style describes it by name",
                        remedy="pass it by name",
                    )
                elif name not in signature.parameters and not takes_any:
                    yield Offence(
                        f"{self.name} has no argument {name!r}, which its style describes",
                        remedy=f"it has {', '.join(signature.parameters)}",
                    )

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        d = self.description
        several = isinstance(output, (tuple, list))
        results = output if several else (output,)
        if len(results) < len(d.desired_outputs):
            what = f"{self.name} returns {len(results)} values, its style describes {len(d.desired_outputs)}"
            raise InputError(
                Offence(what, remedy="give a layout for each value that it returns, None for those to leave")
            )
        pairs = enumerate(zip(results, d.outputs, d.desired_outputs, strict=False))
        new = [self.move(x, a, b, d.use_local_output, f"result {i}") for i, (x, a, b) in pairs]
        if not several:
            return new[0]
        kind, whole = type(output), (*new, *results[len(new) :])
        return kind(*whole) if hasattr(output, "_fields") else kind(whole)

    def move(
        self, x: Any, has: Placement | None, wants: Placement | None, local: bool, what: str, length: int | None = None
    ) -> Any:
        """`x` as the module gets it, or as it leaves. `length`: that of its last dim, all parts together, where it's known."""
        if x is None or (has is None and wants is None):
            return x
        if not isinstance(x, torch.Tensor):
            text = f"{what} of {self.name} is a {type(x).__name__}, its style describes a tensor"
            raise InputError(
                Offence(text, remedy="leave it alone with None, or describe the module that makes the tensor")
            )
        if beyond(has, x.dim()) or beyond(wants, x.dim()):
            text = f"{what} of {self.name} has {x.dim()} dims, its style describes it as {has}, and wants {wants}"
            raise InputError(Offence(text, remedy="dims count from 0, or from -1 backwards"))
        whole = x if isinstance(x, DTensor) else self.whole(x, has or Replicate(), what, length)
        if wants is not None and whole.placements != (wants,):
            whole = whole.redistribute(placements=[wants])
        return whole.to_local() if local else whole

    def whole(self, x: torch.Tensor, has: Placement, what: str, length: int | None) -> DTensor:
        """A plain tensor, understood as this rank's part. Parts may be uneven, so how long all of them are has to be known, or asked."""
        if not isinstance(has, Shard):
            return DTensor.from_local(x, self.mesh, [has], run_check=False)
        dim = has.dim % x.dim()
        known = length if dim == x.dim() - 1 else None
        asked = self.lengths(x.shape[dim], x.device) if known is None else []
        total = sum(asked) if known is None else known
        ends = [bounds(total, self.mesh.size(), rank) for rank in range(self.mesh.size())]
        expected = [stop - start for start, stop in ends]
        if asked not in ([], expected) or x.shape[dim] != expected[self.mesh.get_local_rank()]:
            text = f"{what} of {self.name} is understood as parts along dim {dim}, of lengths {expected}; it has {asked or x.shape[dim]}"
            remedy = "split it as torch.chunk does, or say how it lies, such as input_layouts=Replicate()"
            raise InputError(Offence(text, remedy=remedy))
        shape = torch.Size((*x.shape[:dim], total, *x.shape[dim + 1 :]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, self.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)

    def lengths(self, mine: int, device: torch.device) -> list[int]:
        """Of every rank's part. Ranks with as much as others can't know that the others have less: all ask, each time."""
        counts = torch.zeros(self.mesh.size(), dtype=torch.int64, device=device)
        counts[self.mesh.get_local_rank()] = mine
        dist.all_reduce(counts, group=self.mesh.get_group())
        return counts.tolist()
