"""What the forkserver imports once, so that every worker forked from it starts warm."""

import contextlib

import functorch  # type: ignore[import-untyped]  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes  # noqa: F401

with contextlib.suppress(Exception):  # a broken package fails in the tests that import it, not here
    import spmd  # noqa: F401
