"""Feature rows on disk: a safetensors file that can be written row by row and read by row slice.

A safetensors file is an 8-byte header length, a JSON header and raw data. The header may be padded with
blanks, so a file with a header area of fixed size can be appended to first and given its header when the
number of rows is known. One file holds one tensor of rows (`pipelines.rowformat`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.rowformat import RowFormat, all_finite

HEADER_BYTES = 1024  # multiple of 64: data stay aligned for memory maps
_LONGEST_HEADER = 1 << 20
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StoreError(RuntimeError):
    """A feature store cannot be read or written as asked."""


class DiskFullError(StoreError):
    """No room for the next rows; what was complete before stays valid."""


class NonFiniteError(StoreError):
    """A captured row holds NaN or infinity."""


class RowFile:
    """One part under construction: append rows, mark segments, seal.

    Args:
        path: file to create, or to continue if it exists.
        row_format: of the rows.
        buffer_bytes: rows held in memory before they go to the operating system (0 writes through).
    """

    def __init__(self, path: Path, row_format: RowFormat, buffer_bytes: int = 0) -> None:
        self.path = path
        self.format = row_format
        self.row_bytes = row_format.row_bytes
        self._hash = hashlib.sha256()
        with disk_errors(path):
            self._stream = path.open("r+b" if path.exists() else "w+b", buffering=buffer_bytes)
            if os.fstat(self._stream.fileno()).st_size < HEADER_BYTES:
                self._stream.truncate(HEADER_BYTES)
            self.rows = (self._stream.seek(0, os.SEEK_END) - HEADER_BYTES) // self.row_bytes
            self._stream.seek(HEADER_BYTES + self.rows * self.row_bytes)
        self._segment_start = self.rows

    @property
    def bytes(self) -> int:
        return HEADER_BYTES + self.rows * self.row_bytes

    def begin_segment(self) -> None:
        """The rows appended from here on belong to one sample."""
        self._segment_start = self.rows
        self._hash = hashlib.sha256()

    def append(self, rows: Tensor) -> None:
        """Append [T, width] rows of any float dtype, or packed ones (which are finite), uint8 [T, row_bytes].

        Raises:
            NonFiniteError: a row is not finite in the stored dtype; the message gives row and column.
            DiskFullError: the file cannot grow.
        """
        packed = rows if rows.dtype == torch.uint8 else self._packed(rows)
        if packed.ndim != 2 or packed.shape[1] != self.row_bytes:
            raise StoreError(f"expected rows of {self.row_bytes} bytes, found shape {tuple(packed.shape)}")
        data = packed.cpu().contiguous().numpy().reshape(-1).data
        with disk_errors(self.path):
            written = 0
            while written < len(data):  # an unbuffered stream may write less than asked
                written += self._stream.write(data[written:])
        self._hash.update(data)
        self.rows += packed.shape[0]

    def _packed(self, rows_TW: Tensor) -> Tensor:
        if rows_TW.ndim != 2 or rows_TW.shape[1] != self.format.width:
            raise StoreError(f"expected rows of width {self.format.width}, found {tuple(rows_TW.shape)}")
        rows_TW = self.format.cast(rows_TW)
        if not all_finite(rows_TW):
            row, column = (~torch.isfinite(rows_TW)).nonzero()[0].tolist()
            at = self.rows - self._segment_start + row
            raise NonFiniteError(
                f"non-finite value ({rows_TW[row, column].item()}) in row {at}, column {column} "
                f"(stored as {str(self.format.stored).removeprefix('torch.')})"
            )
        return self.format.pack(rows_TW)

    def end_segment(self) -> dict[str, Any]:
        """{"part", "part_row", "rows", "sha256"} of the rows since `begin_segment`."""
        return {
            "part": self.path.name,
            "part_row": self._segment_start,
            "rows": self.rows - self._segment_start,
            "sha256": self._hash.hexdigest(),
        }

    def rewind(self, rows: int) -> None:
        """Drop everything after the first `rows` rows."""
        self._stream.seek(HEADER_BYTES + rows * self.row_bytes)
        self._stream.truncate()
        self.rows = rows
        self.begin_segment()

    def sync(self) -> None:
        """Flush and fsync.

        Raises:
            DiskFullError: see `append`.
        """
        with disk_errors(self.path):
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def seal(self) -> None:
        """Write the header and close: from here on the file is an ordinary safetensors file.

        Raises:
            DiskFullError: see `append`.
        """
        with disk_errors(self.path):
            self._stream.truncate(self.bytes)
            self._stream.seek(0)
            self._stream.write(_header(self.rows, self.format))
        self.sync()
        self._stream.close()

    def close(self) -> None:
        """Close without a header; the file can be continued later."""
        self._stream.close()


class PartReader:
    """Rows of a sealed part. Safe to use from several threads; closes when nobody holds it.

    Read calls, no memory map: pages of a map that were read count as the process's own memory.

    Raises:
        StoreError: not a safetensors file with rows of `row_format`.
    """

    def __init__(self, path: Path, row_format: RowFormat) -> None:
        self._format = row_format
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
            length = int.from_bytes(self._file.read(8), "little")
            entry = json.loads(self._file.read(min(length, _LONGEST_HEADER)))[row_format.tensor]
            self.rows = int(entry["shape"][0])
            self._start = 8 + length + int(entry["data_offsets"][0])
            matches = entry == row_format.header_entry(self.rows)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise StoreError(f"{path.name}: cannot be read as safetensors ({error!r})") from None
        if not matches:
            raise StoreError(f"{path.name}: holds {entry}, expected {row_format.header_entry(self.rows)}")

    def read(self, start: int, stop: int) -> Tensor:
        """[stop - start, width] in the reader's dtype.

        Raises:
            StoreError: the file ends before.
        """
        raw = np.empty((stop - start, self._format.row_bytes), dtype=np.uint8)
        left, at = raw.reshape(-1).data, self._start + start * self._format.row_bytes
        while left:
            count = os.preadv(self._file.fileno(), [left], at)
            if not count:
                raise StoreError(f"{self._path.name}: ends before row {stop}")
            left, at = left[count:], at + count
        return self._format.unpack(torch.from_numpy(raw))


def sealed_bytes(rows: int, row_format: RowFormat) -> int:
    """Exact size of a sealed part."""
    return HEADER_BYTES + rows * row_format.row_bytes


def segment_digest(path: Path, part_row: int, rows: int, row_bytes: int) -> str | None:
    """sha256 of a run of rows read from the file itself (sealed or not); None if the file ends before it."""
    digest = hashlib.sha256()
    left = rows * row_bytes
    with path.open("rb") as stream:
        stream.seek(HEADER_BYTES + part_row * row_bytes)
        while left:
            chunk = stream.read(min(left, 1 << 22))
            if not chunk:
                return None
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def _header(rows: int, row_format: RowFormat) -> bytes:
    content = {row_format.tensor: row_format.header_entry(rows)}
    length = HEADER_BYTES - 8
    return length.to_bytes(8, "little") + json.dumps(content).encode().ljust(length)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` while writing `path` into `DiskFullError` or `StoreError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise DiskFullError(
                f"no room to write {path}: {error.strerror}; samples completed before are kept, free space "
                "and run the same command again to continue"
            ) from None
        raise StoreError(f"cannot write {path}: {error}") from None
