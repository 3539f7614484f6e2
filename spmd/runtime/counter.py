"""The state of counter-based random numbers: a seed and the number of steps taken (contract C5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from spmd.counter.keys import key_of
from spmd.runtime.agreement import Agreement, Votes
from spmd.runtime.vote import Elsewhere


class CounterDraws:
    """Seed and step of one compiled function, and the tensors that carry their key into its programs. Used as `Draws` is.

    The ranks agree on both when a program is compiled; a call on which they differ goes there again. Without a seed, one from the first rank's
    default generator is taken then; every rank draws it, so generators that were in one state stay so.
    """

    seeded = False  # one rank by itself has nothing to settle

    def __init__(self, seed: int | None = None) -> None:
        self.seed, self.step = seed, 0
        self.keys: dict[str, torch.Tensor] = {}  # by device

    def agree(self, agreement: Agreement) -> None:
        """Take the first rank's state. Collective."""
        drawn = int(torch.randint(1 << 62, ())) if self.seed is None else self.seed
        self.seed, self.step = agreement.objects((drawn, self.step))[0]

    def ballot(self) -> list[int]:
        """What the ranks compare; as many numbers as `Draws` has."""
        return [0, self.key >> 4]

    @property
    def key(self) -> int:
        return 0 if self.seed is None else key_of(self.seed, self.step)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Within it the programs have the step's key. A step that has run is counted; one that has failed can be repeated with the same numbers."""
        for tensor in self.keys.values():
            tensor.fill_(self.key)
        yield
        self.step += 1

    def settle(self, votes: Votes) -> None:
        """Raises Elsewhere where the ranks differ: what has been drawn so far hasn't been noticed by anyone."""
        if self.seed is None or not votes.agreed(1, 2):
            raise Elsewhere

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seed, self.step = state["seed"], int(state["step"])
