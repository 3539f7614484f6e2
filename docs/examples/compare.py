"""Train the GPT of train_gpt.py twice, compiled on several ranks and plain on one process, and compare step by step.

    python docs/examples/compare.py                                     # what `make demo` runs
    python docs/examples/compare.py --ranks 3 --style replicate         # further flags go to both trainings

Both run in float64: what two orders of adding numbers leave is then some 1e-13, and anything larger is a mistake.
Exits with 1 if any loss differs by more than the tolerance.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from train_gpt import curve

tolerance = 1e-9
shown = 12  # rows of the table


def train(title: str, command: list[str], log: Path) -> dict:
    Console().rule(title)
    # One thread a process: ranks that share the cores would otherwise wait for each other's threads.
    run = subprocess.run([sys.executable, *command, "--losses", str(log)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    if run.returncode:
        sys.exit(f"{title}: stopped with code {run.returncode}, see above")
    return json.loads(log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    args, further = parser.parse_known_args()
    example = [str(Path(__file__).with_name("train_gpt.py")), "--float64", *further]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]  # torchrun
    with tempfile.TemporaryDirectory() as folder:
        ours = train(f"compiled by spmd, {args.ranks} ranks", [*launch, *example], Path(folder, "ranks.json"))
        plain = train("the same steps undecorated, 1 process", [*example, "--plain"], Path(folder, "plain.json"))

    Console().rule("side by side")
    a, b = [*ours["losses"], ours["validation"]], [*plain["losses"], plain["validation"]]
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    print(f"{f'{args.ranks} ranks':^48}{'1 process':^48}")
    print(*(f"{left:<48}{right}" for left, right in zip(curve(a[:-1], 40), curve(b[:-1], 40), strict=True)), sep="\n")
    table = Table("step", f"{args.ranks} ranks", "1 process", "difference")
    last = len(a) - 1
    for i in sorted({row * (last - 1) // (shown - 1) for row in range(shown)} | {last}):
        table.add_row("validation" if i == last else str(i), f"{a[i]:.9f}", f"{b[i]:.9f}", f"{differences[i]:.1e}")
    Console().print(table)
    equal = max(differences) <= tolerance  # false for NaN too
    print(f"largest difference over {last} steps and validation: {max(differences):.1e}", end="; ")
    print(f"{'within' if equal else 'OVER'} the tolerance of {tolerance:.0e}")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
