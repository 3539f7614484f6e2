"""The `spmd` command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Compile plain PyTorch train steps for a mesh of devices."
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="the training script; what follows are its arguments")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="processes on this machine")] = 1,
) -> None:
    """Run a script under torchrun, one thread a rank unless OMP_NUM_THREADS says otherwise."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        script,
        *context.args,
    ]
    raise typer.Exit(subprocess.call(command, env={"OMP_NUM_THREADS": "1", **os.environ}))


@app.command()
def doctor() -> None:
    """Show what spmd finds on this machine."""
    from spmd import __version__

    backends = [b for b in ("gloo", "nccl") if dist.is_backend_available(b)]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = f"{torch.accelerator.device_count()} x {accelerator.type}" if accelerator else "CPU only"
    table = Table(show_header=False)
    for name, value in (
        ("spmd", __version__),
        ("torch", torch.__version__),
        ("python", platform.python_version()),
        ("cores", str(os.cpu_count())),
        ("devices", devices),
        ("backends", ", ".join(backends)),
        ("launched by torchrun", "yes" if "RANK" in os.environ else "no"),
    ):
        table.add_row(name, value)
    Console().print(table)


@app.command()
def passes() -> None:
    """List the graph passes, plugins' too: options, what each needs and gives, and what it may do to numbers."""
    from dataclasses import fields

    from spmd.passes import registry, spec

    entries = registry.known()
    table = Table("pass", "options", "contract", "what it does", "from", show_lines=True)
    for name, entry in entries.items():
        cls = registry.load(name, entries)
        options = "\n".join(map(spec.option_text, fields(cls)))  # type: ignore[arg-type]
        facts = [
            f"{word} {fact}" for word in ("requires", "provides", "invalidates") for fact in sorted(getattr(cls, word))
        ]
        what = (cls.__doc__ or "").strip().splitlines()[0]
        table.add_row(name, options, "\n".join([*facts, cls.numerics]), what, entry.dist.name if entry.dist else "spmd")
    Console().print(table)
    Console().print(f"by default: {','.join(registry.DEFAULT)}", highlight=False)


if __name__ == "__main__":
    app()
