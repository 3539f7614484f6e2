"""Digests: 62-bit hashes of texts and tensors that ranks compare instead of the things themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

BITS = 62  # so that a digest and its negation fit an int64
_CHUNK = 1 << 22  # elements hashed at a time: 64 MB of temporaries
_ODD = 0x1E3779B97F4A7C15  # any odd number with well mixed bits


def text_digest(lines: Iterable[str]) -> int:
    """Digest of a text."""
    state = hashlib.blake2b(digest_size=8)
    for line in lines:
        state.update(line.encode() + b"\n")
    return int.from_bytes(state.digest(), "little") >> (64 - BITS)


def prefix_digests(lines: Iterable[str]) -> Iterator[int]:
    """Digest of the first 1, 2, ... lines."""
    state = hashlib.blake2b(digest_size=8)
    for line in lines:
        state.update(line.encode() + b"\n")
        yield int.from_bytes(state.digest(), "little") >> (64 - BITS)


@torch.no_grad()
def tensor_digest(x: torch.Tensor) -> int:
    """Digest of a tensor's shape, type and bits, the same on every device. -0.0 and 0.0 differ, equal NaNs don't.

    Bits are summed modulo 2^64, each word times an odd number of its position: a change in any one word always shows.
    """
    dense = x.detach().contiguous()
    if dense.storage_offset() * dense.element_size() % 4:  # can't be seen as 4-byte words
        dense = dense.clone()
    flat = dense.reshape(-1).view(torch.uint8)
    words = flat.numel() // 4 * 4
    total = _sum(flat[:words].view(torch.int32)) + 3 * _sum(flat[words:])
    return text_digest((str(tuple(x.shape)), str(x.dtype), str(total & (2**64 - 1))))


def _sum(words: torch.Tensor) -> int:
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), device=words.device) * (2 * _ODD) + 1
        total += int((chunk * place).sum())
    return total
