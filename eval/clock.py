"""Moments of a decode loop, taken without making the device wait."""

from __future__ import annotations

import time

import torch


class Clock:
    """Marks moments; differences are read once, after the last mark.

    On CUDA a mark is an event in the stream, so a loop that is being timed runs as it would untimed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Record the present moment."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between each mark and the next."""
        if self._cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
