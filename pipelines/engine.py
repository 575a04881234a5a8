"""What a capture asks of any engine: jobs in, finished sequences with their feature rows out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipelines.rowfile import HEADER_BYTES

_PIECE_BYTES = 32 << 20


class EngineError(RuntimeError):
    """The engine cannot run this target or has failed."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        max_new_tokens: 0 captures the prompt alone.
        temperature: 0 is greedy.
        seed: of the whole run; every job derives its own from it.
    """

    max_new_tokens: int = 0
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """One request: `key` comes back with the result; `seed` belongs to this request alone."""

    key: str
    token_ids: list[int]
    sampling: Sampling
    seed: int = 0


@dataclass(frozen=True)
class RowSpool:
    """A file of rows that an engine wrote (`pipelines.rowfile.RowFile` without its header)."""

    path: Path
    rows: int
    sha256: str


@dataclass
class Captured:
    """A finished job.

    Attributes:
        key: of the job.
        output_ids: tokens that the target produced, [] for a prompt alone.
        files: feature rows on disk, in order.
        pieces: feature rows that are still to be made or are in memory, in order; used when `files` is empty.
        error: why there are no valid rows; None if there are.
    """

    key: str
    output_ids: list[int]
    files: list[RowSpool] = field(default_factory=list)
    pieces: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    error: str | None = None

    def rows(self, width: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """The feature rows [T, width], in pieces of bounded size."""
        if not self.files:
            yield from self.pieces
        row_bytes = width * dtype.itemsize
        step = max(1, _PIECE_BYTES // row_bytes)
        for file in self.files:
            for start in range(0, file.rows, step):
                count = min(step, file.rows - start)
                raw = np.fromfile(
                    file.path,
                    dtype=np.uint8,
                    count=count * row_bytes,
                    offset=HEADER_BYTES + start * row_bytes,
                )
                yield torch.from_numpy(raw).view(dtype).view(count, width)

    def discard(self) -> None:
        """Delete the row files."""
        for file in self.files:
            file.path.unlink(missing_ok=True)


class Engine(Protocol):
    """Takes jobs at any time; gives each back once, in the order in which they end."""

    def start(self) -> None:
        """Begin loading; does nothing the second time.

        Raises:
            EngineError: the engine cannot run this target.
        """
        ...

    def stop(self) -> None:
        """End it, whatever it does; does nothing if it was never started."""
        ...

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            EngineError: the engine is gone.
        """
        ...

    def results(self) -> Iterator[Captured]:
        """Finished jobs until none is left; jobs may be submitted between two of them.

        Raises:
            EngineError: the engine failed.
        """
        ...
