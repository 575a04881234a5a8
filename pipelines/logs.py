"""What a training run writes while it goes on: metrics.jsonl, TensorBoard events, a progress bar with ETA.

Only rank 0 writes. After a resume, lines of steps that are computed again are removed first, so that a step
has one line whatever happened in between.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn, track

from pipelines.files import write_text_atomically

METRICS = "metrics.jsonl"
QUIET_SECONDS = 10.0  # without a terminal, one line of progress per this many seconds


class RunLog:
    """Writer of one run's logs; does nothing on ranks other than 0."""

    def __init__(self, run: Path, *, step: int, tensorboard: bool, active: bool) -> None:
        self._active = active
        self._events: Any = None
        self._last_line = 0.0
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        if not active:
            return
        self._path = run / METRICS
        drop_lines_after(self._path, step)
        self._stream = self._path.open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f} %"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
            )
            self._task = self._progress.add_task("train", total=1.0, figures="")

    def __enter__(self) -> RunLog:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()
        if self._events:
            self._events.close()
        if self._active:
            self._stream.close()

    def write(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        """One line of metrics.jsonl and one TensorBoard point per figure.

        Args:
            kind: ``train`` or ``validation``.
            step: finished optimizer steps.
            figures: numbers by name, lists of one number per slot, or numbers by kind.
        """
        if not self._active:
            return
        self._stream.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")
        self._stream.flush()
        if self._events:
            for name, value in figures.items():
                for part, number in _parts(value):
                    self._events.add_scalar(f"{kind}/{name}{part}", number, step)

    def advance(self, done: float, text: str) -> None:
        """Show progress.

        Args:
            done: finished share of the run, 0 to 1.
            text: figures to show beside it.
        """
        if not self._active:
            return
        if self._progress:
            self._progress.update(self._task, completed=done, figures=text)
        elif time.monotonic() - self._last_line > QUIET_SECONDS or done >= 1.0:
            self._last_line = time.monotonic()
            self.say(f"{100 * done:5.1f} %  {text}")

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        if self._active:
            self._console.print(text, highlight=False, markup=False)


def _parts(value: Any) -> list[tuple[str, float]]:
    """A figure's numbers and what each adds to its name."""
    if isinstance(value, dict):
        return [(f"/{kind}", number) for kind, number in value.items()]
    if isinstance(value, list):
        return [(f"/{slot}", number) for slot, number in enumerate(value, 1)]
    return [("", value)]


def watched(count: int, text: str) -> Iterator[int]:
    """0 … count - 1 with a progress bar on rank 0; without a terminal, a line every `QUIET_SECONDS`."""
    console = Console(stderr=True)
    if os.environ.get("RANK", "0") != "0":
        yield from range(count)
    elif console.is_terminal:
        yield from track(range(count), description=text, console=console, transient=True)
    else:
        began = said = time.monotonic()
        for i in range(count):
            if time.monotonic() - said > QUIET_SECONDS:
                said = time.monotonic()
                left = (said - began) / i * (count - i)
                console.print(f"{text}: {i} of {count}, {left:.0f} s left", highlight=False, markup=False)
            yield i


def drop_lines_after(path: Path, step: int) -> None:
    """Remove lines of steps after `step`, and a last line that was cut by a kill."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    write_text_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a last line that was cut by a kill is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory so far: of the allocator on CUDA, of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
