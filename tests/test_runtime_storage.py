"""Storage on real ranks: parts, padding, strides, gathers, in every type."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from spmd.errors import PlacementError
from spmd.runtime.storage import Storage, dense_stride, layouts_of
from spmd.runtime.world import World as Ranks
from spmd.sharding.layout import R, Sharded, bounds, shard, state_shard, take
from tests.oracle.world import World

SHAPES = [(), (1,), (7,), (8, 3), (3, 8), (5, 4, 3), (0, 4), (2, 9)]
TYPES = [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]


def _values(shape, dtype):
    n = torch.Size(shape).numel()
    return (torch.arange(n) % 3).reshape(shape).to(dtype)


def _keeps_and_gathers() -> None:
    ranks = Ranks.of()
    for shape in SHAPES:
        for dtype in TYPES:
            whole = _values(shape, dtype)
            layout = state_shard(shape, ranks.size)
            storage = Storage.of("w", whole.clone(), (layout,), ranks)
            expected = take(whole, layout, ranks.size, ranks.rank)
            local = storage.tensor.to_local() if ranks.mesh is not None else storage.tensor
            assert local.shape == expected.shape and local.dtype == dtype
            assert torch.equal(
                local.view(torch.uint8) if local.dim() else local,
                expected.view(torch.uint8) if local.dim() else expected,
            )
            assert storage.tensor.shape == whole.shape and storage.tensor.stride() == whole.stride()
            full = storage.full()
            assert full.stride() == whole.stride() and torch.equal(
                full.float().nan_to_num() if not dtype.is_complex else full,
                whole.float() if not dtype.is_complex else whole,
            )
            if isinstance(layout, Sharded):  # padding is there, is zero, and the DTensor can't reach it
                length = bounds(shape[layout.dim], ranks.size, ranks.rank)
                padding = storage.buffer.narrow(
                    layout.dim, length[1] - length[0], storage.buffer.shape[layout.dim] - (length[1] - length[0])
                )
                assert not padding.to(torch.complex64).any()
                if dtype == torch.float64 and ranks.mesh is not None:
                    with torch.no_grad():
                        storage.tensor.fill_(5.0)
                        storage.tensor.add_(1.0)
                    assert bool((storage.local == 6).all()) and not padding.any()
                    assert torch.equal(storage.full(), torch.full_like(whole, 6.0))


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_parts_come_back_whole_in_every_shape_and_type(world: World, W: int) -> None:
    world.run(_keeps_and_gathers, W)


def _strides() -> None:
    ranks = Ranks.of()
    for whole in (
        torch.randn(8, 6).t(),
        torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last),
        torch.randn(9, 4)[:, :2],
        torch.randn(4, 1).expand(4, 3),
    ):
        parameter = nn.Parameter(whole)
        for layout in (R, *(shard(d, n) for d, n in enumerate(whole.shape))):
            storage = Storage.of("w", parameter, (layout,), ranks)
            expanded = 0 in whole.stride()
            assert expanded or storage.tensor.stride() == whole.stride()
            assert expanded or storage.buffer.stride() == dense_stride(storage.buffer.shape, whole.stride())
            if layout is R and not expanded and whole._base is None:
                assert storage.buffer.data_ptr() == parameter.data_ptr()  # taken over, not copied
            assert torch.equal(storage.full(), whole.detach())
            assert isinstance(storage.tensor, nn.Parameter) and storage.tensor.requires_grad


@pytest.mark.parametrize("W", [2, 3])
def test_strides_of_transposed_and_channels_last_tensors_are_kept(world: World, W: int) -> None:
    world.run(_strides, W)


def _loads() -> None:
    ranks = Ranks.of()
    whole = torch.randn(7, 5)
    storage = Storage.of("w", torch.zeros(7, 5), (shard(0, 7),), ranks)
    address = storage.buffer.data_ptr()
    other = Storage.of("v", whole.clone(), (shard(1, 5),), ranks)
    for value in (whole, other.tensor, Storage.of("u", whole.clone(), (R,), ranks).tensor, whole.double()):
        storage.load(torch.zeros(7, 5))
        storage.load(value)
        assert torch.equal(storage.full(), whole)
    assert storage.buffer.data_ptr() == address == storage.tensor.to_local().data_ptr()


@pytest.mark.parametrize("W", [2, 3, 4])
def test_load_takes_whole_tensors_and_dtensors_of_any_placement(world: World, W: int) -> None:
    world.run(_loads, W)


def _placements() -> None:
    ranks = Ranks.of()
    storage = Storage.of("w", torch.zeros(6, 4), (shard(1, 4),), ranks)
    assert storage.tensor.placements == (Shard(1),)
    assert layouts_of(storage.tensor) == (shard(1, 4),)
    assert Storage.of("w", torch.zeros(6, 4), (R,), ranks).tensor.placements == (Replicate(),)
    with pytest.raises(PlacementError, match=r"emb\.weight"):
        Storage.of("emb.weight", torch.zeros(6, 4), (Sharded(0, 2, 3, 1),), ranks)
    grouped = Sharded(0, 1, 2, 3)  # two groups of three rows on two ranks: the cuts of S(0)
    assert Storage.of("w", torch.zeros(6, 4), (grouped,), ranks).tensor.placements == (Shard(0),)
    adopted = DTensor.from_local(torch.ones(2, 4), ranks.mesh, [Shard(0)])
    kept = Storage.adopt("w", adopted, layouts_of(adopted), ranks)
    assert kept.tensor is adopted and adopted.to_local().data_ptr() == kept.buffer.data_ptr()


def test_placements_are_torchs_own_and_others_are_refused(world: World) -> None:
    world.run(_placements, 2)


def _two_axes() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    ranks = Ranks.of(init_device_mesh("cpu", (2, 2)))
    assert ranks.rank == ranks.coordinate[0] * 2 + ranks.coordinate[1] and ranks.size == 4
    whole = torch.randn(5, 3)
    left = shard(0, 3 - ranks.coordinate[1])  # the first axis splits what the second leaves
    for layouts in ((R, shard(0, 5)), (shard(1, 3), shard(0, 5)), (shard(0, 5), R), (left, shard(0, 5))):
        storage = Storage.of("w", whole.clone(), layouts, ranks)
        assert torch.equal(storage.full(), whole)
        assert torch.equal(storage.tensor.full_tensor(), whole)
        assert layouts_of(storage.tensor) == layouts
        storage.load(whole + 1)
        assert torch.equal(storage.tensor.full_tensor(), whole + 1)
    with pytest.raises(PlacementError, match="placement can't be kept"):
        layouts_of(DTensor.from_local(torch.ones(2, 3), ranks.mesh, [Shard(0), Shard(0)], run_check=False))


def test_two_mesh_axes(world: World) -> None:
    world.run(_two_axes, 4)
