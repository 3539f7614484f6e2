"""Which nodes draw random numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx as fx


@functools.cache
def is_random(target: Any) -> bool:
    """Whether an op may draw: torch tags most of them, and the others (`random_`, `binomial`) take a generator."""
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any("Generator" in str(a.type) for a in schema.arguments)


def draws_numbers(node: fx.Node) -> bool:
    """Whether this call draws: attention may drop nothing out, and a recurrent net or an activation may not be in training."""
    if node.op != "call_function" or not is_random(node.target):
        return False
    schema: Any = getattr(node.target, "_schema", None)
    for i, a in enumerate(schema.arguments if schema is not None else ()):
        default = a.default_value if a.has_default_value() else None
        value = node.kwargs.get(a.name, node.args[i] if i < len(node.args) else default)
        if (a.name in ("dropout_p", "dropout") and value == 0) or (a.name in ("train", "training") and value is False):
            return False
    return True
