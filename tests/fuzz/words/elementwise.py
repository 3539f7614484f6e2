"""Functions of each element."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.vocabulary import Op, word

Unary = Callable[[Tensor], Tensor]
Binary = Callable[[Tensor, Tensor], Tensor]

POINTWISE: Mapping[str, Unary] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, -0.3),
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "erf": torch.erf,
    "sinc": torch.sinc,
    "exp": lambda x: torch.exp(-x.square()),
    "expm1": lambda x: torch.expm1(torch.tanh(x)),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log": lambda x: torch.log(x.square() + 0.5),
    "sqrt": lambda x: torch.sqrt(x.square() + 0.1),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 0.3),
    "reciprocal": lambda x: 1 / (1 + x.square()),
    "square": lambda x: torch.tanh(x).square(),
    "pow": lambda x: torch.tanh(x) ** 3,
    "pow_number": lambda x: 2.0 ** torch.tanh(x),
    "abs": torch.abs,
    "neg": torch.neg,
    "clamp": lambda x: x.clamp(-0.7, 0.9),
    "nan_to_num": lambda x: torch.nan_to_num(x),
    "masked_fill": lambda x: x.masked_fill(x > 0.4, 0.25),
    "where": lambda x: torch.where(x > 0, x.sin(), 0.5 * x),
    "straight_through": lambda x: x + (x.round() - x).detach(),
    "sign": lambda x: x + x.sign().detach(),
    "floor": lambda x: x - torch.floor(x),
    "logit": lambda x: torch.logit(x.sigmoid(), eps=1e-4),
    "xlogy": lambda x: torch.xlogy(x.sigmoid(), x.sigmoid()),
    "to_and_fro": lambda x: x.double().contiguous().clone() * x.new_full((), 0.5),
    "added_number": lambda x: 0.3 - 2 * x,
    "in_place": lambda x: x.clone().mul_(0.5).add_(0.1).sin_(),
    "in_place_rows": lambda x: _write_first(x),
}


def _write_first(x: Tensor) -> Tensor:
    y = x.clone()
    if y.dim():
        y[..., 0] = y[..., 0] * 2
        y[0] += 0.5
    return y


for _name, _unary in POINTWISE.items():
    word(Op(_name, _unary))

PAIRS: Mapping[str, Binary] = {
    "add": torch.add,
    "sub": lambda x, y: torch.sub(x, y, alpha=0.5),
    "mul": torch.mul,
    "div": lambda x, y: x / (1 + y.square()),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "logaddexp": torch.logaddexp,
    "atan2": lambda x, y: torch.atan2(x, y.square() + 0.5),
    "hypot": lambda x, y: torch.hypot(x, y.square() + 0.5),
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.2),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, 1 + y.square()),
    "where_of_two": lambda x, y: torch.where(x > y, x, y.sin()),
    "copysign": lambda x, y: torch.copysign(x, y.detach()),
    "gate": lambda x, y: x * y.sigmoid(),
}
for _name, _binary in PAIRS.items():
    word(Op(_name, _binary, arity=2))
