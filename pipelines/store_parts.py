"""The parts of one family (feature rows, or last hidden states) in a shard that is being written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.rowfile import HEADER_BYTES, RowFile
from pipelines.rowformat import RowFormat
from pipelines.store_schema import part_name

_PIECE_BYTES = 16 << 20  # packed at once


class PartSeries:
    """Appends rows of samples to files in `staging`, closing each at a size.

    Attributes:
        sealed: part name -> rows of the closed parts of the open shard.
    """

    def __init__(self, staging: Path, family: str, row_format: RowFormat, shard: int) -> None:
        self.family = family
        self.format = row_format
        self.sealed: dict[str, int] = {}
        self._staging = staging
        self._shard = shard
        self._part: RowFile | None = None
        self._segments: list[dict[str, Any]] = []
        self._mark = (0, 0)

    @property
    def bytes(self) -> int:
        """Of all rows in the open shard."""
        open_rows = self._part.rows if self._part is not None else 0
        return (open_rows + sum(self.sealed.values())) * self.format.row_bytes

    # ---------------------------------------------------------------- a sample

    def begin(self) -> None:
        """The rows appended from here on belong to one sample."""
        part = self._open_part()
        part.begin_segment()
        self._mark = (len(self.sealed), part.rows)
        self._segments = []

    def append(self, rows: Tensor, part_bytes: int) -> None:
        """See `RowFile.append`; a part of `part_bytes` is closed first."""
        for piece in torch.split(rows, max(1, _PIECE_BYTES // self.format.row_bytes)):
            part = self._open_part()
            if part.bytes - HEADER_BYTES >= part_bytes:
                self._close_segment(part)
                self.seal()
                part = self._open_part()
                part.begin_segment()
            part.append(piece)

    def end(self) -> list[dict[str, Any]]:
        """The sample is complete: where its rows are."""
        self._close_segment(self._open_part())
        return self._segments

    def undo(self) -> None:
        """Drop what was appended since `begin`."""
        parts, rows = self._mark
        begun = list(self.sealed)[parts:]  # sealed since: the first of them also holds earlier samples
        if begun:
            if self._part is not None:
                self._part.close()
                self._part.path.unlink()
            for name in begun[1:]:
                (self._staging / name).unlink()
            for name in begun:
                del self.sealed[name]
            self._part = RowFile(self._staging / begun[0], self.format)
        if self._part is not None:
            self._part.rewind(rows)

    def adopt(self, file: Path, digest: str, rows: int) -> dict[str, Any]:
        """Take an unsealed row file over as a part of its own, by rename; its segment."""
        self.seal()
        name = self._next_name()
        file.rename(self._staging / name)
        self.sealed[name] = rows
        part = RowFile(self._staging / name, self.format)
        part.rewind(rows)
        part.seal()
        return {"part": name, "part_row": 0, "rows": rows, "sha256": digest}

    # ---------------------------------------------------------------- the shard

    def seal(self) -> None:
        """Close the open part."""
        if self._part is None:
            return
        if self._part.rows:
            self._part.seal()
            self.sealed[self._part.path.name] = self._part.rows
        else:
            self._part.close()
            self._part.path.unlink()
        self._part = None

    def restart(self, shard: int) -> None:
        """The shard was committed: the next part belongs to another."""
        self.sealed = {}
        self._shard = shard

    def recover(self, ends: dict[str, int]) -> None:
        """Continue with parts found in `staging`, each cut after its complete rows; the last stays open."""
        for name in sorted(ends, key=lambda name: (len(name), name)):
            self.seal()
            self._part = RowFile(self._staging / name, self.format)
            self._part.rewind(ends[name])

    def sync(self) -> None:
        if self._part is not None:
            self._part.sync()

    def close(self) -> None:
        """Release the open part as it is."""
        if self._part is not None:
            self._part.close()

    def drop(self) -> None:
        """Remove the open part; it holds nothing that is needed."""
        if self._part is not None:
            self._part.close()
            self._part.path.unlink(missing_ok=True)

    def _open_part(self) -> RowFile:
        if self._part is None:
            self._part = RowFile(self._staging / self._next_name(), self.format)
        return self._part

    def _next_name(self) -> str:
        return part_name(self.family, self._shard, len(self.sealed))

    def _close_segment(self, part: RowFile) -> None:
        segment = part.end_segment()
        if segment["rows"]:
            self._segments.append(segment)
