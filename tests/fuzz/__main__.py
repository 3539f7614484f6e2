"""Search for failures: `python -m tests.fuzz [--examples N] [--seed S] [--longest L] [--out FILE]`. Every failure is shrunk and printed once a signature."""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.check import Finding, check
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink
from tests.fuzz.strategies import MOVES, programs
from tests.fuzz.vocabulary import OPS


def signature(program: Program, finding: Finding) -> str:
    """What a failure is told by: its kind and the words of its small program, or its message."""
    words = "+".join(sorted({d.word for d in program.body} - {"linear"}))
    return f"{finding.kind} {words} {finding.detail.splitlines()[0][:60] if finding.kind == 'refused' else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=7)
    parser.add_argument("--budget", type=int, default=80)
    parser.add_argument("--moves", action="store_true", help="words that move, join and cut alone")
    parser.add_argument("--out", default="/dev/stdout")
    args = parser.parse_args()
    kinds: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    words: Counter[str] = Counter()
    unfit: Counter[str] = Counter()
    seen: set[str] = set()
    messages: set[str] = set()
    out = open(args.out, "a", buffering=1)  # noqa: SIM115
    started = time.time()
    checking = [0.0]

    @seed(args.seed)
    @settings(
        max_examples=args.examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(args.longest, MOVES.split() if args.moves else OPS))
    def search(program: Program) -> None:
        began = time.time()
        finding = check(program)
        checking[0] += time.time() - began
        kinds[finding.kind] += 1
        words.update(d.word for d in program.body)
        fallbacks.update(finding.fallbacks.keys())
        if kinds.total() % 20 == 0:
            print(f"-- {kinds.total()} examples: {dict(kinds)}", file=out)
        if finding.kind == "unfit":
            unfit[finding.detail.splitlines()[0][:100]] += 1
        first = finding.detail.splitlines()[0] if finding.detail else ""
        if not finding.failed or (finding.kind != "wrong" and first in messages):
            return
        messages.add(first)
        small = shrink(program, lambda p: check(p).kind == finding.kind, args.budget)
        finding = check(small)
        if signature(small, finding) not in seen:
            seen.add(signature(small, finding))
            print(f"#### {finding.kind}\n{small!r}\n{finding.detail}\n", file=out)

    warnings.simplefilter("ignore")
    search()
    spent = time.time() - started
    print(f"unfit: {dict(unfit)}", file=out)
    print(
        f"==== seed {args.seed}: {dict(kinds)} in {spent:.0f} s ({checking[0]:.0f} s checking), {len(words)} words; fallbacks: {dict(fallbacks)}",
        file=out,
    )


if __name__ == "__main__":
    main()
