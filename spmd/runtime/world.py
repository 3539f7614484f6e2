"""World: the ranks that a step runs on, this rank's place among them, and a CPU side group for control messages."""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmd.errors import StateError
from spmd.graph.axis import Mesh

TIMEOUT = 600.0  # seconds; torch's own default for NCCL. Ranks wait for one that writes a checkpoint, so not less.

# Making a side group is a collective, so there is one a mesh, for as long as the default group lives. The meshes hold that group: its worlds are
# dropped once there's another, or a weak key would never die.
_worlds: dict[DeviceMesh | None, World] = {}
_default: weakref.ref[dist.ProcessGroup] | None = None


@dataclass(frozen=True, eq=False)
class World:
    """The mesh a step runs on. Without a process group: one rank, no mesh, any device."""

    mesh: DeviceMesh | None
    device: torch.device | None  # where tensors live; None: wherever the user put them
    shape: tuple[int, ...]  # ranks along each mesh axis
    coordinate: tuple[int, ...]  # this rank's place
    side: dist.ProcessGroup | None  # gloo, over the mesh's ranks
    members: tuple[int, ...]  # global ranks in mesh order (row-major)
    timeout: float  # seconds the side group waits for a rank

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        """Index of this rank in mesh order, which is the order of the batch's shares."""
        return self.place([True] * len(self.shape))[0]

    @property
    def part(self) -> tuple[int, int]:
        """Which of how many parts of the mesh this rank is in: those that differ in nothing but their place on the first axis run one program."""
        return self.place([axis > 0 for axis in range(len(self.shape))])

    def place(self, along: Sequence[bool]) -> tuple[int, int]:
        """This rank's place, in mesh order, among how many along these axes."""
        index, count = 0, 1
        for place, length, counts in zip(self.coordinate, self.shape, along, strict=True):
            if counts:
                index, count = index * length + place, count * length
        return index, count

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the mesh's axes, where they have any."""
        return (self.mesh.mesh_dim_names or ()) if self.mesh is not None else ()

    @property
    def view(self) -> Mesh:
        """What the compiler needs to know of it."""
        every = range(len(self.shape))
        groups = tuple(self.group(i).group_name if self.mesh is not None else f"{i}" for i in every)
        device = self.device.type if self.device is not None else "cpu"
        return Mesh(self.shape, self.coordinate, groups, self.names, device)

    def group(self, axis: int) -> dist.ProcessGroup:
        """The data group along a mesh axis."""
        assert self.mesh is not None
        return self.mesh.get_group(axis)

    @staticmethod
    def of(mesh: DeviceMesh | None = None, timeout: float = TIMEOUT) -> World:
        """The world of `mesh`. Collective over the mesh the first time.

        Without a mesh: a 1-D mesh over the default group, which is made from torchrun's environment if there is
        none; one process without such an environment needs no group.

        Raises:
            StateError: this rank isn't in the mesh, or torchrun's environment is incomplete.
        """
        if not dist.is_initialized() and (mesh is not None or not _join_from_environment(timeout)):
            return World(None, None, (1,), (0,), None, (0,), timeout)
        global _default
        default = dist.group.WORLD
        assert default is not None
        if _default is None or _default() is not default:
            _worlds.clear()
            _default = weakref.ref(default)
        if mesh not in _worlds:
            _worlds[mesh] = _make(mesh or init_device_mesh(_device_type(), (dist.get_world_size(),)), timeout)
        return _worlds[mesh]


def _make(mesh: DeviceMesh, timeout: float) -> World:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise StateError(f"rank {dist.get_rank()} isn't in the mesh {mesh}; only the mesh's ranks may call the step")
    members = tuple(mesh.mesh.flatten().tolist())
    side = dist.new_group(
        list(members),
        timeout=timedelta(seconds=timeout),
        backend="gloo",
        use_local_synchronization=len(members) != dist.get_world_size(),  # ranks outside don't take part
    )
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    return World(mesh, device, tuple(mesh.shape), tuple(coordinate), side, members, timeout)


def _join_from_environment(timeout: float) -> bool:
    """Make the default group from torchrun's variables. False if there are none."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise StateError(f"RANK and WORLD_SIZE are set without {' and '.join(missing)}; start the ranks with torchrun")
    kind = _own_accelerator()
    backend = "gloo" if kind is None else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    if kind is not None:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(seconds=max(timeout, TIMEOUT)))
    atexit.register(_leave)
    return True


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_accelerator() -> str | None:
    """Type of the accelerator that is this rank's alone and has a communication backend, if there is one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or int(os.environ.get("LOCAL_RANK", "0")) >= torch.accelerator.device_count():
        return None
    usable = dist.is_backend_available(dist.get_default_backend_for_device(found.type))
    return found.type if usable else None


def _device_type() -> str:
    """Device type of the default group: the accelerator where every rank has one and its own backend, else the CPU."""
    served = dict(part.split(":") for part in dist.get_backend_config().split(","))
    kind = _own_accelerator()
    usable = kind is not None and served.get(kind) == dist.get_default_backend_for_device(kind)
    if "cpu" not in served:  # an accelerator's group: every rank has one, and there's no CPU backend to ask by
        return next(iter(served))
    every = torch.tensor(int(usable))
    dist.all_reduce(every, dist.ReduceOp.MIN)
    return kind if kind is not None and int(every) else "cpu"
