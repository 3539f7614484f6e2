"""Ops of torch.linalg that capture writes otherwise, because the shape of a result depends on values."""

from __future__ import annotations

import torch


def lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    """By the pseudo-inverse: the op itself has residuals whose presence depends on the rank of `a`. Here they're NaN where `a` lacks full rank."""
    m, n = a.shape[-2:]
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    vector = b.dim() == a.dim() - 1
    right = b.unsqueeze(-1) if vector else b
    x = torch.linalg.pinv(a, rtol=rcond) @ right
    rank = torch.linalg.matrix_rank(a, rtol=rcond)
    left = (a @ x - right).abs().square().sum(-2)
    none = left.new_empty(0)
    residuals = left.masked_fill((rank < n).unsqueeze(-1), float("nan")) if m > n and driver != "gelsy" else none
    singular = torch.linalg.svdvals(a) if driver in ("gelss", "gelsd") else none
    return x.squeeze(-1) if vector else x, residuals, rank if driver != "gels" else rank.new_empty(0), singular
