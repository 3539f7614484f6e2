"""The table of cases: what must equal one device, for every mode and world size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.oracle import models, optimizers, plans, steps
from tests.oracle.case import Case, Parts

# ---- batches: functions of the global number of samples


def regression(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 5), torch.randn(B, 3)


def single(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 5).float(), torch.randn(B, 3).float()


def stacked(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(3, B, 5), torch.randn(3, B, 3)


def pairs(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 5), torch.randn(B, 5)


def images(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 3, 8, 8), torch.randint(0, 3, (B,))


def sequences(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 2, 5), torch.randn(B, 3)


def sequences_first(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, B, 8), torch.randn(4, B, 3)


def words(B: int, length: int = 6, vocabulary: int = 13, ignored: float = 0.0) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens after them; the later a sample stands in the batch, the more of it is ignored."""
    text = torch.randint(0, vocabulary, (B, length + 1))
    target = text[:, 1:].clone()
    if ignored:
        target[torch.rand(B, length) < torch.linspace(0.1, 2 * ignored, B)[:, None]] = -100
    return text[:, :-1].clone(), target


def micro_words(B: int) -> tuple[Tensor, Tensor]:
    parts = [words(B, ignored=0.2 * (index + 1)) for index in range(3)]
    return torch.stack([x for x, _ in parts]), torch.stack([y for _, y in parts])


def masked_words(B: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = words(B, vocabulary=37, ignored=0.3)
    return x, (torch.arange(6) < torch.randint(2, 7, (B, 1))).long(), y


def gan_batch(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 3), torch.randn(B, 5)


def nested_batch(B: int) -> tuple[dict[str, Any], Tensor]:
    batch = {"x": torch.randn(B, 5), "targets": (torch.randn(B, 3), [torch.randn(B)]), "mask": torch.rand(3, 3)[:1]}
    return batch, torch.tensor(0.5)


def with_scale(B: int) -> tuple[Tensor, Tensor, float, bool]:
    return *regression(B), torch.rand(()).item(), True


def with_flag(B: int) -> tuple[Tensor, Tensor, float, bool]:
    return *regression(B), 1.5, bool(torch.rand(()) < 0.5)


# ---- optimizers


def over(kind: Callable[..., optim.Optimizer], **options: Any) -> Callable[..., optim.Optimizer]:
    """An optimizer over every parameter of every model."""
    return lambda *modules: kind([p for module in modules for p in module.parameters()], **options)


def groups(kind: Callable[..., optim.Optimizer], **options: Any) -> Callable[[nn.Module], optim.Optimizer]:
    """Two groups with different rates and weight decays, and the last parameter in neither."""

    def build(model: nn.Module) -> optim.Optimizer:
        members = list(model.parameters())[:-1]
        decayed = [p for p in members if p.dim() > 1]
        rest = [p for p in members if p.dim() <= 1]
        return kind([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.003}], lr=0.01, **options)

    return build


OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {}),
    "sgd_momentum": (optim.SGD, {"momentum": 0.9}),
    "sgd_nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd_dampening": (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "sgd_weight_decay": (optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    "sgd_foreach": (optim.SGD, {"momentum": 0.9, "foreach": True}),
    "sgd_fused": (optim.SGD, {"momentum": 0.9, "fused": True}),
    "adam": (optim.Adam, {"foreach": False}),
    "adam_foreach": (optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    "adam_fused": (optim.Adam, {"fused": True}),
    "adam_amsgrad": (optim.Adam, {"amsgrad": True}),
    "adam_maximize": (optim.Adam, {"maximize": True}),
    "adam_tensor_lr": (optim.Adam, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    "adamw": (optim.AdamW, {"foreach": False}),
    "adamw_foreach": (optim.AdamW, {"foreach": True}),
    "adamw_fused": (optim.AdamW, {"fused": True}),
    "adamw_fused_amsgrad": (optim.AdamW, {"fused": True, "amsgrad": True}),
    "adamw_amsgrad": (optim.AdamW, {"amsgrad": True}),
    "adamw_maximize": (optim.AdamW, {"maximize": True}),
    "rmsprop": (optim.RMSprop, {}),
    "rmsprop_centered": (optim.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "nadam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (optim.RAdam, {}),
    "adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}),
    "asgd": (optim.ASGD, {"t0": 2, "weight_decay": 0.1}),
    "rprop": (optim.Rprop, {}),
}

adamw = over(optim.AdamW, lr=0.01)
momentum = over(optim.SGD, lr=0.05, momentum=0.9)


def _optimizers() -> Iterable[Case]:
    for name, (kind, options) in OPTIMIZERS.items():
        count = 7 if name == "radam" else 4  # RAdam changes its formula at step 6
        build = over(kind, **{"lr": 0.01, **options})
        yield Case(f"optim_{name}", models.mlp, steps.basic(), regression, build, steps=count)
    nesterov = over(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True)
    yield Case("optim_nesterov_foreach", models.mlp, steps.basic(zero="first"), regression, nesterov)


# ---- what happens between the steps


def decay_changes(parts: Parts, index: int) -> None:
    parts.optims[0].param_groups[0]["weight_decay"] = 0.1 * (index + 1)


def everything_changes(parts: Parts, index: int) -> None:
    group = parts.optims[0].param_groups[0]
    group["betas"], group["eps"] = (0.9 - 0.05 * index, 0.999), 1e-8 * (index + 1)


def evaluates(parts: Parts, index: int) -> None:
    parts.models[0].train(index % 2 == 1)


def thaws(parts: Parts, index: int) -> None:
    parts.models[0].frozen.requires_grad_(index == 0)


def rescales(parts: Parts, index: int) -> None:
    parts.models[0].factor = 1.0 + 0.5 * index  # type: ignore[assignment]


def hooks(parts: Parts, index: int) -> None:
    """A forward hook after the first step, a hook on a parameter after the second."""
    layer = parts.models[0].get_submodule("0")
    if index == 0:
        layer.register_forward_hook(lambda module, args, output: output * 2)
    if index == 1:
        layer.get_parameter("weight").register_hook(lambda grad: grad * 3)


def replaces_layer(parts: Parts, index: int) -> None:
    """A new head after the first step; the optimizer forgets the old one."""
    if index > 0:
        return
    model, optimizer = parts.models[0], parts.optims[0]
    old = list(model.get_submodule("2").parameters())
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if not any(p is gone for gone in old)]
    for gone in old:
        del optimizer.state[gone]
    torch.manual_seed(5)
    model.add_module("2", nn.Linear(7, 3))
    optimizer.add_param_group({"params": model.get_submodule("2").parameters(), "lr": 0.02})


def _hooked() -> nn.Module:
    """Hooks set before compiling: on a module, and on a parameter before and after accumulation."""
    model = models.mlp()
    model[1].register_forward_hook(lambda module, args, output: output + 0.5)
    model[0].weight.register_hook(lambda grad: 2 * grad)  # type: ignore[operator]
    model[2].bias.register_post_accumulate_grad_hook(_halve)  # type: ignore[operator]
    return model


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _parameters() -> Iterable[Case]:
    step = steps.basic()
    yield Case("params_odd", models.Odd, step, regression, adamw)
    yield Case("params_odd_sgd", models.Odd, step, regression, momentum)
    yield Case(
        "params_odd_foreach_clip", models.Odd, steps.basic(clip=0.1), regression, over(optim.AdamW, foreach=True)
    )
    yield Case("params_partly", models.Partly, step, regression, groups(optim.AdamW))
    yield Case("params_groups_sgd", models.mlp, step, regression, groups(optim.SGD, momentum=0.9))
    yield Case("params_groups_fused", models.mlp, step, regression, groups(optim.AdamW, fused=True))
    yield Case("params_tied", models.Tied, steps.basic(steps.tokens), words, adamw)
    yield Case("params_twice", models.Twice, step, regression, adamw)
    yield Case("params_complex", models.Complex, step, regression, over(optim.SGD, lr=0.01))
    yield Case("params_mixed", models.Mixed, steps.basic(clip=1.0), single, momentum, tolerance=5e-2)
    yield Case("params_thawed", models.Partly, step, regression, adamw, between=thaws)
    yield Case("params_two_optims", models.mlp, steps.two_rates, regression, _halves)


def _halves(model: nn.Module) -> tuple[optim.Optimizer, optim.Optimizer]:
    first, second, *rest = model.parameters()
    return optim.Adam([first, second], lr=0.01), optim.SGD(rest, lr=0.1, momentum=0.5)


def _steps() -> Iterable[Case]:
    mlp = models.mlp
    yield Case("clip_2", mlp, steps.basic(clip=0.1), regression, adamw)
    yield Case("clip_inf", mlp, steps.basic(clip=0.01, norm=float("inf")), regression, adamw)
    yield Case("clip_returned", mlp, steps.clip_returning_norm, regression, momentum)
    yield Case("accumulate_stacked", mlp, steps.accumulate_stacked, stacked, adamw, dim=1)
    yield Case("accumulate_chunks", mlp, steps.accumulate_chunks, regression, adamw, samples=(3,))
    yield Case("accumulate_valid", models.Tied, steps.accumulate_valid, micro_words, momentum, dim=1)
    yield Case("zero_first", mlp, steps.basic(zero="first"), regression, adamw)
    yield Case("zero_first_kept", mlp, steps.basic(zero="first", set_to_none=False), regression, adamw)
    yield Case("zero_last_kept", mlp, steps.basic(set_to_none=False), regression, adamw)
    yield Case("zero_never", mlp, steps.basic(zero="never"), regression, adamw)
    yield Case("zero_first_odd", models.Odd, steps.basic(zero="first"), regression, adamw)
    yield Case("manual_sgd", mlp, steps.manual_sgd, regression)
    yield Case("manual_data", mlp, steps.manual_data, regression)
    yield Case("forward_only", mlp, steps.forward_only, regression, outputs=(None, 0))
    yield Case("gradients_only", mlp, steps.gradients_only, regression)
    yield Case("optim_closure", mlp, steps.closure_of_optimizer, regression, momentum)
    yield Case("item_returned", mlp, steps.item_returned, regression, momentum)
    yield Case("backward_twice", mlp, steps.backward_twice, regression, momentum)
    yield Case("closing_over", mlp, steps.closing, regression, adamw, closure=True)
    yield Case("method", mlp, steps.method, regression, adamw, closure=True)
    yield Case("gan", _gan, steps.gan, gan_batch, _gan_optims)
    yield Case("gan_one_module", _both, steps.gan_of_one, gan_batch, _halves_of_both)
    yield Case("gradient_penalty", _critic, steps.gradient_penalty, gan_batch_real, adamw)
    yield Case("teacher", lambda: (mlp(), mlp()), steps.teacher, regression, lambda student, _: adamw(student))
    yield Case(
        "nested", mlp, steps.nested, nested_batch, adamw, replicated=("batch.mask",), outputs=(None, 0, 0, None, None)
    )


def gan_batch_real(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 3), torch.randn(B, 3)


def _critic() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


def _gan() -> tuple[nn.Module, nn.Module]:
    return models.mlp(), _critic()


def _both() -> nn.Module:
    return nn.ModuleDict(dict(zip(("generator", "critic"), _gan(), strict=True)))


def _halves_of_both(both: nn.ModuleDict) -> tuple[optim.Optimizer, optim.Optimizer]:
    return _gan_optims(both["generator"], both["critic"])


def _gan_optims(generator: nn.Module, critic: nn.Module) -> tuple[optim.Optimizer, optim.Optimizer]:
    return optim.Adam(generator.parameters(), lr=0.01), optim.RMSprop(critic.parameters(), lr=0.005)


def _changes() -> Iterable[Case]:
    mlp, step = models.mlp, steps.basic()
    decay = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=8)
    yield Case("lr_step", mlp, step, regression, momentum, scheduler=decay, steps=4, traces=1)
    yield Case(
        "lr_step_fused", mlp, step, regression, over(optim.AdamW, fused=True), scheduler=decay, steps=4, traces=1
    )
    yield Case("lr_in_step", mlp, steps.sets_rate, regression, momentum, steps=4, traces=1)
    yield Case("lr_onecycle", mlp, step, regression, momentum, scheduler=cycle, steps=6, traces=3)
    yield Case("weight_decay_changes", mlp, step, regression, adamw, between=decay_changes, steps=6, traces=3)
    yield Case("betas_change", mlp, step, regression, over(optim.Adam), between=everything_changes, steps=6)
    yield Case("batch_changes", mlp, step, regression, adamw, samples=(2, 4, 3), steps=4, traces=1)
    alike = partial(
        words, length=6, vocabulary=6
    )  # six samples on three ranks: positions, words, width and classes are as many
    yield Case("batch_is_as_large_as_all_else", models.SixOfAll, steps.basic(steps.tokens), alike, momentum)
    yield Case("batch_changes_gpt", models.GPT, steps.basic(steps.tokens), words, momentum, samples=(2, 3), traces=1)

    yield Case(
        "mode_alternates", partial(mlp, dropout=0.5), step, regression, momentum, between=evaluates, steps=5, traces=2
    )
    yield Case("hooks", _hooked, step, regression, momentum)
    yield Case("hooks_added", mlp, step, regression, momentum, between=hooks)
    yield Case("attribute_changes", models.Scaled, step, regression, momentum, between=rescales, steps=5, traces=3)
    yield Case("layer_replaced", mlp, step, regression, momentum, between=replaces_layer)
    yield Case("argument_changes", mlp, steps.python_arguments, with_scale, momentum, steps=5, traces=3)
    yield Case("argument_flag", mlp, steps.python_arguments, with_flag, momentum, steps=6, traces=2)
    yield Case("size_branch", mlp, steps.branch_on_size, regression, momentum, samples=(2, 5, 9, 3), steps=5)


def _losses() -> Iterable[Case]:
    mlp, tied = models.mlp, models.Tied
    ignoring = partial(words, ignored=0.3)
    yield Case("loss_sum", mlp, steps.basic(steps.sum_squares), regression, momentum)
    yield Case("loss_masked_mean", mlp, steps.basic(steps.masked_mean), regression, momentum)
    yield Case("loss_ignore_index", tied, steps.basic(steps.tokens), ignoring, momentum)
    yield Case("loss_weighted", tied, steps.basic(steps.weighted), words, momentum)
    yield Case("loss_in_batch", mlp, steps.basic(steps.similarity), regression, momentum)


# Losses that mix samples: statistics, similarities, positions in the batch, halves of it.
MIXING: dict[str, steps.Loss] = {
    "var": lambda x, y: x.var(0).sum() + y.var() * x.mean(),
    "norm": lambda x, y: x.norm() + x.norm(dim=0).sum() + x.abs().max(),
    "normalized": lambda x, y: ((x - x.mean(0)) / (1 + x.std(0)) * y).sum(),
    "logsumexp": lambda x, y: x.logsumexp(0).sum(),
    "softmax": lambda x, y: (x.softmax(0) * y).sum() + x.log_softmax(0).mean(),
    "max": lambda x, y: x.max(0).values.sum() + (x.argmax(0) * x.min(0).values).sum(),
    "covariance": lambda x, y: (x.T @ y).square().sum(),
    "varying_dims": lambda x, y: (x[:, :1] - y[:, 0]).square().mean(),
    "own_label": lambda x, y: F.cross_entropy(x @ x.detach().T, torch.arange(len(x))),
    "places": lambda x, y: (x * torch.arange(len(x), dtype=x.dtype)[:, None]).sum(),
    "two_views": lambda x, y: (torch.cat([x, y]) @ torch.arange(6.0).view(3, 2).to(x)).softmax(1)[: len(x), 0].sum(),
    "triangle": lambda x, y: ((x @ y.T).tril(-1).sum() + torch.diagonal(x @ y.T).sum()) / len(x),
    "eye": lambda x, y: ((x @ y.T) * (1 - torch.eye(len(x), dtype=x.dtype))).square().mean(),
    "order": lambda x, y: x.sort(0).values[0].sum() + x.topk(min(2, len(x)), 0).values.sum() + x.quantile(0.4) + x.median(0).values.sum(),
    "running": lambda x, y: (x.cumsum(0) * y).mean() + x.exp().prod(0).log().sum() + x.tanh().cumprod(0).mean(),
    "moved": lambda x, y: (x.roll(1, 0) * y + x.flip(0) * y.roll(2, 0)).sum(),
    "halves": lambda x, y: (x[: len(x) // 2] * y[len(x) // 2 : len(x) // 2 * 2]).sum(),
    "padded": lambda x, y: F.pad(x, (0, 0, 1, 2)).diff(dim=0).square().sum() + torch.cat([x[:1], x])[1:].mean(),
    "distances": lambda x, y: torch.cdist(x, y).mean() + torch.pdist(x).sum(),
    "indexed": lambda x, y: (x[torch.arange(len(x) - 1, -1, -1)] * y).sum() + x[torch.arange(len(x)), 1].sum(),
}  # fmt: skip


def _mixing() -> Iterable[Case]:
    for name, loss in MIXING.items():
        yield Case(f"mixing_{name}", models.mlp, steps.basic(loss), regression, momentum)


def _random() -> Iterable[Case]:
    gpt, tokens = partial(models.GPT, dropout=0.2), steps.basic(steps.tokens)
    yield Case("dropout_mlp", partial(models.mlp, dropout=0.5), steps.basic(), regression, adamw)
    yield Case("dropout_gpt", gpt, tokens, words, momentum)
    yield Case("dropout_checkpoint", partial(gpt, recompute="free"), tokens, words, momentum)
    yield Case("dropout_checkpoint_reentrant", partial(gpt, recompute="reentrant"), tokens, words, momentum)
    yield Case("random_kinds", models.mlp, steps.noisy, regression, momentum)
    yield Case("random_mixup", models.mlp, steps.mixup, regression, momentum)


def _models() -> Iterable[Case]:
    tokens, classes = steps.basic(steps.tokens), steps.basic(F.cross_entropy)
    cnn = models.CNN
    yield Case("gpt", partial(models.GPT, blocks=2), tokens, words, momentum)
    yield Case("gpt_fused_clip", models.GPT, steps.basic(steps.tokens, clip=1.0), words, over(optim.AdamW, fused=True))
    yield Case("params_from_meta", models.from_meta, tokens, words, momentum)
    yield Case("gpt_rmsnorm", partial(models.GPT, norm=nn.RMSNorm), tokens, words, momentum)
    yield Case("gpt_six_heads", partial(models.GPT, heads=6), tokens, words, momentum)
    yield Case("cnn", cnn, classes, images, adamw)
    yield Case("cnn_channels_last", partial(cnn, channels_last=True), classes, images, adamw)
    yield Case("cnn_batch_norm", partial(cnn, batch_norm=True), classes, images, momentum)
    yield Case("lstm", models.Recurrent, steps.basic(), sequences, adamw)
    yield Case(
        "lstm_sequence_first",
        partial(models.Recurrent, batch_first=False),
        steps.basic(),
        turned_sequences,
        adamw,
        dim=1,
    )
    yield Case("sequence_first", models.SequenceFirst, steps.basic(), sequences_first, momentum, dim=1)
    yield Case("buffers", models.Counting, steps.basic(), regression, adamw)
    yield Case("custom_backward", models.Reversal, steps.basic(), regression, momentum)
    yield Case("rare", models.Rare, steps.basic(), sequences, momentum)
    yield Case("half_with_wide_buffers", models.WideBuffer, steps.halved, single, momentum, tolerance=5e-2)
    yield Case("half", lambda: models.mlp().bfloat16(), steps.halved, single, momentum, tolerance=5e-2)
    yield Case("autocast", lambda: models.mlp().float(), steps.autocast, single, momentum, tolerance=3e-2)


def turned_sequences(B: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, B, 5), torch.randn(1, B, 3)


def _transformers() -> Iterable[Case]:
    careful = over(optim.AdamW, lr=0.01, eps=1e-4)  # key biases have no true gradient, so Adam would see noise
    text = partial(words, vocabulary=37, ignored=0.2)

    def case(
        name: str, kind: str, step: Callable[..., Any], batch: Callable[..., Any], tolerance: float = 1e-9
    ) -> Case:
        model = partial(models.transformers_model, kind)
        return Case(f"hf_{name}", model, step, batch, careful, tolerance=tolerance, needs="transformers")

    rounded = 1e-6  # float32 inside: the losses of GPT-2 and Llama
    yield case("gpt2", "gpt2", steps.transformers_masked, masked_words)
    yield case("gpt2_labels", "gpt2", steps.transformers_labels, text, rounded)
    yield case("llama", "llama", steps.transformers_labels, text, rounded)
    yield case("bert", "bert", steps.transformers_masked, masked_words)
    yield case("t5", "t5", steps.transformers_labels, text)
    yield case("vit", "vit", steps.transformers_images, images)


def _algebra() -> Iterable[Case]:
    yield Case("linear_algebra", models.Algebra, steps.basic(), regression, momentum)


def _custom_optimizers() -> Iterable[Case]:
    """Optimizers that users write, and those that wrap or average."""
    mlp, step = models.mlp, steps.basic()
    simple = optimizers.Lion, optimizers.Lars, optimizers.Lamb, optimizers.Muon, optimizers.Shampoo
    numbered = optimizers.CountingAdam, optimizers.Soap, optimizers.ScheduleFree, optimizers.Decaying
    for kind in (*simple, *numbered, optimizers.Lookahead):
        yield Case(f"optim_{kind.__name__.lower()}", mlp, step, regression, over(kind), steps=5)
    yield Case("optim_adafactor", mlp, step, regression, over(optim.Adafactor, lr=0.01), steps=4)
    yield Case("optim_torch_muon", mlp, steps.two_rates, regression, optimizers.muon_and_adamw)
    yield Case("optim_sam", mlp, steps.sharpness_aware, regression, over(optimizers.Sam))
    yield Case("optim_ema", _twins, steps.moving_average, regression, lambda model, _: momentum(model))
    for name, options in (("swa", {}), ("ema_model", {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True})):
        build = partial(_averaged, **options)
        yield Case(f"optim_{name}", build, steps.averaged, regression, lambda model, _: momentum(model), steps=4)


def _twins() -> tuple[nn.Module, nn.Module]:
    model = models.mlp()
    return model, copy.deepcopy(model)


def _averaged(**options: Any) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(models.mlp(), nn.BatchNorm1d(3))
    return model, AveragedModel(model, **options)


def _tensor_parallel() -> Iterable[Case]:
    yield from plans.cases()
    for case in _transformers():
        if plan := plans.TRANSFORMERS.get(case.name):
            yield replace(case, name=case.name.replace("hf_", "tensor_"), plan=plan)


FAMILIES = (
    _optimizers,
    _parameters,
    _steps,
    _changes,
    _losses,
    _mixing,
    _random,
    _models,
    _transformers,
    _algebra,
    _custom_optimizers,
    _tensor_parallel,
)
CASES: dict[str, Case] = {case.name: case for family in FAMILIES for case in family()}

# One or two of each kind: these run at every world size and with one sample a rank.
REPRESENTATIVE = (  # the first ones go at every size
    "params_odd", "clip_inf", "accumulate_chunks", "loss_ignore_index", "gan", "optim_adamw_fused",
    "optim_sgd_dampening", "params_partly", "params_tied", "zero_first_odd", "nested", "lr_step",
    "dropout_checkpoint", "gpt_six_heads", "lstm", "sequence_first",
)  # fmt: skip
