"""The alpha-beta model of collectives: a start-up time for each message, and a time for each byte.

A ring moves (W - 1) messages for a gather or a scatter, twice that for an all-reduce, each of 1/W of the tensor; pairwise exchange moves (W - 1)
messages for an all-to-all, each of 1/W of a part (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """alpha: seconds a message takes to start. bandwidth: bytes a second and direction between two ranks."""

    alpha: float
    bandwidth: float


LINKS = {
    # NVLink 4, 450 GB/s a direction (NVIDIA H100 data sheet); about 10 us a step of NCCL's ring as its tests report small messages
    "cuda": Link(10e-6, 450e9),
    "cpu": Link(200e-6, 0.8e9),  # gloo between processes of one machine: docs/benchmarks.md, "Collectives"
}
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


def link_of(device_type: str) -> Link:
    return LINKS.get(device_type, LINKS["cuda"])


def seconds(op: str, nbytes: float, ranks: int, link: Link) -> float:
    """Time of one collective on a tensor of `nbytes`, whole.

    Raises:
        KeyError: `op` isn't a collective.
    """
    if ranks < 2:
        return 0.0
    message = nbytes / ranks / (ranks if op == "all_to_all" else 1)
    return ROUNDS[op] * (ranks - 1) * (link.alpha + message / link.bandwidth)
