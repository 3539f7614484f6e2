"""Keys: 64 bits that stand for (seed, step), mixed with a stream and a page of positions into the two words that key one mix of bits.

Everything here works on Python integers, which are wrapped to 64 bits, and on int64 tensors, which wrap by themselves.
"""

from __future__ import annotations

from typing import TypeVar

import torch

Word = TypeVar("Word", int, torch.Tensor)

WEYL = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: splitmix64's increment
WORDS = 256  # streams a draw may use; stream = draw * WORDS + word


def signed(x: int, bits: int = 64) -> int:
    """`x` modulo 2^bits as a two's complement integer, which is what a tensor holds."""
    half = 1 << (bits - 1)
    return ((x + half) & ((half << 1) - 1)) - half


def wrap(x: Word) -> Word:
    return x if isinstance(x, torch.Tensor) else signed(x)


def mix(z: Word) -> Word:
    """A bijection of 64 bits in which every bit of the input moves every bit of the output.

    The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; Stafford's variant 13).
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = wrap((z ^ above(z, shift)) * signed(factor))
    return z ^ above(z, 31)


def above(z: Word, shift: int) -> Word:
    """A shift to the right that brings in zeros."""
    return (z >> shift) & ((1 << (64 - shift)) - 1)


def key_of(seed: int, step: int) -> int:
    """The key of one step."""
    return mix(signed(mix(signed(seed)) + WEYL * (step + 1)))


def streamed(key: Word, stream: int) -> Word:
    """The key of one stream."""
    return mix(wrap(key + signed(WEYL * (stream + 1))))


def words(key: Word, page: Word | int = 0) -> tuple[Word, Word]:
    """The two 32-bit words that key the mix. `page`: the upper 32 bits of the positions."""
    both = mix(wrap(key + page * signed(WEYL)))
    if isinstance(both, torch.Tensor):
        return (both >> 32).to(torch.int32), both.to(torch.int32)
    return signed(both >> 32, 32), signed(both, 32)
