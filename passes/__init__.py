"""Graph passes: rewrites of a rank's program."""

from spmd.passes.base import GraphPass, PassPipeline

__all__ = ["GraphPass", "PassPipeline"]
