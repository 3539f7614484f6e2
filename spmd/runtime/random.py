"""Draws: which generator state a step draws from, so that all ranks draw the numbers of eager (contract C5).

Without a seed these are the numbers that the first rank's default generators would give. Where the ranks' generators
are in one state the step draws from them. Where they aren't, the others run it from the first rank's state, and get
their own back afterwards. What they ran from is remembered as a shadow: as long as it keeps up with the first rank's
generator nothing needs to be sent.

With a seed the step has a generator state of its own, which advances from call to call; the user's stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from spmd.runtime.agreement import Agreement, Votes
from spmd.runtime.digest import BITS

State = tuple[torch.Tensor, ...]  # one uint8 state a device type


class Draws:
    """The random state of one compiled function.

    In each call: add `ballot()` to the vote, run the program within `around()`, and in it call `settle(votes)` before
    the first number is drawn.
    """

    def __init__(self, agreement: Agreement, seed: int | None = None) -> None:
        device = agreement.world.device
        kind = device.type if device is not None else _accelerator()
        self.kinds = ("cpu",) if kind in (None, "cpu") else ("cpu", kind)
        self.agreement = agreement
        self.own: State | None = None  # to be put back when the step is over
        self.shadow: State | None = None if seed is None else self._seeded(seed)
        self.seeded = seed is not None

    def ballot(self) -> list[int]:
        """What the ranks compare: the state of the default generators, and of those that the step draws from."""
        if self.seeded:
            return [0, _digest(self.shadow)]
        current = _digest(self._read())
        lagging = self.shadow is not None and self.agreement.world.rank > 0
        return [current, _digest(self.shadow) if lagging else current]

    @contextmanager
    def around(self) -> Iterator[None]:
        """Puts the user's generators back when the step is over, or has failed, if `settle` replaced them."""
        try:
            yield
        except BaseException:
            if self.own is not None:
                self._write(self.own)
            self.own = None
            raise
        if self.own is not None:
            self.shadow = self._read()
            self._write(self.own)
            self.own = None

    def settle(self, votes: Votes) -> None:
        """Install the agreed state. `votes` are of the ballot. Collective if the first rank's state must be sent."""
        if self.seeded:
            if not votes.agreed(1, 2):
                self._send()
            self._install()
        elif votes.agreed(0, 1):
            self.shadow = None
        else:
            if not votes.agreed(1, 2):
                self._send()
            if self.agreement.world.rank > 0:
                self._install()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The seeded state, by device type."""
        assert self.shadow is not None
        return {kind: state.clone() for kind, state in zip(self.kinds, self.shadow, strict=True)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.shadow = tuple(state[kind].clone() for kind in self.kinds)

    def _install(self) -> None:
        assert self.shadow is not None
        self.own = self._read()
        self._write(self.shadow)

    def _send(self) -> None:
        """Give the first rank's state to all."""
        mine = (self.shadow if self.seeded else self._read()) if self.agreement.world.rank == 0 else None
        first = self.agreement.objects(mine)[0]
        if self.agreement.world.rank > 0:
            self.shadow = first

    def _read(self) -> State:
        return tuple(
            torch.get_rng_state() if kind == "cpu" else torch.get_device_module(kind).get_rng_state()
            for kind in self.kinds
        )

    def _write(self, state: State) -> None:
        for kind, value in zip(self.kinds, state, strict=True):
            if kind == "cpu":
                torch.set_rng_state(value)
            else:
                torch.get_device_module(kind).set_rng_state(value)

    def _seeded(self, seed: int) -> State:
        return tuple(torch.Generator(kind).manual_seed(seed).get_state() for kind in self.kinds)


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def _digest(state: State | None) -> int:
    assert state is not None
    digest = hashlib.blake2b(digest_size=8)
    for part in state:
        digest.update(part.numpy().data)
    return int.from_bytes(digest.digest(), "little") >> (64 - BITS)
