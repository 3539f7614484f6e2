"""What composes with what, on 2 x 2 ranks: `python -m tests.compositions [--write]` tries every pair and prints, or puts into docs/modes.md, a table."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.oracle import oracle
from tests.oracle.world import World

PAGE = Path(__file__).parents[1] / "docs" / "modes.md"
BEGIN, END = "<!-- compositions: python -m tests.compositions --write -->\n", "<!-- end -->\n"
FIRST = ("replicate", "zero1", "zero2", "fully_shard", "default")
SECOND = {  # along the second axis: the style, and the case that has the plan
    **{style: (style, "tensor_decoder") for style in FIRST},
    "tensor": ("tensor", "tensor_decoder"),
    "tensor, sequence": ("tensor", "tensor_decoder_sequence"),
    "context, keys": ("tensor", "tensor_decoder_context"),
    "context, heads": ("tensor", "tensor_decoder_context_heads"),
    "experts": ("tensor", "tensor_experts"),
}


def outcome(world: World, name: str, style: str) -> str:
    try:
        world.run(oracle.check, 4, name, style, 4, None)
    except Exception as error:
        return "refused" if "PlacementError" in str(error) else f"fails: {type(error).__name__}"
    return "exact"


def table(world: World) -> str:
    rows = [["first \\ second", *SECOND, "experts on the same axis"]]
    rows.append(["---"] * len(rows[0]))
    for first in FIRST:
        cells = [outcome(world, name, f"{first} x {style}") for style, name in SECOND.values()]
        rows.append([f"`{first}`", *cells, outcome(world, "tensor_experts", f"{first} + tensor")])
        print(rows[-1], file=sys.stderr, flush=True)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    world = World()
    text = table(world)
    world.close()
    if "--write" in sys.argv:
        page = PAGE.read_text()
        PAGE.write_text(page.replace(BEGIN + written() + END, BEGIN + text + END))
    print(text)


if __name__ == "__main__":
    main()
