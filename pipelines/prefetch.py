"""Reading ahead of the step, in a thread, within a bound."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Iterator[Item], Generic[Item]):
    """Runs an iterator in a thread; its errors surface at the consumer.

    An item is begun only when a place is free for it, so at most `depth` items wait or are being made,
    whatever the consumer does. They are the whole memory of reading ahead.

    Args:
        source: makes the items.
        depth: places.
    """

    _END = object()

    def __init__(self, source: Iterator[Item], depth: int) -> None:
        self._places = threading.Semaphore(depth)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(source,), daemon=True, name="feature-reader")
        self._thread.start()

    def __next__(self) -> Item:
        item, failed = self._queue.get()
        if item is self._END or failed:
            self._queue.put((item, failed))  # a second call ends alike
            raise item if failed else StopIteration
        self._places.release()
        made: Item = item
        return made

    def close(self) -> None:
        """Stop reading and wait for the thread; what was read ahead is dropped."""
        self._stop.set()
        self._places.release()  # the thread may be waiting for a place
        self._thread.join()
        self._queue = queue.SimpleQueue()

    def _fill(self, source: Iterator[Item]) -> None:
        try:
            while True:
                self._places.acquire()
                if self._stop.is_set():
                    return
                item = next(source, self._END)
                self._queue.put((item, False))
                if item is self._END:
                    return
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            self._queue.put((error, True))
        finally:
            if isinstance(source, Generator):
                source.close()  # it may hold a reader of its own
