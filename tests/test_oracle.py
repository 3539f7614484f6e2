"""The compiled step equals the undecorated one on one device: every case, both styles, W = 1, 2, 3, 4, one sample a rank included.

Each time every case runs on 3 ranks, most of them in this process, those in processes that the runtime could break. `make test-all` runs all in
processes. One case alone, in the foreground: `python -m tests.oracle.run CASE STYLE W`.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.oracle import oracle, together
from tests.oracle.case import Case
from tests.oracle.cases import CASES, REPRESENTATIVE
from tests.oracle.world import World

WORLDS = (1, 2, 3, 4)
# Another program than the last call's, because a guard failed or the step made a state: the runtime finds it.
RETRACED = (
    "lr_onecycle", "weight_decay_changes", "mode_alternates", "attribute_changes", "argument_changes", "argument_flag",
    "size_branch", "optim_soap", "optim_schedulefree", "optim_lookahead", "optim_sam",
)  # fmt: skip


def _usual(case: Case, style: str, W: int, single: bool) -> bool:
    """What runs in processes each time. There a rank costs as much as a case in one process: each traces for itself."""
    if case.needs:
        return case.name == "hf_t5" and (style, W, single) == ("fully_shard", 2, False)
    if case.name in REPRESENTATIVE[:6] and (style, W, single) in {("fully_shard", 1, False), ("fully_shard", 4, True)}:
        return True
    if case.name in REPRESENTATIVE and (style, W, single) == ("replicate", 2, False):
        return True
    sizes = {**dict.fromkeys(RETRACED, 2), **dict.fromkeys(REPRESENTATIVE, 3)}
    return (style, W, single) == ("fully_shard", sizes.get(case.name), False)


def _matrix() -> Iterator[Any]:
    for single in (False, True):
        for name, case in ((n, c) for n, c in CASES.items() if not c.plan):
            for W in WORLDS:
                for style in oracle.STYLES:
                    if not single or case.samples == (2,):  # other numbers of samples are the point of their case
                        marks = () if _usual(case, style, W, single) else pytest.mark.slow
                        yield pytest.param(
                            name, style, W, single, id=f"{name}-{style}-{W}{'-single' * single}", marks=marks
                        )


# What only the placement of parameters, gradients and states could break.
STAGED = (
    "optim_adamw_fused",
    "params_odd",
    "params_groups_sgd",
    "clip_2",
    "accumulate_chunks",
    "zero_first_odd",
    "gan",
)


def _stages() -> Iterator[Any]:
    for style in ("zero1", "zero2", "default"):
        for name in STAGED:
            marks = () if name in STAGED[:2] else pytest.mark.slow
            yield pytest.param(name, style, 3, False, id=f"{name}-{style}-3", marks=marks)
    for name, case in CASES.items():
        if case.samples == (2,) and not case.needs and not case.plan:
            marks = () if name in ("params_odd", "accumulate_chunks", "mixing_halves") else pytest.mark.slow
            yield pytest.param(name, "hybrid_shard", 4, False, id=f"{name}-hybrid_shard-4", marks=marks)


def _plans() -> Iterator[Any]:
    usual = {
        ("tensor_mlp", "tensor", 3),
        ("tensor_mlp", "replicate x tensor", 4),
        ("tensor_decoder_tied", "tensor", 2),
        ("tensor_decoder_six_heads", "tensor", 4),
        ("tensor_decoder_sequence", "fully_shard x tensor", 4),
        ("tensor_decoder_context", "tensor", 3),
        ("tensor_decoder_context_heads", "tensor", 2),
        ("tensor_experts", "fully_shard + tensor", 3),
    }
    axes = {"tensor": (1, 2, 3, 4), "replicate x tensor": (4,), "fully_shard x tensor": (4,)}
    one = {"replicate + tensor": (2, 3, 4), "fully_shard + tensor": (2, 3, 4)}
    for name in (n for n, c in CASES.items() if c.plan):
        for style, worlds in {**axes, **(one if name == "tensor_experts" else {})}.items():
            for W in worlds:
                marks = () if (name, style, W) in usual else pytest.mark.slow
                yield pytest.param(name, style, W, False, id=f"{name}-{style}-{W}", marks=marks)


def _expanded() -> Iterator[Any]:
    usual = {("optim_adamw_fused", 2), ("params_odd", 4), ("mixing_halves", 3), ("tensor_decoder", 2)}
    for name, case in CASES.items():
        for W in (2, 3, 4) if case.samples == (2,) and not case.needs else ():
            marks = () if (name, W) in usual else pytest.mark.slow
            yield pytest.param(name, "dtensor", W, False, id=f"{name}-dtensor-{W}", marks=marks)


@pytest.mark.parametrize(("name", "style", "W", "single"), [*_matrix(), *_stages(), *_plans(), *_expanded()])
def test_equals_one_device(world: World, name: str, style: str, W: int, single: bool) -> None:
    needs = CASES[name].needs
    if needs and not oracle.has(needs):
        pytest.skip(f"needs {needs}")
    world.run(oracle.check, W, name, style, W, 1 if single else None)


@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if not c.plan and not c.needs and n not in (*RETRACED, *REPRESENTATIVE)]
)
def test_equals_one_device_in_one_process(name: str) -> None:
    together.check(name, "fully_shard", 3)
