"""Helpers to look into a compiled step."""

from spmd.debug.lockstep import run_lockstep

__all__ = ["run_lockstep"]
