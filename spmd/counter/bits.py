"""Bits: the one source of counter-based random numbers, as the op `spmd::random_bits`.

A word is a keyed bijection of the element's position in the global tensor: two rounds of xor with a key, then multiply and xorshift. The rounds
are lowbias32 and a relative of it, the 32-bit mixes of this form with the least avalanche bias that Chris Wellons' search found
(0.174 and 0.165, where MurmurHash3's finalizer has 0.265; https://github.com/skeeto/hash-prospector).

Positions come as `size`, `stride` and `offset`: those of the elements that `as_strided` would take from the global tensor laid out contiguously. So a
rank's part of any layout, on any number of mesh axes, is described by a few numbers, and drawn without the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from spmd._torch import has_triton
from spmd.counter import keys

ROUNDS = ((16, 0x7FEB352D, 15, 0x846CA68B, 16), (16, 0xA812D533, 15, 0xB278E4AD, 17))
BLOCK = 1 << 16  # words a thread works on at a time, so that they stay in its cache
LOW = (1 << 32) - 1

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("random_bits(Tensor key, int stream, SymInt[] size, SymInt[]? stride=None, SymInt offset=0) -> Tensor")
op = torch.ops.spmd.random_bits.default


Words = torch.Tensor | np.ndarray[Any, np.dtype[np.uint32]]  # int32 tensors, which wrap just as well, or uint32 arrays


def scramble(x: Any, both: tuple[Any, Any]) -> None:
    """The mix, in place on words that hold the lower 32 bits of positions."""
    for key, (a, m, b, n, c) in zip(both, ROUNDS, strict=True):
        x ^= like(x, key)
        x ^= shifted(x, a)
        x *= like(x, m)
        x ^= shifted(x, b)
        x *= like(x, n)
        x ^= shifted(x, c)


def like(x: Words, word: Any) -> Any:
    """A word as the kind of number that `x` takes."""
    if isinstance(x, torch.Tensor):
        return keys.signed(word, 32) if isinstance(word, int) else word
    return np.uint32(word & LOW) if isinstance(word, int) else word.numpy().view(np.uint32)


def shifted(x: Words, shift: int) -> Words:
    """A shift to the right that brings in zeros: signed tensors bring in the sign."""
    return (x >> shift).bitwise_and_((1 << (32 - shift)) - 1) if isinstance(x, torch.Tensor) else x >> np.uint32(shift)


def elementwise(key: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """The definition of the op for a key with its stream, in elementwise ops alone, which a compiler fuses."""
    position: int | torch.Tensor = offset
    for d, (n, s) in enumerate(zip(size, stride, strict=True)):
        steps = torch.arange(n, device=key.device).mul(s)
        position = steps.view(-1, *[1] * (len(size) - 1 - d)) + position
    if not isinstance(position, torch.Tensor):
        position = torch.full((), offset, dtype=torch.int64, device=key.device)
    page = 0 if last(size, stride, offset) <= LOW else position >> 32
    words = position.to(torch.int32)
    scramble(words, keys.words(key, page))
    return words


def blocked(key: int, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """The same, block by block: a third of the time, for a processor with caches. One thread is served best by numpy, many by torch."""
    out = torch.empty(size, dtype=torch.int32)
    if out.numel() == 0:
        return out
    threads = torch.get_num_threads()
    starts, run = runs(size, stride, offset)
    block = BLOCK * threads
    rows, columns = max(1, block // run), min(run, block)
    table, counting = out.view(-1, run).numpy().view(np.uint32), np.arange(columns, dtype=np.uint32)
    both = keys.words(key)
    for r in range(0, len(starts), rows):
        for c in range(0, run, columns):
            tile = table[r : r + rows, c : c + columns]
            start = starts[r : r + rows, None] + c
            np.add(counting[: tile.shape[1]], start.astype(np.uint32), out=tile)
            if start[-1, 0] + tile.shape[1] > LOW:
                page = torch.from_numpy((start + counting[: tile.shape[1]]) >> 32)
                scramble(tile, keys.words(key, page))
            else:
                scramble(tile if threads <= 2 else torch.from_numpy(tile.view(np.int32)), both)
    return out


def runs(size: Sequence[int], stride: Sequence[int], offset: int) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """The positions as runs of consecutive ones, in ascending order: where each begins, and their common length."""
    run, outer = 1, len(size)
    while outer and (size[outer - 1] == 1 or stride[outer - 1] == run):
        outer -= 1
        run *= size[outer]
    starts = np.array([offset], dtype=np.int64)
    for n, s in zip(size[:outer], stride, strict=False):
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * s).ravel()
    return starts, run


def dense(size: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    return [math.prod(size[d + 1 :]) for d in range(len(size))]


def last(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    return offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


@functools.cache
def fused() -> Callable[..., torch.Tensor]:
    """One kernel where there's a compiler for it."""
    return torch.compile(elementwise, dynamic=True) if has_triton() else elementwise


Positions = Sequence[int]


def _cpu(
    key: torch.Tensor, stream: int, size: Positions, stride: Positions | None = None, offset: int = 0
) -> torch.Tensor:
    return blocked(keys.streamed(int(key), stream), size, dense(size) if stride is None else stride, offset)


def _cuda(
    key: torch.Tensor, stream: int, size: Positions, stride: Positions | None = None, offset: int = 0
) -> torch.Tensor:
    return fused()(keys.streamed(key, stream), size, dense(size) if stride is None else stride, offset)


def _shape(key: torch.Tensor, stream: int, size: Sequence[int], *position: Any) -> torch.Tensor:
    return key.new_empty(size, dtype=torch.int32)


torch.library.register_fake("spmd::random_bits", _shape, lib=_library)
_library.impl("random_bits", _cpu, "CPU")
_library.impl("random_bits", _cuda, "CUDA")
