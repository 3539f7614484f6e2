"""Stages of a compilation and their times, shown on rank 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status


class Stages:
    """Times named stages. On a terminal the stage under way is shown; at the end one line sums up. Goes to stderr."""

    def __init__(self, title: str, show: bool) -> None:
        self.title, self.show = title, show
        self.seconds: dict[str, float] = {}
        self.console = Console(file=sys.stderr, highlight=False)
        self.status: Status | None = self.console.status(f"{title}: ...") if show and self.console.is_terminal else None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.status:
            self.status.update(f"{self.title}: {stage} ...")
            self.status.start()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
            if self.status:
                self.status.stop()

    def report(self) -> None:
        """Print the line that sums up."""
        if self.show:
            parts = ", ".join(f"{k} {v:.1f}" for k, v in self.seconds.items())
            self.console.print(f"{self.title} in {sum(self.seconds.values()):.1f} s ({parts})", soft_wrap=True)
