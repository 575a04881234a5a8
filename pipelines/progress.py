"""Progress of a long job on standard error: a bar with ETA on a terminal, else a line every 10 s."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_QUIET_SECONDS = 10.0


class Bar:
    """Counts up to `total`; `figures` is a short text beside the bar."""

    def __init__(self, title: str, total: int, console: Console | None = None) -> None:
        self._title, self._total = title, total
        self._console = console or Console(stderr=True)
        self._done = 0
        self._figures = ""
        self._started = self._last_line = time.monotonic()
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
            )
            self._task = self._progress.add_task(self._title, total=self._total, figures="")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, count: int = 1, figures: str = "") -> None:
        """`count` more are done."""
        self._done += count
        self._figures = figures or self._figures
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done, figures=self._figures)
            return
        now = time.monotonic()
        if now - self._last_line < _QUIET_SECONDS:
            return
        self._last_line = now
        left = (now - self._started) / self._done * (self._total - self._done)
        self._console.print(
            f"{self._title}: {self._done}/{self._total}, about {left:.0f} s left {self._figures}",
            highlight=False,
        )
