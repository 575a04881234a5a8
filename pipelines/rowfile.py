"""Feature rows on disk: a safetensors file that can be written row by row and read by row slice.

A safetensors file is an 8-byte header length, a JSON header and raw data. The header may be padded with
blanks, so a file with a header area of fixed size can be appended to first and given its header when the
number of rows is known. One file holds one tensor, `features` [rows, width].
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

import torch
from torch import Tensor

TENSOR = "features"
HEADER_BYTES = 1024  # multiple of 64: data stay aligned for memory maps
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
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
        width: elements of a row.
        dtype: dtype of the stored rows; appended tensors are converted to it.
        buffer_bytes: rows held in memory before they go to the operating system (0 writes through).
    """

    def __init__(self, path: Path, width: int, dtype: torch.dtype, buffer_bytes: int = 0) -> None:
        self.path = path
        self.width = width
        self.dtype = dtype
        self.row_bytes = width * dtype.itemsize
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

    def append(self, rows_TW: Tensor, *, finite: bool = False) -> None:
        """Append [T, width] rows of any float dtype; `finite` says that they have been checked.

        Raises:
            NonFiniteError: a row is not finite in the stored dtype; the message gives row and column.
            DiskFullError: the file cannot grow.
        """
        rows_TW = rows_TW.detach().to(device="cpu", dtype=self.dtype).contiguous()
        if rows_TW.ndim != 2 or rows_TW.shape[1] != self.width:
            raise StoreError(f"expected rows of width {self.width}, found shape {tuple(rows_TW.shape)}")
        if not finite and not bool(torch.isfinite(rows_TW).all()):
            row, column = (~torch.isfinite(rows_TW)).nonzero()[0].tolist()
            at = self.rows - self._segment_start + row
            raise NonFiniteError(
                f"non-finite value ({rows_TW[row, column].item()}) in row {at}, column {column} "
                f"(stored as {str(self.dtype).removeprefix('torch.')})"
            )
        data = rows_TW.view(torch.uint8).numpy().data.cast("B")
        with disk_errors(self.path):
            written = 0
            while written < len(data):  # an unbuffered stream may write less than asked
                written += self._stream.write(data[written:])
        self._hash.update(data)
        self.rows += rows_TW.shape[0]

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
            self._stream.write(_header(self.rows, self.width, self.dtype))
        self.sync()
        self._stream.close()

    def close(self) -> None:
        """Close without a header; the file can be continued later."""
        self._stream.close()


def sealed_bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    """Exact size of a sealed part."""
    return HEADER_BYTES + rows * width * dtype.itemsize


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


def _header(rows: int, width: int, dtype: torch.dtype) -> bytes:
    data_bytes = rows * width * dtype.itemsize
    content = {TENSOR: {"dtype": _CODES[dtype], "shape": [rows, width], "data_offsets": [0, data_bytes]}}
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
