"""What a capture asks of any engine: jobs in, finished sequences with their feature rows out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from csbp.rows import RowSet
from pipelines.rowfile import HEADER_BYTES
from pipelines.rowformat import RowFormat

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
    """One request.

    Attributes:
        key: comes back with the result.
        token_ids: the prompt.
        sampling: how it is answered.
        rows: family of rows -> which are wanted; those past the end of the sequence are not made. The other
            rows go as soon as they exist.
        seed: belongs to this request alone.
    """

    key: str
    token_ids: list[int]
    sampling: Sampling
    rows: dict[str, RowSet]
    seed: int = 0

    def rows_made(self, output_ids: list[int]) -> dict[str, RowSet]:
        """Of the wanted rows those that exist; the last generated token was never an input."""
        length = len(self.token_ids) + max(0, len(output_ids) - 1)
        whole = RowSet.of([(0, length)])
        return {family: rows.intersection(whole) for family, rows in self.rows.items()}


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
        made: family of rows -> which rows of the sequence these are.
        files: family -> rows on disk, in order; None if they are not on disk.
        pieces: family -> next rows [T, width] in any float dtype, in pieces that are still to be made or are
            in memory; used when there are no files.
        error: why there are no valid rows; None if there are.
    """

    key: str
    output_ids: list[int]
    made: dict[str, RowSet]
    files: dict[str, list[RowSpool]] | None = None
    pieces: Iterator[dict[str, Tensor]] = field(default_factory=lambda: iter(()))
    error: str | None = None

    def stored(self, formats: dict[str, RowFormat]) -> Iterator[tuple[str, Tensor]]:
        """(family, next rows) in pieces of bounded size; rows on disk are packed ones (`RowFormat.pack`)."""
        if self.files is None:
            for piece in self.pieces:
                yield from piece.items()
            return
        for family, files in self.files.items():
            row_bytes = formats[family].row_bytes
            step = max(1, _PIECE_BYTES // row_bytes)
            for file in files:
                for start in range(0, file.rows, step):
                    count = min(step, file.rows - start)
                    offset = HEADER_BYTES + start * row_bytes
                    raw = np.fromfile(file.path, dtype=np.uint8, count=count * row_bytes, offset=offset)
                    yield family, torch.from_numpy(raw).view(count, row_bytes)

    def read(self, formats: dict[str, RowFormat]) -> dict[str, Tensor]:
        """Family -> all of its rows [T, width] as a store gives them. For short sequences."""
        pieces: dict[str, list[Tensor]] = {
            family: [torch.empty(0, of.width, dtype=of.dtype)] for family, of in formats.items()
        }
        for family, rows in self.stored(formats):
            of = formats[family]
            packed = rows if rows.dtype == torch.uint8 else of.pack(of.cast(rows))
            pieces[family].append(of.unpack(packed.cpu()))
        return {family: torch.cat(rows) for family, rows in pieces.items()}

    def discard(self) -> None:
        """Delete the row files."""
        for files in (self.files or {}).values():
            for file in files:
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
