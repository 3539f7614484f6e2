"""Graph passes: rewrites of a rank's program."""

from spmd.passes.adapt import Adapted, Rewrite
from spmd.passes.base import GraphPass, Numerics
from spmd.passes.bucket import Bucket
from spmd.passes.dedup import Dedup
from spmd.passes.fuse import Fuse
from spmd.passes.overlap import Overlap
from spmd.passes.pipeline import PassPipeline
from spmd.passes.regather import Regather

__all__ = [
    "Adapted",
    "Bucket",
    "Dedup",
    "Fuse",
    "GraphPass",
    "Numerics",
    "Overlap",
    "PassPipeline",
    "Regather",
    "Rewrite",
]
