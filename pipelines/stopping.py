"""Stopping a run from outside without losing its work."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

REPEAT_SECONDS = 2.0


class StopSignal:
    """Notes SIGTERM and SIGINT while it is entered; the step under way ends, the run is saved.

    A later signal has its usual effect, unless it follows within two seconds: a terminal and a launcher may
    both send the first. Outside the main thread nothing is installed.

    A rank whose launcher was killed gets no signal and would train on, unseen; it counts as told to stop.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self._launcher = os.getppid() if launched else None
        self._noted = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def name(self) -> str | None:
        """What asked to stop, None as long as nothing did."""
        if self._name is None and self._launcher not in (None, os.getppid()):
            self._name = "the end of its launcher"
        return self._name

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._name is None:
            self._name, self._noted = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._noted > REPEAT_SECONDS:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)
