"""What collectives cost: figures that modes choose by."""

from spmd.cost.collectives import Link, link_of, seconds

__all__ = ["Link", "link_of", "seconds"]
