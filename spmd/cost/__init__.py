"""What compute and collectives cost: figures that modes choose by and reports tell."""

from spmd.cost.collectives import Link, link_of, seconds
from spmd.cost.compute import Device, compute_seconds, device_of, work

__all__ = ["Device", "Link", "compute_seconds", "device_of", "link_of", "seconds", "work"]
