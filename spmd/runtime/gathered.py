"""gathered: lends whole, plain parameters and buffers for eager use of a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spmd.runtime import hooks
from spmd.runtime.storage import Storage


@dataclass
class _Loan:
    """One tensor on loan: `owner` is what the model holds otherwise."""

    owner: DTensor
    lent: torch.Tensor
    version: int
    address: int

    @property
    def changed(self) -> bool:
        return self.lent._version != self.version or self.lent.data_ptr() != self.address


@contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """Within the block the modules hold whole, plain parameters and buffers, so they can be called eagerly.

    Entry is collective. Values changed within the block (in place, by load_state_dict, or by assignment) are written
    back on exit, without communication: every rank must change them alike. Gradients made within the block go with it.
    Optimizers keep the sharded parameters. Blocks may nest. Without a mesh nothing is lent: parameters are whole.
    """
    loans: dict[int, _Loan] = {}
    each = dict.fromkeys(module for root in modules for module in root.modules())
    places = [
        (module, name, tensor)
        for module in each
        for _, name, tensor in hooks.held(module)
        if isinstance(tensor, DTensor)
    ]
    for _, _, tensor in places:
        if id(tensor) not in loans:
            loans[id(tensor)] = _lend(tensor)
    try:
        for module, name, tensor in places:
            setattr(module, name, loans[id(tensor)].lent)
        yield
    finally:
        _take_back(places, loans)


def _lend(owner: DTensor) -> _Loan:
    with torch.no_grad():
        storage = Storage.under(owner)
        lent = owner.full_tensor().detach() if storage is None else storage.full()
    if isinstance(owner, nn.Parameter):
        lent = nn.Parameter(lent, requires_grad=owner.requires_grad)
    setattr(lent, hooks.LENT, True)
    return _Loan(owner, lent, lent._version, lent.data_ptr())


@torch.no_grad()
def _take_back(places: list[tuple[nn.Module, str, DTensor]], loans: dict[int, _Loan]) -> None:
    for module, name, owner in places:
        loan, now = loans[id(owner)], getattr(module, name)
        if now is not loan.lent and isinstance(now, torch.Tensor) and now.shape == owner.shape:
            loan.lent.copy_(now.full_tensor() if isinstance(now, DTensor) else now)
        setattr(module, name, owner)
    for loan in loans.values():
        if not loan.changed:
            continue
        storage = Storage.under(loan.owner)
        if storage is not None:
            storage.load(loan.lent)
        else:
            loan.owner.copy_(hooks.placed_like(loan.owner, loan.lent.detach()))
