"""Vote: how the ranks agree on one call. Each casts its vote where its program settles, or where it fails before that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from spmd.runtime.agreement import Agreement, Votes
from spmd.runtime.digest import tensor_digest, text_digest
from spmd.runtime.random import Draws

if TYPE_CHECKING:
    from spmd.runtime.counter import CounterDraws
    from spmd.runtime.programs import Program


class Elsewhere(Exception):
    """A rank has no program for this call."""


class Vote:
    """This rank's vote in one call. Until it's cast nothing has happened that another rank could notice."""

    def __init__(
        self,
        agreement: Agreement,
        draws: Draws | CounterDraws,
        program: Program | None,
        leaves: Sequence[Any],
        copies: tuple[int, int] | None = None,
    ) -> None:
        """`copies`: which of how many shares of the batch this rank passes, where others pass the same one."""
        self.agreement, self.draws, self.program, self.leaves = agreement, draws, program, leaves
        self.copies = copies
        self.open = True

    def settle(self, moved: str = "") -> None:
        """Return once every rank has come here with the same program and the same inputs. Later calls return at once.

        moved: inputs that this rank must redistribute, in words; all ranks do so or none.

        Raises:
            Elsewhere: a rank has no program, so all compile.
            AgreementError: a rank failed, or they differ.
        """
        if not self.open:
            return
        shared = self.program.shared_inputs(self.leaves) if self.program else []
        share = self.program.share(self.leaves) if self.program and self.copies else []
        today = "; ".join(filter(None, (self.program.numbers_text(self.leaves), moved))) if self.program else ""
        digests = [digest(shared), text_digest([today])]
        votes = self._cast([*digests, *self.draws.ballot(), *self.own(digest(share))])
        if votes.high[1]:
            self.agreement.resolve(None, "")
        if not votes.agreed(2, 3):
            assert self.program is not None
            self.agreement.same_program(self.program.lines, self.program.stages, self.program.moves)
        if not votes.agreed(3, 4):
            self.agreement.same_inputs(shared)
        if not votes.agreed(4, 5):
            self.agreement.resolve(None, today)
        if not votes.agreed(7):
            self.agreement.same_inputs(share, self.copies)
        self.draws.settle(Votes(votes.low[5:7], votes.high[5:7]))

    def fail(self, error: Exception) -> None:
        """Let the other ranks hear of an error, and raise it."""
        if self.open:
            self._cast([0, 0, 0, 0, *self.own(0)], failed=True)
            self.agreement.resolve(error, "")
        raise error

    def own(self, value: int) -> list[int | None]:
        """A vote among the ranks that pass the same share of the batch."""
        mine, shares = self.copies or (0, 0)
        return [value if share == mine else None for share in range(shares)]

    def _cast(self, ballot: Sequence[int | None], failed: bool = False) -> Votes:
        self.open = False
        key = self.program.key if self.program else 0
        votes = self.agreement.begin([int(self.program is None), int(failed), key, *ballot]).wait()
        if votes.high[0]:
            raise Elsewhere  # an error of this rank's own shows again in the program that all have then
        return votes


def digest(named: Sequence[tuple[str, torch.Tensor]]) -> int:
    return text_digest([str(tensor_digest(x)) for _, x in named]) if named else 0
