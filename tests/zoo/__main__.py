"""Run the zoo: `python -m tests.zoo [NAME ...]`. Prints a table, and puts its rows into docs/models.md."""

from __future__ import annotations

import argparse
import platform
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.zoo.check import BATCH, STEPS, STYLES, WORLDS, Report, check
from tests.zoo.models import ZOO

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
COLUMNS = ("model", "kind", "result", "ways", "nodes", "fallbacks", "gathers", "trace s", "remarks")
TEXT = """# Models

Tiny models of many architectures, the most of them from `transformers` {transformers}, built from small configs with their dropout on. Each is trained
for {steps} steps with AdamW and gradient clipping on {batch} samples, compiled for {worlds} ranks in the styles {styles}, and compared with the
plain step on one device: losses, parameters and optimizer states, in float64 at 1e-9 of the largest value (1e-6 where the model itself computes in
float32, as the losses of causal language models do).

- result: *equal*, or *refused* with the reason, before anything runs.
- ways: worlds and styles in which it was compared: all {ways}, or 1 (3 ranks, `fully_shard`) where it was last run with `--quick`.
- nodes: of the captured step. fallbacks: nodes for which no rule was found, so that each rank runs them on the whole.
- gathers: activations that move between ranks other than as sums. Models whose samples meet (experts, pairs) may have some.
- trace s: seconds of tracing on two cores of a busy machine; placing and partitioning come to a few more.

Made by `python -m tests.zoo`, which takes an hour; `python -m tests.zoo NAME ...` renews some rows. Tested by `tests/test_zoo.py`. PyTorch {torch}.

"""


def row(report: Report) -> tuple[str, ...]:
    a = report.architecture
    remarks = [a.note, *(["samples meet in it"] if a.mixes else [])]
    if report.result != "equal":
        remarks.append(reason(report))
    fallbacks = f"{report.fallback_share:.1%}" if report.fallbacks else "0"
    numbers = (f"{report.ways}", f"{report.nodes}", fallbacks, f"{len(report.gathers)}", f"{report.trace:.0f}")
    return a.name, a.kind, report.result, *numbers, "; ".join(filter(None, remarks))


def reason(report: Report) -> str:
    """The first offence, on one line."""
    lines = [line.strip() for line in report.detail.splitlines() if line.strip()]
    return " ".join(lines[:3])[:200].replace("|", "/")


def page(rows: dict[str, str]) -> str:
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    counts = {
        "ways": len(WORLDS) * len(STYLES),
        "steps": STEPS,
        "batch": BATCH,
        "worlds": " and ".join(map(str, WORLDS)),
    }
    head = TEXT.format(**versions, **counts, styles=" and ".join(f"`{s}`" for s in STYLES))
    table = [line(COLUMNS), line(["---"] * len(COLUMNS)), *(rows[name] for name in ZOO if name in rows)]
    return head + "\n".join(table) + "\n"


def line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def known() -> dict[str, str]:
    """The rows that the page has, by model."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    return {text.split("|")[1].strip(): text for text in lines if text.startswith("|")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ZOO)}; default: all")
    parser.add_argument("--quick", action="store_true", help="3 ranks, fully_shard; default: all worlds and styles")
    options = parser.parse_args()
    names = options.names or list(ZOO)
    if unknown := set(names) - ZOO.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    console, table = (
        Console(),
        Table(*COLUMNS, title=f"PyTorch {torch.__version__}, Python {platform.python_version()}"),
    )
    for name in names:
        report = check(ZOO[name], [3], ["fully_shard"]) if options.quick else check(ZOO[name])
        cells = row(report)
        table.add_row(*cells)
        console.print(f"{name}: {report.result} in {report.total:.0f} s", highlight=False)
        for detail in (report.detail, *report.gathers, *map(str, report.fallbacks.items())):
            if detail:
                console.print(f"  {detail}", markup=False, highlight=False)
        PAGE.write_text(page({**known(), name: line(cells)}))
    console.print(table)


if __name__ == "__main__":
    main()
