"""Optimizers while traced: the user's own `step` runs, per parameter, on copies of its groups and state.

State that doesn't exist yet is made by the optimizer's own code during the one trace. With torch's optimizers each such tensor is marked
(`marks.py`), so that afterwards the graph can be cut there: what makes it goes into `Capture.init`, the rest reads it as an input. Others may do
anything on their first step, so their first call has a program of its own, which leaves the state behind, and the second is traced anew.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adam, Optimizer

from spmd._torch import DisableTorchFunction, get_proxy_mode, get_proxy_slot, say_compiling, track_tensor_tree
from spmd.capture.marks import Marks, fake_like, inner, overwrite
from spmd.capture.patches import replaced
from spmd.errors import CaptureError, Offence, StateError

aten = torch.ops.aten
_FUSED = {False: aten._fused_adam.default, True: aten._fused_adamw.default}


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class StateKey:
    """Whose state a tensor is."""

    name: str
    optimizer: str
    parameter: str
    key: str


class _State(dict[str, Any]):
    """`optimizer.state[parameter]`: tensors put under a new key are marked."""

    def __init__(self, initial: dict[str, Any], trace: OptimizerTrace, parameter: str) -> None:
        super().__init__(initial)
        self.trace, self.parameter = trace, parameter

    def __setitem__(self, key: str, value: Any) -> None:
        if _is_nested(value):
            raise StateError(_nested(self.trace.optimizer, self.trace.name, self.parameter, key, value))
        if key not in self and isinstance(value, torch.Tensor):
            if self.trace.own:
                self.trace.marks.mark(value, self.trace.key(self.parameter, key))
            value = self.trace.widen(self.parameter, key, value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class _States(defaultdict[Any, Any]):
    """`optimizer.state`: a new entry, also one assigned whole, is a `_State`."""

    def __init__(self, make: Callable[[Any, dict[str, Any]], _State]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, parameter: Any) -> _State:
        self[parameter] = {}
        return self[parameter]

    def __setitem__(self, parameter: Any, value: dict[str, Any]) -> None:
        if not isinstance(parameter, torch.Tensor):
            raise StateError(_ownerless("the optimizer", parameter))
        if not isinstance(value, _State):
            state = self.make(parameter, {})
            state.update(value)
            value = state
        super().__setitem__(parameter, value)


def check_supported(optimizers: dict[str, Optimizer], named: Callable[[Any], str | None]) -> None:
    """Raises CaptureError for optimizers whose step can't be one graph, StateError for states that aren't tensors per parameter."""
    offences = [
        Offence(
            f"{name} is LBFGS, whose line search evaluates the loss as often as the data demands",
            remedy="use an optimizer that calls the loss once, such as AdamW or SGD",
        )
        for name, o in optimizers.items()
        if isinstance(o, torch.optim.LBFGS)
    ]
    if offences:
        raise CaptureError(offences)
    wrong = [
        offence
        for name, o in optimizers.items()
        for owner, state in o.state.items()
        for offence in _state_offences(o, name, owner, named(owner) or "", state)
    ]
    if wrong:
        raise StateError(wrong[:5])


def _is_nested(value: Any) -> bool:
    tuples = isinstance(value, tuple) and any(isinstance(v, torch.Tensor) for v in value)
    return tuples or isinstance(value, (list, dict, set))


def _state_offences(optimizer: Optimizer, name: str, owner: Any, parameter: str, state: Any) -> Iterator[Offence]:
    if not isinstance(owner, torch.Tensor) or not isinstance(state, dict):
        yield _ownerless(name, owner)
        return
    for key, value in state.items():
        if _is_nested(value):
            yield _nested(optimizer, name, parameter, key, value)


def _nested(optimizer: Optimizer, name: str, parameter: str, key: str, value: Any) -> Offence:
    """A container in a state: what is in it would have neither a name in checkpoints nor a placement."""
    return Offence(
        f"{name} ({type(optimizer).__name__}) keeps a {type(value).__name__} under {key!r} in the state of a parameter",
        fqn=parameter,
        remedy=f'keep each tensor or number under a key of its own: state[f"{key}_{{i}}"]',
    )


def _ownerless(name: str, owner: Any) -> Offence:
    return Offence(
        f"{name}.state[{owner!r}] belongs to no parameter",
        remedy="keep it under the parameters, or as a number or a tensor in param_groups",
    )


class OptimizerTrace:
    """One optimizer, while traced."""

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        marks: Marks,
        capturable: bool,
        parameter_name: Callable[[Any], str],
        state_name: Callable[[str, str, str], str],
    ) -> None:
        self.name, self.optimizer, self.marks, self.capturable = name, optimizer, marks, capturable
        self.parameter_name, self.state_name = parameter_name, state_name
        self.own = type(optimizer).__module__.startswith("torch.optim")
        self.stepping = False
        self.widened: dict[tuple[str, str], torch.dtype] = {}  # states lifted to float64 for the trace -> their dtype

    @contextmanager
    def installed(
        self, swap: Callable[[Any], Any], states: dict[tuple[str, int, str], Any], twins: dict[int, Any]
    ) -> Iterator[None]:
        """The optimizer works on copies whose tensors are `swap`ped; `states[(optimizer, id(parameter), key)]` is the traced state.

        `twins`: id of a group or state -> its copy, for optimizers that share them.
        """
        o = self.optimizer
        before = self.before_groups, _ = o.param_groups, o.state
        o.param_groups = [self._group(g, twins.setdefault(id(g), dict(g)), swap) for g in before[0]]
        if id(before[1]) not in twins:
            twins[id(before[1])] = self._states(before[1], swap, states)
        o.state = twins[id(before[1])]
        try:
            yield
        finally:
            o.param_groups, o.state = before

    def _states(
        self, before: dict[Any, dict[str, Any]], swap: Callable[[Any], Any], states: dict[tuple[str, int, str], Any]
    ) -> _States:
        made = _States(lambda p, d: _State(d, self, self.parameter_name(p)))
        for p, state in before.items():
            traced = swap(p)
            name = self.parameter_name(traced)
            values = {k: self.widen(name, k, states.get((self.name, id(p), k), v)) for k, v in state.items()}
            made[traced] = _State(values, self, name)
        return made

    def _group(self, group: dict[str, Any], twin: dict[str, Any], swap: Callable[[Any], Any]) -> dict[str, Any]:
        twin["params"] = [swap(p) for p in group["params"]]
        fused_adam = isinstance(self.optimizer, Adam) and twin.get("fused") and not self.capturable
        overrides = {"foreach": False, "capturable": self.capturable} | ({} if fused_adam else {"fused": False})
        twin.update({k: v for k, v in overrides.items() if k in twin})
        return twin

    def key(self, parameter: str, key: str) -> StateKey:
        return StateKey(self.state_name(self.name, parameter, key), self.name, parameter, key)

    def widen(self, parameter: str, key: str, value: Any) -> Any:
        """On the capturable path 0-dim states (`step`, ASGD's `eta`) compute in float64 as Python numbers do: float32 would be off by 1e-6."""
        if self.capturable and isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in _NARROW:
            self.widened[parameter, key] = value.dtype
            return value.to(torch.float64)
        return value

    def narrow_dtype(self, parameter: str, key: str) -> torch.dtype | None:
        """The dtype in which a widened state is kept outside."""
        return self.widened.get((parameter, key))

    def seed_momentum(self) -> None:
        """SGD's buffer starts as a copy of the gradient, which with dampening 0 is what zeros lead to: zeros depend on no gradient."""
        if not isinstance(self.optimizer, SGD):
            return
        for group in self.optimizer.param_groups:
            if group["momentum"] == 0 or group["dampening"] != 0:
                continue
            for p in group["params"]:
                if p.grad is not None and self.optimizer.state[p].get("momentum_buffer") is None:
                    self.optimizer.state[p].pop("momentum_buffer", None)
                    self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(
                        p, memory_format=torch.preserve_format
                    )

    def change_gradients(self) -> None:
        """torch's foreach path of Nesterov momentum, not taken here, adds to the gradients in place where nothing has made copies of them."""
        if not isinstance(self.optimizer, SGD):
            return
        for asked, group in zip(self.before_groups, self.optimizer.param_groups, strict=True):
            default = not asked["fused"] and all(p.is_cuda for p in group["params"])
            foreach = default if asked["foreach"] is None else asked["foreach"]
            if not (foreach and group["nesterov"]) or group["weight_decay"] or group["maximize"]:
                continue
            for p in group["params"]:
                if p.grad is not None:
                    with torch.no_grad():
                        p.grad.add_(self.optimizer.state[p]["momentum_buffer"], alpha=group["momentum"])


@contextmanager
def patched_steps(
    traces: list[OptimizerTrace], entered: Callable[[], None], left: Callable[[], None]
) -> Iterator[None]:
    """`entered` and `left` run around each optimizer step. Inside, `is_compiling()` is False unless the capturable path is taken."""
    with ExitStack() as stack:
        for trace in traces:

            def before(o: Optimizer, args: Any, kwargs: Any, trace: OptimizerTrace = trace) -> None:
                trace.stepping = True
                entered()
                say_compiling(trace.capturable)
                trace.seed_momentum()

            def after(o: Optimizer, args: Any, kwargs: Any, trace: OptimizerTrace = trace) -> None:
                trace.change_gradients()
                trace.stepping = False
                say_compiling(True)
                left()

            stack.callback(trace.optimizer.register_step_pre_hook(before).remove)
            stack.callback(trace.optimizer.register_step_post_hook(after).remove)
        stack.enter_context(_patched_fused_adam())
        stack.enter_context(_symbolic_min_max())
        yield


@contextmanager
def _patched_fused_adam() -> Iterator[None]:
    with replaced(sys.modules["torch.optim.adam"], _fused_adam=_fused_adam_per_parameter):
        yield


def _fused_adam_per_parameter(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    max_exp_avg_sqs: list[torch.Tensor],
    state_steps: list[torch.Tensor],
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    *,
    decoupled_weight_decay: bool,
    lr: Any,
    **options: Any,
) -> None:
    """One functional fused op a parameter. Written as nodes by hand: the dispatcher would turn a symbolic lr into a constant."""
    if grad_scale is not None or found_inf is not None:
        raise CaptureError(
            Offence("fused Adam under GradScaler", remedy="use bfloat16 autocast without GradScaler, or fused=False")
        )
    kwargs = {k: options[k] for k in ("beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize")}
    overload = _FUSED[decoupled_weight_decay]
    if isinstance(lr, torch.Tensor):
        overload = overload.overloadpacket.tensor_lr
    for step in state_steps:
        step.add_(1)
    with DisableTorchFunction():
        _fused_nodes(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, overload, {"lr": lr, **kwargs})


def _fused_nodes(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    max_exp_avg_sqs: list[torch.Tensor],
    state_steps: list[torch.Tensor],
    overload: Any,
    kwargs: dict[str, Any],
) -> None:
    tracer = get_proxy_mode().tracer  # type: ignore[union-attr]

    def proxy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return get_proxy_slot(inner(value), tracer).proxy
        return tracer.unwrap_proxy(value)  # type: ignore[union-attr]

    for i, p in enumerate(params):
        lists = [[p], [grads[i]], [exp_avgs[i]], [exp_avg_sqs[i]], [max_exp_avg_sqs[i]] if kwargs["amsgrad"] else []]
        args = (*([proxy(t) for t in ts] for ts in lists), [proxy(state_steps[i])])
        node = tracer.create_proxy("call_function", overload, args, {k: proxy(v) for k, v in kwargs.items()})
        outs = tuple([fake_like(t) for t in ts] for ts in lists)
        track_tensor_tree(outs, node, constant=None, tracer=tracer)
        for ts, new in zip(lists, outs, strict=True):
            if ts and ts[0] is not grads[i]:  # the op returns the gradient too, unchanged
                overwrite(ts[0], new[0])


@contextmanager
def _symbolic_min_max() -> Iterator[None]:
    """Adafactor calls the builtins min and max on symbolic numbers, which would branch on them."""
    module = sys.modules["torch.optim._adafactor"]
    module.min, module.max = torch.sym_min, torch.sym_max  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del module.min, module.max
