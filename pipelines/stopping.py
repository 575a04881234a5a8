"""Stopping a run from outside without losing its work."""

from __future__ import annotations

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
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._noted = 0.0
        self._before: dict[signal.Signals, Any] = {}

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
        if self.name is None:
            self.name, self._noted = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._noted > REPEAT_SECONDS:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)
