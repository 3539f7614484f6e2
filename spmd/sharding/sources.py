"""Where the rule of an op call comes from: the first source that knows the op decides.

1. what a user has registered;
2. our table, and for what other mesh axes move a table of their own;
3. DTensor's strategies, for the ops for which the audit has found them true (`python -m tests.audit`);
4. discovery, for custom ops that only compute new tensors;
5. none: the inputs are replicated, which is always right. `explain` lists what that costs.
"""

from __future__ import annotations

from spmd._torch import OpOverload
from spmd.graph.random import is_random
from spmd.sharding import categories, discover, dtensor
from spmd.sharding.collectives import COLLECTIVES
from spmd.sharding.listed import listed
from spmd.sharding.register import registered, registered_rule
from spmd.sharding.rule import Call, Rule
from spmd.sharding.table import TABLE

TORCHS_OWN = ("aten", "prims", "prim", "c10d", "_c10d_functional", "_dtensor", "symm_mem", "higher_order", "inductor")


def rule_for(call: Call) -> Rule | None:
    """The rule of one call; None where the op has none, so that its inputs are replicated."""
    if (entry := registered(call)) is not None:
        return registered_rule(entry, call)
    custom = isinstance(call.target, OpOverload) and call.target.namespace not in TORCHS_OWN
    if entry := TABLE.get(call.name) or COLLECTIVES.get(call.name):
        return entry(call)
    if not isinstance(call.target, OpOverload):
        return None
    if is_random(call.target):
        return categories.random(call)
    if dtensor.confirmed(call.target):
        moves, linear = dtensor.candidates(call)
        return listed(call, moves, linear)
    if custom and discoverable(call.target):
        found = discover.discover(call)
        return listed(call, found.moves, found.linear) if found.moves or found.linear else None
    return None


def discoverable(op: OpOverload) -> bool:
    """Whether running `op` on parts tells what it does: it only computes new tensors."""
    schema = op._schema
    aliases = any(x.alias_info is not None for x in (*schema.arguments, *schema.returns))
    return not aliases and not schema.is_mutable and bool(schema.returns)


def why_none(call: Call) -> str:
    """Why `rule_for` has found no rule for a call. Discovery's answers are remembered, so asking again costs nothing."""
    if registered(call) is not None:
        return "the rule registered for it gives none for this call"
    if call.name in TABLE:
        return "no rule holds for these arguments"
    if not isinstance(call.target, OpOverload) or call.target.namespace in TORCHS_OWN:
        return "nobody has written its rule yet"
    if not discoverable(call.target):
        return "not tried on parts: it writes to its arguments, returns them or a view of them, or returns nothing"
    return f"tried on parts: {discover.discover(call).reason}"
