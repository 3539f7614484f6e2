"""Run one case in the foreground: `python -m tests.oracle.run CASE STYLE W [--samples N] [--standin NAME]`.

With W = 1 everything happens in this process, so a debugger works. `python -m tests.oracle.run list` lists the cases.
"""

from __future__ import annotations

import argparse

from tests.oracle import oracle, standins
from tests.oracle.world import World


def main() -> None:
    from tests.oracle.cases import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["list", *CASES], metavar="CASE")
    parser.add_argument(
        "style", nargs="?", default="replicate", help="as `spmd_compile` of tests/oracle/oracle.py has them"
    )
    parser.add_argument("W", type=int, nargs="?", default=1)
    parser.add_argument("--samples", type=int, help="samples a rank; default: as the case says")
    parser.add_argument("--standin", help="a function of tests/oracle/standins.py in place of the compiler")
    options = parser.parse_args()
    if options.case == "list":
        print("\n".join(CASES))
        return
    compile = getattr(standins, options.standin) if options.standin else oracle.spmd_compile
    arguments = (options.case, options.style, options.W, options.samples, compile)
    if options.W == 1:
        worst = [oracle.check(*arguments)]
    else:
        pool = World(show=True)
        worst = pool.run(oracle.check, options.W, *arguments)
        pool.close()
    print(f"{options.case} {options.style} W={options.W}: equal, at most {max(worst):.3g} of the tolerance")


if __name__ == "__main__":
    main()
