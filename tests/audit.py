"""The audit of op rules: every op that train steps and torch's own op database emit, run on parts and compared with what the rules say.

    python -m tests.audit               audit all and write docs/op_rules.json, docs/op_rules.md and spmd/sharding/audited.py (15 minutes)
    python -m tests.audit add mm        print the audit of single ops, by the op database alone
    python -m tests.audit --write mm    audit single ops, by train steps too, and put them into what is written: for new rows of the table

For each op call: every way of splitting it that our table allows is run on 2 and 3 ranks, plainly and inside larger dims, and joined (`wrong` lists what
differs); discovery looks for ways that the table lacks (`missing`); DTensor's strategies are run likewise (`dtensor`). What DTensor has right for
ops that our table doesn't know becomes a source of rules.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spmd._torch import OpOverload
from spmd.capture import capture
from spmd.graph.concrete import at
from spmd.graph.step import StepGraph
from spmd.sharding import dtensor
from spmd.sharding.apart import Failed, run_apart
from spmd.sharding.categories import random
from spmd.sharding.check import call_of, cases, complaint
from spmd.sharding.discover import Found, Trials, discover
from spmd.sharding.example import Example
from spmd.sharding.layout import shard
from spmd.sharding.listed import Move, listed
from spmd.sharding.rule import Call, Rule
from spmd.sharding.table import TABLE
from tests.oracle import cases as zoo
from tests.oracle.case import Case
from tests.oracle.oracle import has

ROOT = Path(__file__).parent.parent
RESULT, PAGE, SOURCE = ROOT / "docs/op_rules.json", ROOT / "docs/op_rules.md", ROOT / "spmd/sharding/audited.py"
BATCH = 6  # samples of a step: what a step cuts in thirds or halves stays whole
CALLS = 3  # of one op, of train steps and again of the op database
ELEMENTS = 20_000
SECONDS = 60.0
Tensors = list[torch.Tensor]


# ---------------------------------------------------------------------------------------------------- op calls


@dataclass
class Collection:
    """Distinct op calls, a few for each op."""

    calls: dict[str, dict[Example, tuple[Call, Tensors | None]]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, call: Call, tensors: Tensors | None) -> None:
        example = Example.of(call)
        mine = self.calls[str(call.target)]
        if example is not None and example not in mine and len(mine) < CALLS and example.elements < ELEMENTS:
            mine[example] = call, tensors

    def full(self, op: OpOverload) -> bool:
        return len(self.calls[str(op)]) >= CALLS


def auditable(op: Any) -> bool:
    torchs = isinstance(op, OpOverload) and not op._schema.is_mutable and op.namespace in ("aten", "prims")
    return torchs and "empty" not in op._schema.name  # whose values are any


def splittable(call: Call) -> bool:
    return any(n > 1 for s in call.inputs for n in s) and all(
        v is None or isinstance(v, torch.Tensor) for v in call.values
    )


def train_steps() -> Iterator[Case]:
    """The test suite's table of cases: each optimizer once, and none of those that differ in what happens between the steps."""
    once = {f"optim_{name}" for name in {kind: name for name, (kind, _) in zoo.OPTIMIZERS.items()}.values()}
    between = {case.name for case in zoo._changes()}
    for case in zoo.CASES.values():
        other = case.name.startswith("optim_") and case.name not in once
        if case.name not in between and not other and (case.needs is None or has(case.needs)):
            yield case


def from_steps(found: Collection) -> None:
    for case in train_steps():
        for node in (node for step in captured(case) for node in step.graph.nodes):
            if node.op == "call_function" and auditable(node.target) and splittable(call := Call(node)):
                found.add(call, None)


def captured(case: Case) -> list[StepGraph]:
    torch.set_default_dtype(torch.float64)
    try:
        parts = case.build(1)
        torch.manual_seed(2)
        step, leading, batch = case.step, (*parts.models, *parts.optims), case.batch(BATCH)
        if case.closure:
            step, leading = step(*leading), ()
        result = capture(step, (*leading, *batch), batch_dim=case.dim, replicated=case.replicated)
        return [at(graph, BATCH) for graph in (result.step, result.init) if graph is not None]
    except Exception as error:
        print(f"{case.name} can't be captured: {error}")
        return []
    finally:
        torch.set_default_dtype(torch.float32)


def from_database(found: Collection, names: set[str]) -> None:
    """Op calls of torch's op database: its sample inputs, forward and backward."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        dtypes = sorted(info.dtypes, key=lambda t: (t != torch.float64, str(t)))
        if not dtypes:
            continue
        dtype = dtypes[0]
        torch.manual_seed(0)
        try:
            samples = list(
                info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd and dtype.is_floating_point)
            )
        except Exception:
            continue
        for sample in samples[:8]:
            try:
                with Recorder(found, names):
                    out = info.op(sample.input, *sample.args, **sample.kwargs)
                    leaves = [y for y in tree_leaves(out) if isinstance(y, torch.Tensor) and y.requires_grad]
                    if leaves:
                        torch.autograd.backward(leaves, [torch.randn_like(y) for y in leaves])
            except Exception:
                continue


class Recorder(TorchDispatchMode):
    def __init__(self, found: Collection, names: set[str]) -> None:
        super().__init__()
        self.found, self.names = found, names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = auditable(func) and not self.found.full(func)
        if wanted and (not self.names or func._schema.name.split("::")[1] in self.names):
            self.record(func, args, kwargs)
        return func(*args, **kwargs)

    def record(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        copy = lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x  # noqa: E731
        try:
            call, tensors = call_of(func, tree_map(copy, args), tree_map(copy, kwargs))
        except Exception:
            return
        if splittable(call):
            self.found.add(call, tensors)


# ---------------------------------------------------------------------------------------------------- one call


@dataclass
class Verdict:
    """What the calls of one op have shown."""

    calls: int = 0
    holds: int = 0  # ways of splitting that the table allows, and that are right
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # that discovery has found beside the table's
    linear: list[str] = field(default_factory=list)  # linear sets that the table lacks
    dtensor: int = 0  # DTensor's that are right
    dtensor_wrong: list[str] = field(default_factory=list)
    reason: str = ""  # why discovery has found nothing

    def summary(self) -> dict[str, Any]:
        found = {k: sorted(set(v)) if isinstance(v, list) else v for k, v in vars(self).items()}
        return {k: v for k, v in found.items() if v or k == "calls"}


def audit(verdict: Verdict, call: Call, tensors: Tensors | None) -> None:
    verdict.calls += 1
    example = Example.of(call)
    assert example is not None
    if tensors is None:
        try:
            tensors = run_apart(lambda: Trials(example)[0][0], SECONDS)
        except Failed as error:
            verdict.reason = str(error)
            return
    given = tensors
    entry = TABLE.get(call.name)
    rule = entry(call) if entry else random(call) if torch.Tag.nondeterministic_seeded in call.target.tags else None  # type: ignore[union-attr]
    right, wrong = tried(call, [rule] if rule is not None else [], given)
    verdict.holds += len(right)
    verdict.wrong += wrong
    found = discover(call)
    verdict.reason = found.reason if not found.moves else ""
    if rule is None or not rule.whole:
        compare(verdict, call, rule, found)
    moves, linear = dtensor.candidates(call)
    candidates = [*(listed(call, [m]) for m in moves), *(listed(call, (), [group]) for group in linear)]
    right, wrong = tried(call, candidates, given)
    verdict.dtensor += len(right)
    verdict.dtensor_wrong += wrong


def compare(verdict: Verdict, call: Call, rule: Rule | None, found: Found) -> None:
    """What discovery knows beyond the table."""
    for move in found.moves:
        if rule is None or not covered(call, rule, move):
            verdict.missing.append(f"{shapes(call)}: {move}")
    known = set(rule.linear) if rule is not None else set()
    for group in found.linear:
        if not any(set(k) <= set(group) for k in known):
            verdict.linear.append(f"{shapes(call)}: {group}")


def covered(call: Call, rule: Rule, move: Move) -> bool:
    """Whether the table splits the call somewhere where `move` does."""
    return any(
        d is not None and rule.inputs[i] is not None and rule.transfer(i, shard(d, call.inputs[i][d]), 2) is not None
        for i, d in enumerate(move.inputs)
    )


def tried(call: Call, rules: Sequence[Rule], tensors: Tensors) -> tuple[list[str], list[str]]:
    """The cases of some rules that hold and those that don't."""
    todo = [(rule, case) for rule in rules for case in cases(call, rule)]

    def run(chosen: list[Any]) -> list[str]:
        return [attempt(call, rule, case, tensors) for rule, case in chosen]

    try:
        complaints = run_apart(lambda: run(todo), SECONDS) if todo else []
    except Failed:  # one of them crashes
        complaints = [separately(lambda pair=pair: run([pair])[0]) for pair in todo]  # type: ignore[misc]
    right, wrong = [], []
    for (_, (w, ins, outs)), said in zip(todo, complaints, strict=True):
        name = f"{shapes(call)}: {w} ranks: {','.join(map(str, ins))}->{','.join(map(str, outs))}"
        (wrong if said else right).append(f"{name}: {said}" if said else name)
    return right, wrong


def attempt(call: Call, rule: Rule, case: Any, tensors: Tensors) -> str:
    try:
        return complaint(call, rule, case, tensors)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def separately(work: Callable[[], str]) -> str:
    try:
        return run_apart(work, SECONDS)
    except Failed as error:
        return str(error)


def shapes(call: Call) -> str:
    return ",".join("x".join(map(str, s)) or "()" for s in call.inputs)


# ---------------------------------------------------------------------------------------------------- all


def collect(names: set[str], with_steps: bool) -> Iterator[tuple[str, Call, Tensors | None]]:
    steps, database = Collection(), Collection()
    if with_steps:
        from_steps(steps)
    from_database(database, names)
    for op in sorted(steps.calls.keys() | database.calls.keys()):
        for call, tensors in (*steps.calls[op].values(), *database.calls[op].values()):
            if not names or call.name in names:
                yield op, call, tensors


def run(names: set[str], with_steps: bool = True, show: bool = False) -> dict[str, Any]:
    verdicts: dict[str, Verdict] = defaultdict(Verdict)
    for op, call, tensors in collect(names, with_steps):
        if show and op not in verdicts and len(verdicts) % 50 == 0:
            print(f"{len(verdicts)} ops audited", flush=True)
        known = len(verdicts[op].wrong)
        audit(verdicts[op], call, tensors)
        if show and len(verdicts[op].wrong) > known:
            print(op, *verdicts[op].wrong[known:], sep="\n    ", flush=True)
    return {
        "torch": torch.__version__.split("+")[0],
        "table": sorted(TABLE),
        "ops": {op: v.summary() for op, v in sorted(verdicts.items())},
    }


def confirmed(result: dict[str, Any]) -> list[str]:
    """Ops that our table doesn't know and for which every strategy of DTensor that could be tried is right."""
    ours = lambda op: op.split(".")[1] in TABLE  # noqa: E731
    return sorted(
        op for op, v in result["ops"].items() if v.get("dtensor") and not v.get("dtensor_wrong") and not ours(op)
    )


def source(result: dict[str, Any]) -> str:
    names = "".join(f'        "{op}",\n' for op in confirmed(result))
    release = ".".join(result["torch"].split(".")[:2])
    return (
        '"""Ops whose strategies in DTensor the audit has found true. Written by `python -m tests.audit`; don\'t edit."""\n\n'
        f'TORCH = "{release}."\nCONFIRMED: frozenset[str] = frozenset(\n    {{\n{names}    }}\n)\n'
    )


def page(result: dict[str, Any]) -> str:
    ops = result["ops"]
    total = lambda key: sum(v[key] if isinstance(v.get(key), int) else len(v.get(key, ())) for v in ops.values())  # noqa: E731
    known = [op for op in ops if op.split(".")[1] in TABLE]
    used = confirmed(result)
    without = [op for op in ops if op not in known and op not in used]
    lines = [
        "# Op rules, audited",
        "",
        "Written by `python -m tests.audit`, which runs every op of the test suite's train steps and of torch's op database on parts and compares",
        "(torch " + result["torch"] + "). All of it, with the shapes, is in [op_rules.json](op_rules.json).",
        "",
        "| | |",
        "|---|---:|",
        f"| ops audited | {len(ops)} |",
        f"| op calls | {total('calls')} |",
        f"| ops in our table | {len(known)} |",
        f"| splits that the table allows and that hold | {total('holds')} |",
        f"| splits that the table allows and that differ | {total('wrong')} |",
        f"| splits found that the table lacks | {total('missing')} |",
        f"| splits of DTensor's that hold | {total('dtensor')} |",
        f"| splits of DTensor's that differ | {total('dtensor_wrong')} |",
        f"| ops taken from DTensor | {len(used)} |",
        f"| ops without a rule | {len(without)} |",
        "",
    ]
    for title, key in (
        ("Splits that the table allows and that differ", "wrong"),
        ("Splits of DTensor's that differ (its strategies for these ops aren't used)", "dtensor_wrong"),
    ):
        lines += [f"## {title}", ""]
        lines += [
            f"- `{op}`: {v[key][0]}" + (f" (and {len(v[key]) - 1} more)" if len(v[key]) > 1 else "")
            for op, v in ops.items()
            if v.get(key)
        ] or ["None."]
        lines += [""]
    lines += ["## Ops of our table with splits that it lacks", ""]
    lines += [f"- `{op}`: {ops[op]['missing'][0]}" for op in known if ops[op].get("missing")] or ["None."]
    lines += ["", "## Ops taken from DTensor", "", ", ".join(f"`{op}`" for op in used) or "None.", ""]
    lines += ["## Ops without a rule: their inputs are replicated", ""]
    could = [op for op in without if ops[op].get("missing")]
    lines += ["Discovery has found splits for: " + (", ".join(f"`{op}`" for op in could) or "none") + ".", ""]
    lines += ["For no others: " + (", ".join(f"`{op}`" for op in without if op not in could) or "none") + ".", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="names such as `add`; nothing is written then")
    parser.add_argument("--write", action="store_true", help="put single ops into the result")
    options = parser.parse_args()
    names, write = set(options.ops), options.write or not options.ops
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result = run(names, with_steps=write, show=True)
    if not write:
        print(json.dumps(result["ops"], indent=1))
        return
    if names:
        result["ops"] = json.loads(RESULT.read_text())["ops"] | result["ops"]
    RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(result))
    SOURCE.write_text(source(result))


if __name__ == "__main__":
    main()
