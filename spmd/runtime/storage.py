"""Storage: one stored tensor. A persistent buffer, padded to the common chunk, under the user's DTensor.

Vocabulary: the *whole* is the global tensor; the *buffer* this rank's memory, of one shape on all ranks; the *local*
the buffer's real part, which is the DTensor's local tensor. Padding starts as zeros and nobody writes to it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from spmd import _torch
from spmd.errors import Offence, PlacementError
from spmd.graph.local import Layouts
from spmd.runtime.world import World
from spmd.sharding.layout import (
    Layout,
    R,
    Replicated,
    Sharded,
    bounds,
    buffer_shape,
    local_shape,
    padded_shape,
    remaining,
    shard,
    take,
)


class Storage:
    """A tensor at rest. `tensor` is what the user holds: a DTensor on a mesh, without one the user's own tensor.

    Attributes:
        buffer: padded memory, bound once into the compiled programs.
        local: compact view of its real part.
        shape, stride: of the whole.
    """

    def __init__(
        self,
        name: str,
        world: World,
        layouts: Layouts,
        shape: Sequence[int],
        stride: Sequence[int],
        buffer: torch.Tensor,
        own: torch.Tensor | None,
    ) -> None:
        """`own` is the object to keep: the user's tensor without a mesh, or a DTensor that gets a new local tensor."""
        self.name, self.layouts, self.shape, self.stride = name, layouts, torch.Size(shape), tuple(stride)
        self.world, self.buffer = world, buffer
        self.mesh = world.mesh if own is None or isinstance(own, DTensor) else None
        self.local = real_part(buffer, shape, layouts, world)
        self.tensor: torch.Tensor
        if self.mesh is None:
            assert own is not None
            self.tensor = own
        else:
            meta = _torch.TensorMeta(self.shape, self.stride, buffer.dtype)
            self.spec = _torch.DTensorSpec(self.mesh, placements_of(name, layouts, shape, world), meta)
            self.tensor = own if own is not None else self.like(self.local)
            self._settle()

    # ------------------------------------------------------------------------------------------------- making

    @classmethod
    def of(cls, name: str, source: torch.Tensor, layouts: Layouts, world: World) -> Storage:
        """Storage with the values of `source`: whole, or a DTensor (collective unless that is placed by `layouts`).

        A whole parameter becomes a new nn.Parameter holding a DTensor. Memory of a replicated one is taken over.
        """
        if world.mesh is None:
            return cls.plain(name, source, world)
        shape, stride = source.shape, _true_stride(source)
        placements_of(name, layouts, shape, world)  # raises before anything is allocated
        if (
            not isinstance(source, DTensor)
            and all(isinstance(x, Replicated) for x in layouts)
            and source.device == world.device
            and _dense(source)
        ):
            buffer = source.detach()
        else:
            buffer = _allocate(shape, stride, layouts, world, source.dtype)
            real_part(buffer, shape, layouts, world).copy_(part(source.detach(), layouts, world))
        self = cls(name, world, layouts, shape, stride, buffer, None)
        if isinstance(source, nn.Parameter):
            self.tensor = nn.Parameter(self.tensor, requires_grad=source.requires_grad)
        elif source.requires_grad:
            self.tensor.requires_grad_()
        self.local = self.tensor._local_tensor  # type: ignore[attr-defined]  # Parameter() made an alias
        return self

    @classmethod
    def adopt(cls, name: str, own: DTensor, layouts: Layouts, world: World) -> Storage:
        """Storage under a user's DTensor, which stays the same object with its local tensor in a padded buffer."""
        stride = tuple(own.stride())
        buffer = _allocate(own.shape, stride, layouts, world, own.dtype)
        real_part(buffer, own.shape, layouts, world).copy_(part(own.detach(), layouts, world))
        return cls(name, world, layouts, own.shape, stride, buffer, own)

    @classmethod
    def plain(cls, name: str, own: torch.Tensor, world: World) -> Storage:
        """Storage that is the user's own tensor, whole on every rank: without a mesh, or for counters like `step`."""
        return cls(name, world, (R,) * len(world.shape), own.shape, own.stride(), own.detach(), own)

    @classmethod
    def from_local(
        cls, name: str, local: torch.Tensor, layouts: Layouts, shape: Sequence[int], stride: Sequence[int], world: World
    ) -> Storage:
        """Storage of a new tensor of which `local` is this rank's part."""
        if world.mesh is None:
            return cls.plain(name, local, world)
        buffer = _allocate(shape, stride, layouts, world, local.dtype, local.device)
        real_part(buffer, shape, layouts, world).copy_(local)
        return cls(name, world, layouts, shape, stride, buffer, None)

    def like(self, local: torch.Tensor) -> DTensor:
        """A DTensor placed like this one over another local tensor of its shape, with strides in the order of the local's."""
        spec = self.spec
        if local.stride() != self.local.stride():
            meta = _torch.TensorMeta(self.shape, dense_stride(self.shape, local.stride()), local.dtype)
            spec = _torch.DTensorSpec(spec.mesh, spec.placements, meta)
        return DTensor(local, spec, requires_grad=False)

    # ------------------------------------------------------------------------------------------------- values

    @torch.no_grad()
    def load(self, value: torch.Tensor) -> None:
        """Copy in this rank's part of a whole tensor or DTensor (collective if that is placed otherwise). Casts."""
        if value is not self.tensor or not self.intact():
            self.local.copy_(part(value, self.layouts, self.world))

    @torch.no_grad()
    def full(self) -> torch.Tensor:
        """The whole tensor, in memory of its own. Collective where it's sharded."""
        whole = torch.empty_strided(
            self.shape, dense_stride(self.shape, self.stride), dtype=self.buffer.dtype, device=self.buffer.device
        )
        return whole.copy_(_gather(self.buffer, self.shape, self.layouts, self.world))

    @staticmethod
    def under(tensor: torch.Tensor) -> Storage | None:
        """The storage of a managed parameter or buffer."""
        found = tensor.__dict__.get("_spmd_storage")
        return found if isinstance(found, Storage) and found.tensor is tensor else None

    def mark(self) -> Storage:
        """Let `under` find it, so that another compiled function shares it."""
        if self.mesh is not None:
            self.tensor._spmd_storage = self  # type: ignore[attr-defined]
        return self

    def fits(self, value: torch.Tensor) -> bool:
        """Whether `value` may be loaded with its meaning kept."""
        return (
            value.shape == self.shape
            and value.dtype == self.buffer.dtype
            and value.device.type == self.buffer.device.type
        )

    def intact(self) -> bool:
        """Whether the user's object lies over the buffer. `.data =`, `swap_tensors`, `module.half()` take it away."""
        if self.mesh is not None:
            return self.tensor._local_tensor is self.local  # type: ignore[attr-defined]
        return self.tensor.data_ptr() == self.buffer.data_ptr()

    @torch.no_grad()
    def repair(self) -> None:
        """Put the user's object back over the buffer, with the value that it has now."""
        current = self.tensor.detach()
        self.load(current)
        if self.mesh is None:
            self.tensor.data = self.buffer
        else:
            self._settle()

    def _settle(self) -> None:
        assert isinstance(self.tensor, DTensor)
        self.tensor._local_tensor, self.tensor._spec = self.local, self.spec

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles of a parameter don't own its storage: they carry an empty dict, which torch.load accepts."""
        return OrderedDict, ()

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"Storage({self.name}, {tuple(self.shape)}, {', '.join(map(str, self.layouts))})"


# ----------------------------------------------------------------------------------------------------- placements


def placements_of(name: str, layouts: Layouts, shape: Sequence[int], world: World) -> tuple[Placement, ...]:
    """torch's placements for a tensor at rest. Where several axes split a dim, the earlier ones split what the later ones leave: strided shards.

    Raises:
        PlacementError: a layout has no torch placement.
    """
    found: list[Placement] = []
    for axis, layout in enumerate(layouts):
        placement = _placement(layout, world.shape[axis], split_by(layout, axis, layouts, world.shape))
        if placement is None:
            text = f"({', '.join(map(str, layouts))}) of shape {tuple(shape)}"
            raise PlacementError(
                Offence(
                    "a stored tensor is split in a way that a DTensor can't say",
                    fqn=name,
                    tried=text,
                    remedy="keep it R or S(dim) on each axis",
                )
            )
        found.append(placement)
    return tuple(found)


def split_by(layout: Layout, axis: int, layouts: Layouts, mesh: Sequence[int]) -> int:
    """Into how many parts the axes after `axis` cut the dim that it cuts."""
    dim = getattr(layout, "dim", None)
    return math.prod(
        n for n, x in zip(mesh[axis + 1 :], layouts[axis + 1 :], strict=True) if getattr(x, "dim", -1) == dim
    )


def _placement(layout: Layout, ranks: int, parts: int) -> Placement | None:
    if isinstance(layout, Replicated):
        return Replicate()
    if isinstance(layout, Sharded):
        fine = layout.canonical(ranks)
        if fine.outer == fine.inner == 1:
            return _torch.StridedShard(fine.dim, split_factor=parts) if parts > 1 else Shard(fine.dim)
    return None


def layouts_of(value: DTensor, name: str = "") -> Layouts:
    """The layouts of a DTensor, one a mesh axis.

    Raises:
        PlacementError: it is partial, or strided otherwise than by the axes after.
    """
    mesh, shape = value.device_mesh, tuple(value.shape)
    found: Layouts = (R,) * mesh.ndim
    for axis, placement in reversed(list(enumerate(value.placements))):
        if isinstance(placement, (Shard, _torch.StridedShard)):
            layout = shard(placement.dim, shape[placement.dim])
            found = (*found[:axis], layout, *found[axis + 1 :])
            if placement == _placement(layout, mesh.shape[axis], split_by(layout, axis, found, mesh.shape)):
                shape = local_shape(shape, layout, mesh.shape[axis], mesh.get_local_rank(axis))
                continue
        elif isinstance(placement, Replicate):
            continue
        raise PlacementError(
            Offence(
                "a parameter's placement can't be kept at rest",
                fqn=name,
                tried=f"placements {tuple(value.placements)}",
                remedy="redistribute it to Shard(dim) or Replicate()",
            )
        )
    return found


# ----------------------------------------------------------------------------------------------------- parts


@torch.no_grad()
def part(value: torch.Tensor, layouts: Layouts, world: World) -> torch.Tensor:
    """This rank's part of `value` (whole, or a DTensor of any placement)."""
    if isinstance(value, DTensor):
        target = placements_of("", layouts, value.shape, world)
        if value.device_mesh == world.mesh:
            return (value if value.placements == target else value.redistribute(placements=target)).to_local()
        value = value.full_tensor()
    for axis, layout in reversed(list(enumerate(layouts))):
        value = take(value, layout, world.shape[axis], world.coordinate[axis])
    return value


@dataclass(frozen=True)
class Misplaced:
    """A DTensor that lies elsewhere than it's needed."""

    value: DTensor
    layouts: Layouts

    def moved(self, world: World) -> torch.Tensor:
        """This rank's part of it. Collective."""
        return part(self.value, self.layouts, world)


@torch.no_grad()
def local_part(value: torch.Tensor, layouts: Layouts, world: World) -> torch.Tensor | Misplaced:
    """This rank's part of `value`, where that takes no communication."""
    if not isinstance(value, DTensor):
        return part(value, layouts, world)
    placed = value.device_mesh == world.mesh and value.placements == placements_of("", layouts, value.shape, world)
    return value.to_local() if placed else Misplaced(value, layouts)


def part_shape(shape: Sequence[int], layouts: Layouts, world: World) -> tuple[int, ...]:
    """Shape of this rank's part of a tensor of `shape`."""
    return remaining(shape, layouts, world.shape, world.coordinate)[0]


def real_part(buffer: torch.Tensor, shape: Sequence[int], layouts: Layouts, world: World) -> torch.Tensor:
    """A rank's buffer without its padding: a view."""
    for dim, length in enumerate(part_shape(shape, layouts, world)):
        buffer = buffer.narrow(dim, 0, length)
    return buffer.view(buffer.shape) if not buffer.shape else buffer


def _gather(padded: torch.Tensor, shape: Sequence[int], layouts: Layouts, world: World) -> torch.Tensor:
    """The whole tensor from every rank's padded buffer, moved as bytes: gloo refuses some types."""
    left = remaining(shape, layouts, world.shape, world.coordinate)
    for axis, layout in enumerate(layouts):
        whole = left[axis + 1]
        if not isinstance(layout, Sharded) or world.mesh is None:
            continue
        ranks, dim = world.shape[axis], layout.dim
        chunk = padded_shape(whole, layout, ranks)
        if padded.shape != chunk:  # what an axis before has joined
            padded = torch.cat(
                [padded, padded.new_zeros((*chunk[:dim], chunk[dim] - padded.shape[dim], *chunk[dim + 1 :]))], dim
            )
        flat = padded.contiguous().reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(flat) for _ in range(ranks)]
        dist.all_gather(parts, flat, group=world.group(axis))
        lengths = [b - a for a, b in (bounds(whole[dim], ranks, r) for r in range(ranks))]
        pieces = [p.view(padded.dtype).view(chunk).narrow(dim, 0, n) for p, n in zip(parts, lengths, strict=True)]
        padded = torch.cat(pieces, dim)
    return padded


# ----------------------------------------------------------------------------------------------------- memory


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for `shape`, its dims in the order of the strides `like`."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[dim] = step
        step *= max(int(shape[dim]), 1)
    return tuple(strides)


def _dense(x: torch.Tensor) -> bool:
    return (
        torch.empty_like(x, device="meta").stride() == x.stride()
    )  # preserve_format keeps strides only of dense tensors


def _true_stride(x: torch.Tensor) -> tuple[int, ...]:
    """The strides to report: the tensor's own, or dense ones where it's expanded and couldn't be written to."""
    expanded = any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))
    return dense_stride(x.shape, x.stride()) if expanded else tuple(x.stride())


def _allocate(
    shape: Sequence[int],
    stride: Sequence[int],
    layouts: Layouts,
    world: World,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:
    shape = buffer_shape(shape, layouts, world.shape, world.coordinate)
    return torch.empty_strided(shape, dense_stride(shape, stride), dtype=dtype, device=device or world.device).zero_()
