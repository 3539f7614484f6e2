"""Agreement: what ranks must have in common is compared over the CPU side group (contract C4), so that a difference
is an error on every rank and not a hang."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from spmd.errors import AgreementError, Offence
from spmd.runtime.digest import prefix_digests, tensor_digest, text_digest
from spmd.runtime.world import World

Sync = Literal["broadcast", "error"]
ABSTAINS = -(2**62)  # below all votes


@dataclass(frozen=True)
class Votes:
    """Lowest and highest value over the ranks, for each value of a vote."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    def agreed(self, start: int = 0, stop: int | None = None) -> bool:
        """Whether all ranks gave the same values[start:stop]."""
        return self.low[start:stop] == self.high[start:stop]


class Pending:
    """A vote that is under way."""

    def __init__(self, agreement: Agreement, ballot: torch.Tensor, work: dist.Work | None) -> None:
        self._agreement, self._ballot, self._work = agreement, ballot, work

    def wait(self) -> Votes:
        """The votes of all ranks. Waits once; later calls return at once.

        Raises:
            AgreementError: a rank doesn't answer.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._agreement.missing(error) from error
            self._work = None
        values = self._ballot.tolist()
        half = len(values) // 2
        return Votes(tuple(-v for v in values[half:]), tuple(values[:half]))


class Agreement:
    """Comparisons between the ranks of a world. All methods are collective; with one rank they do nothing."""

    def __init__(self, world: World) -> None:
        self.world = world

    # ------------------------------------------------------------------------------------------------- exchange

    def begin(self, values: Sequence[int | None]) -> Pending:
        """Start one vote, asynchronously. Values are below 2^62 in magnitude, equally many on every rank; None abstains."""
        high = [ABSTAINS if v is None else v for v in values]
        low = [ABSTAINS if v is None else -v for v in values]
        ballot = torch.tensor([*high, *low], dtype=torch.int64)
        work = None
        if self.world.size > 1:
            try:
                work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self.world.side, async_op=True)
            except RuntimeError as error:
                raise self.missing(error) from error
        return Pending(self, ballot, work)

    def objects(self, x: Any) -> list[Any]:
        """Every rank's picklable `x`, in mesh order."""
        world = self.world
        if world.size == 1:
            return [x]
        found: list[Any] = [None] * world.size
        try:
            dist.all_gather_object(found, x, group=world.side)
        except RuntimeError as error:
            raise self.missing(error) from error
        return [found[i] for i in _group_order(world.members)]

    def missing(self, error: Exception) -> AgreementError:
        """The error for a rank that went away or didn't come."""
        world, text = self.world, str(error).strip().splitlines()
        return AgreementError(
            Offence(
                f"rank {world.rank} of {world.size} got no answer from the other ranks: one of them has ended, failed, "
                f"or didn't call this step within {world.timeout:g} s",
                tried=text[0] if text else "",
                remedy="look at the other ranks' output; every rank must call the compiled step equally often",
            )
        )

    # ------------------------------------------------------------------------------------------------- comparisons

    def resolve(self, error: Exception | None, key: str) -> None:
        """Leave a point that all ranks reached with success and the same `key`, or fail on all of them.

        Raises:
            Exception: this rank's own `error`, where it has one.
            AgreementError: another rank failed, or the keys differ.
        """
        mine = None if error is None else f"{type(error).__name__}: {error}"
        answers = self.objects((mine, key))
        if error is not None:
            raise error
        failed = [f"{_ranks([r])}: {text}" for r, (text, _) in enumerate(answers) if text is not None]
        if failed:
            raise AgreementError(
                Offence(text, remedy="this rank is fine; it stops because the step runs on all ranks or none")
                for text in failed
            )
        sides = _sides([k for _, k in answers])
        if len(sides) > 1:
            raise AgreementError(
                Offence(f"{_ranks(ranks)}: {text}", remedy="make these equal on all ranks" if i == 0 else "")
                for i, (text, ranks) in enumerate(sides)
            )

    def same_program(self, lines: Sequence[str], stages: Sequence[tuple[str, str]] = (), shared: str = "") -> int:
        """Compare programs, one line a node; on a mesh of several axes among the ranks along the first. Returns a digest of all of them.

        stages: (pass, digest of the program after it), to tell which pass made them differ.
        shared: the collectives of the other axes, in order: all ranks must agree on them.

        Raises:
            AgreementError: naming the first differing node, with each side's line.
        """
        mine, parts = self.world.part
        ballot = [text_digest(lines) if part == mine else None for part in range(parts)]
        votes = self.begin([*ballot, text_digest([shared])]).wait()
        differ = [part for part in range(parts) if votes.low[part] != votes.high[part]]
        if differ:
            raise self._differing(lines if differ[0] == mine else None, stages)
        if not votes.agreed(parts):
            self.resolve(None, f"its collectives along the mesh's later axes are {shared}")
        return text_digest(map(str, votes.high))

    def _differing(self, lines: Sequence[str] | None, stages: Sequence[tuple[str, str]]) -> AgreementError:
        """Find the first line in which programs differ; ranks without `lines` only take part."""
        prefixes = list(prefix_digests(lines or ()))
        low, high = 0, self.begin([None if lines is None else len(lines)]).wait().high[0]
        while low + 1 < high:  # lines [0, low) are equal everywhere, [0, high) aren't
            middle = (low + high) // 2
            mine = prefixes[middle - 1] if middle <= len(prefixes) else 0
            equal = self.begin([None if lines is None else mine]).wait().agreed()
            low, high = (middle, high) if equal else (low, middle)
        line = None if lines is None else lines[low] if low < len(lines) else "the program ends here"
        answers = self.objects((line, tuple(stages)))
        sides = _sides([line for line, _ in answers])
        what = [
            f"the ranks' programs differ first at node {low}:",
            *(f"        {_ranks(ranks)}: {text}" for text, ranks in sides),
        ]
        remedy = (
            "a branch or size that depends on the rank can't be in the step; pass it as an argument, equal on all ranks"
        )
        if (guilty := _guilty([found for line, found in answers if line is not None])) is not None:
            what.append(f"        they were equal before the pass {guilty!r}")
            remedy = f'leave it out: passes="default,-{guilty}"'
        return AgreementError(Offence("\n".join(what), remedy=remedy))

    def same_state(self, tensors: Iterable[tuple[str, torch.Tensor | None]], sync: Sync = "broadcast") -> list[str]:
        """Compare whole tensors (initial parameters, buffers, states). Where ranks differ all get the first rank's.

        Returns the names of those that differed; the first rank warns of them.

        Raises:
            AgreementError: they differ and `sync` is "error".
        """
        named = list(tensors)
        votes = self.begin(
            [0 if x is None else tensor_digest(x) for _, x in named] if self.world.size > 1 else []
        ).wait()
        different = [x for x, low, high in zip(named, votes.low, votes.high, strict=False) if low != high]
        if not different:
            return []
        first, count = different[0][0], len(different)
        what = f"{first} starts with other values on some ranks" + (
            f", and so do {count - 1} more tensors" if count > 1 else ""
        )
        if sync == "error":
            raise AgreementError(
                Offence(
                    what,
                    fqn=first,
                    remedy='seed every rank alike before building the model; sync="broadcast" sends those of rank 0',
                )
            )
        for _, tensor in different:
            if tensor is not None:
                self.broadcast(tensor)
        if self.world.rank == 0:
            warnings.warn(
                f"spmd: {what}; all ranks got those of rank 0. Seed every rank alike to avoid it.", stacklevel=2
            )
        return [name for name, _ in different]

    def same_inputs(self, tensors: Iterable[tuple[str, torch.Tensor]], copies: tuple[int, int] | None = None) -> None:
        """Compare inputs that are declared replicated; with `copies`, shares of the batch among the ranks that pass the same one.

        Raises:
            AgreementError: naming all that differ.
        """
        named = list(tensors)
        mine, shares = copies or (0, 1)
        ballot = [tensor_digest(x) if share == mine else None for share in range(shares) for _, x in named]
        votes = self.begin(ballot).wait()
        names = [name for name, _ in named] * shares
        wrong = dict.fromkeys(name for name, low, high in zip(names, votes.low, votes.high, strict=True) if low != high)
        if not wrong:
            return
        what = "a replicated input has other values on some ranks"
        remedy = "pass equal values on all ranks, or take it off replicated_inputs if each rank passes its share"
        if copies is not None:
            what = "ranks that work on the same share of the batch pass other values"
            remedy = "give all ranks along an axis that doesn't split the batch the same samples"
        raise AgreementError(Offence(what, fqn=name, remedy=remedy) for name in wrong)

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` with the first rank's: along one mesh axis after the other, as bytes."""
        dense = tensor.detach().contiguous()
        flat = dense.reshape(-1).view(torch.uint8)
        for axis, ranks in enumerate(self.world.shape):
            if ranks > 1:
                dist.broadcast(flat, group=self.world.group(axis), group_src=0)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)


def _group_order(members: Sequence[int]) -> list[int]:
    """Index in the side group (which sorts its ranks) of each rank in mesh order."""
    order = sorted(members)
    return [order.index(rank) for rank in members]


def _guilty(stages: Sequence[Sequence[tuple[str, str]]]) -> str | None:
    """The first stage after which the ranks' digests differ, if they agree on one before it."""
    for i, those in enumerate(zip(*stages, strict=False)):
        if len(set(those)) > 1:
            return those[0][0] if i and len({name for name, _ in those}) == 1 else None
    return None


def _sides(texts: Sequence[str | None]) -> list[tuple[str, list[int]]]:
    """Different texts, each with the ranks that have it."""
    sides: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            sides.setdefault(text, []).append(rank)
    return list(sides.items())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
