"""torch.linalg in the captured step: values and gradients as eager's, and eager's error where a matrix won't do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, linalg, nn

from spmd.capture import capture
from tests.replay import Replay, check


def definite(a: Tensor) -> Tensor:
    return a.mT @ a + 3 * torch.eye(a.shape[-1], dtype=a.dtype)


def several(a: Tensor) -> Tensor:
    return a * torch.arange(1.0, 4, dtype=a.dtype)[:, None, None]


GROUPS: dict[str, dict[str, Callable[[Tensor], Any]]] = {
    "inverses": {
        "inverse": torch.inverse,
        "inv": linalg.inv,
        "inv of several": lambda a: linalg.inv(several(a)),
        "inv_ex": lambda a: linalg.inv_ex(a).inverse,
        "pinv": lambda a: linalg.pinv(a[:, :3]),
        "pinv hermitian": lambda a: linalg.pinv(definite(a), hermitian=True),
        "tensorinv": lambda a: linalg.tensorinv(a, ind=1),
        "cholesky_inverse": lambda a: torch.cholesky_inverse(linalg.cholesky(definite(a))),
        "matrix_power": lambda a: linalg.matrix_power(a, 3) + linalg.matrix_power(a, -2),
        "matrix_exp": lambda a: linalg.matrix_exp(a / 5),
    },
    "solvers": {
        "solve": lambda a: linalg.solve(a, 2 * a.T + 1),
        "solve from the right": lambda a: linalg.solve(a, a.T, left=False),
        "solve_ex": lambda a: linalg.solve_ex(a, a.T).result,
        "tensorsolve": lambda a: linalg.tensorsolve(a, a[0]),
        "solve_triangular": lambda a: linalg.solve_triangular(a.tril() + 9 * torch.eye(5), a, upper=False),
        "cholesky_solve": lambda a: torch.cholesky_solve(a, linalg.cholesky(definite(a))),
        "lu_solve": lambda a: linalg.lu_solve(*linalg.lu_factor(a), a.T),
        "ldl_solve": lambda a: linalg.ldl_solve(*linalg.ldl_factor(definite(a.detach())), a.detach()) * a,
        "lstsq": lambda a: linalg.lstsq(a, a.T).solution,
        "lstsq of a tall one": lambda a: linalg.lstsq(a[:, :3], a[:, :1]).solution,
        "lstsq of several": lambda a: linalg.lstsq(several(a), several(a)[..., 0]).solution,
        "residuals": lambda a: linalg.lstsq(a.detach()[:, :3], a.detach(), driver="gelsd").residuals * a,
    },
    "factorizations": {
        "cholesky": lambda a: linalg.cholesky(definite(a)),
        "cholesky_ex": lambda a: linalg.cholesky_ex(definite(a)).L,
        "lu": lambda a: linalg.lu(a)[2],
        "lu_factor": lambda a: linalg.lu_factor(a).LU,
        "lu_unpack": lambda a: torch.lu_unpack(*linalg.lu_factor(a))[1],
        "ldl_factor": lambda a: linalg.ldl_factor(definite(a.detach())).LD * a,
        "qr": lambda a: linalg.qr(a).R,
        "svd": lambda a: linalg.svd(a).S,
        "singular vectors": lambda a: linalg.svd(a).Vh.abs(),
        "svdvals": linalg.svdvals,
        "eigh": lambda a: linalg.eigh(definite(a)).eigenvalues,
        "eigvalsh": lambda a: linalg.eigvalsh(definite(a)),
        "eig": lambda a: linalg.eig(a).eigenvalues.abs(),
        "eigvals": lambda a: linalg.eigvals(a).abs(),
        "householder_product": lambda a: linalg.householder_product(a, a[0] / 10),
    },
    "numbers": {
        "det": linalg.det,
        "logdet": lambda a: torch.logdet(definite(a)),
        "slogdet": lambda a: linalg.slogdet(a).logabsdet,
        "matrix_norm": lambda a: torch.stack([linalg.matrix_norm(a, n) for n in ("fro", "nuc", 2, -2, 1)]),
        "norm": lambda a: linalg.norm(a) + linalg.norm(a, 1) + linalg.norm(a, float("inf")),
        "cond": linalg.cond,
        "matrix_rank": lambda a: linalg.matrix_rank(a) * a,
        "multi_dot": lambda a: linalg.multi_dot([a, a, a]),
        "vander": lambda a: linalg.vander(a[0]),
        "cross": lambda a: linalg.cross(a[:3, :3], a[1:4, 1:4]),
        "vecdot": lambda a: linalg.vecdot(a, a.T),
    },
}


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64) + 4 * torch.eye(5))


def rows(n: int) -> tuple[Tensor]:
    return (torch.randn(n, 5, dtype=torch.float64),)


@pytest.mark.parametrize("group", GROUPS)
def test_values_and_gradients(group: str) -> None:
    def step(model: Matrix, optim: None, x: Tensor) -> list[Tensor]:
        values = [op(model.weight + x.mean(0)) for op in GROUPS[group].values()]
        grads = [torch.autograd.grad(v.square().sum(), model.weight, retain_graph=True)[0] for v in values]
        return [t.detach() for pair in zip(values, grads, strict=True) for t in pair]

    check(step, Matrix(), None, rows, sizes=(6, 4), tolerance=1e-9)


@pytest.mark.parametrize("op", [linalg.inv, linalg.cholesky, lambda a: linalg.solve(a, a)])
def test_a_matrix_that_will_not_do_raises_as_in_eager(op: Callable[[Tensor], Tensor]) -> None:
    """The check is a node without a result; nothing drops it, though nothing reads it."""

    def step(model: Matrix, optim: None, x: Tensor) -> Tensor:
        op(model.weight * x.sum())
        return x.sum()

    args = (Matrix(), None, torch.zeros(6, 5, dtype=torch.float64))
    replay = Replay(capture(step, args))
    with pytest.raises(linalg.LinAlgError):
        step(*args)
    with pytest.raises(linalg.LinAlgError):
        replay(*args)


def test_residuals_of_a_rank_deficient_matrix_are_not_numbers() -> None:
    """Eager leaves them out, which would be a shape that depends on values."""

    def step(model: Matrix, optim: None, x: Tensor) -> Tensor:
        return linalg.lstsq(x[:, :1] * x[:1], x, driver="gelsd").residuals

    x = torch.randn(9, 5, dtype=torch.float64)
    assert Replay(capture(step, (Matrix(), None, x)))(Matrix(), None, x).isnan().all()
