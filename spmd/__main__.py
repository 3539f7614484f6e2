"""`python -m spmd` is the `spmd` command."""

from spmd.cli import app

app()
