"""Ops whose strategies in DTensor the audit has found true. Written by `python -m tests.audit`; don't edit."""

TORCH = "2.13."
CONFIRMED: frozenset[str] = frozenset()
