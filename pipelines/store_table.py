"""The samples table of a feature store: its columns, rows, checksums and files.

In memory a row is a dictionary whose `token_ids` and `loss_mask` are arrays, because samples have up to
millions of tokens; everything else is plain Python. `kept`, `anchor_spans`, `last_rows` and `last_segments`
are null where the store has all rows, no limit on anchors, and no last hidden states.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from csbp.rows import RowSet
from pipelines.rowfile import StoreError

SEGMENT = pa.struct([
    ("part", pa.string()),
    ("part_row", pa.int64()),
    ("rows", pa.int64()),
    ("sha256", pa.string()),
])  # fmt: skip
RANGES = pa.list_(pa.list_(pa.int64(), 2))
SAMPLE_SCHEMA = pa.schema([
    ("id", pa.string()),
    ("conversation", pa.string()),
    ("source", pa.string()),
    ("prompt_length", pa.int64()),
    ("token_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.bool_())),
    ("document_starts", pa.list_(pa.int64())),
    ("rows", pa.int64()),
    ("digest", pa.string()),
    ("segments", pa.list_(SEGMENT)),
    ("kept", RANGES),
    ("anchor_spans", RANGES),
    ("last_rows", RANGES),
    ("last_segments", pa.list_(SEGMENT)),
])  # fmt: skip
_TOKENS = {"token_ids": np.dtype("<i4"), "loss_mask": np.dtype("?")}
_OPTIONAL = ("kept", "anchor_spans", "last_rows", "last_segments")
_PARTS_KEY = b"longdraft.parts"
Segments = list[dict[str, Any]]


@dataclass(frozen=True)
class TokenSample:
    """Tokens of a sample to be written, and which of its rows come with it.

    Attributes:
        id: unique content hash.
        token_ids: int64 [L], L >= 2.
        loss_mask: bool [L].
        document_starts: int64 [documents], the first is 0, strictly increasing; None means one document.
        conversation: id shared by the samples of a conversation; None means the sample's own id.
        source: file and line of the record.
        num_rows: rows that the target made, L or L - 1; None means as many as are stored.
        kept: int64 [n, 2], ascending half-open ranges of rows that are stored, with a gap between two;
            None means all.
        anchor_spans: int64 [m, 2], ascending half-open ranges of tokens that anchors may be drawn from;
            None means no limit.
        last_rows: int64 [k, 2], as `kept`: rows whose last hidden state is stored; None if the store has
            none.
    """

    id: str
    token_ids: Tensor
    loss_mask: Tensor
    document_starts: Tensor | None = None
    conversation: str | None = None
    source: str = ""
    num_rows: int | None = None
    kept: Tensor | None = None
    anchor_spans: Tensor | None = None
    last_rows: Tensor | None = None

    def table_row(self, segments: Segments, last_segments: Segments | None = None) -> dict[str, Any]:
        """The sample as a row of the samples table.

        Raises:
            StoreError: lengths, document starts, ranges or the number of rows do not fit together.
        """
        length = len(self.token_ids)
        stored = sum(segment["rows"] for segment in segments)
        num_rows = stored if self.num_rows is None else self.num_rows
        starts = [0] if self.document_starts is None else self.document_starts.tolist()
        self._check_tokens(starts)
        if num_rows not in (length, length - 1):
            raise StoreError(
                f"sample {self.id}: {num_rows} feature rows for {length} tokens, "
                f"expected {length} or {length - 1}"
            )
        kept = self._ranges("kept", num_rows)
        last_rows = self._ranges("last_rows", num_rows)
        self._check_count("feature rows", stored, [[0, num_rows]] if kept is None else kept)
        if (last_rows is None) != (last_segments is None):
            raise StoreError(
                f"sample {self.id}: the store has {'no ' * (last_segments is None)}last hidden states, the "
                f"sample {'no ' * (last_rows is None)}rows that have one"
            )
        if last_rows is not None:
            last_stored = sum(segment["rows"] for segment in last_segments or ())
            self._check_count("last hidden states", last_stored, last_rows)
        mask = self.loss_mask.to(torch.bool).numpy()
        row = {
            "id": self.id,
            "conversation": self.conversation or self.id,
            "source": self.source,
            "prompt_length": int(mask.argmax()) if mask.any() else length,
            "token_ids": self.token_ids.numpy().astype(_TOKENS["token_ids"]),
            "loss_mask": mask,
            "document_starts": starts,
            "rows": num_rows,
            "segments": segments,
            "kept": kept,
            "anchor_spans": self._ranges("anchor_spans", length),
            "last_rows": last_rows,
            "last_segments": last_segments,
        }
        row["digest"] = row_digest(row)
        return row

    def _check_tokens(self, starts: list[int]) -> None:
        length = len(self.token_ids)
        if len(self.loss_mask) != length:
            raise StoreError(f"sample {self.id}: {length} token ids but {len(self.loss_mask)} mask entries")
        increasing = all(a < b for a, b in pairwise(starts))
        if not starts or starts[0] != 0 or not increasing or starts[-1] >= length:
            raise StoreError(
                f"sample {self.id}: document_starts must begin with 0 and increase below {length}, "
                f"found {starts}"
            )

    def _ranges(self, name: str, limit: int) -> list[list[int]] | None:
        ranges = getattr(self, name)
        if ranges is None:
            return None
        edges = ranges.flatten().tolist()
        inside = not edges or (edges[0] >= 0 and edges[-1] <= limit)
        if not inside or any(a >= b for a, b in pairwise(edges)):
            raise StoreError(
                f"sample {self.id}: {name} must be ascending ranges in [0, {limit}] with a gap between two, "
                f"found {ranges.tolist()}"
            )
        return [list(pair) for pair in ranges.tolist()]

    def _check_count(self, what: str, found: int, ranges: list[list[int]]) -> None:
        expected = sum(stop - start for start, stop in ranges)
        if found != expected:
            raise StoreError(f"sample {self.id}: {found} {what} for ranges of {expected} rows")


def ranges_table(rows: RowSet) -> Tensor:
    """int64 [n, 2]."""
    return torch.stack([rows.starts, rows.stops], dim=1)


def row_digest(row: dict[str, Any]) -> str:
    """sha256 over the tokens, mask, document starts, ranges and segments of a table row."""
    digest = hashlib.sha256(row["id"].encode())
    digest.update(np.asarray(row["token_ids"], dtype=np.int32).tobytes())
    digest.update(np.asarray(row["loss_mask"], dtype=np.bool_).tobytes())
    digest.update(np.asarray(row["document_starts"], dtype=np.int64).tobytes())
    digest.update(json.dumps(row["segments"], sort_keys=True).encode())
    given = {name: row[name] for name in _OPTIONAL if row[name] is not None}
    if given:  # schema version 1 has none
        digest.update(json.dumps({**given, "rows": row["rows"]}, sort_keys=True).encode())
    return digest.hexdigest()


def journal_line(row: dict[str, Any]) -> bytes:
    """A table row as one line of a journal."""
    tokens = {name: base64.b64encode(row[name].tobytes()).decode() for name in _TOKENS}
    return json.dumps({**row, **tokens}).encode() + b"\n"


def journal_row(line: bytes) -> dict[str, Any]:
    """The table row of a journal's line.

    Raises:
        ValueError, TypeError, KeyError: the line is not whole, or of another version.
    """
    row: dict[str, Any] = json.loads(line)
    tokens = {name: np.frombuffer(base64.b64decode(row[name]), dtype) for name, dtype in _TOKENS.items()}
    return {**row, **tokens}


def samples_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows of `TokenSample.table_row` as a table."""
    return pa.table([_column(rows, field) for field in SAMPLE_SCHEMA], schema=SAMPLE_SCHEMA)


def _column(rows: list[dict[str, Any]], field: pa.Field) -> pa.Array:
    values = [row[field.name] for row in rows]
    if field.name not in _TOKENS:
        return pa.array(values, field.type)
    offsets = np.cumsum([0, *map(len, values)])
    flat = pa.array(np.concatenate(values), field.type.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, type=field.type)


def write_shard(path: Path, table: pa.Table, parts: dict[str, int]) -> None:
    """Write a samples table to `path` and fsync it (the caller renames). `parts`: part name -> its rows."""
    schema = SAMPLE_SCHEMA.with_metadata({_PARTS_KEY: json.dumps(parts).encode()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table.combine_chunks().replace_schema_metadata(schema.metadata))
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def read_shard(path: Path) -> tuple[pa.Table, dict[str, int]]:
    """(samples table, part name -> rows) of one shard, memory-mapped; columns that it lacks are null.

    Raises:
        StoreError: the file is not a complete table of this schema.
    """
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        parts = json.loads(table.schema.metadata[_PARTS_KEY])
        for name in _OPTIONAL:
            if name not in table.column_names:
                field = SAMPLE_SCHEMA.field(name)
                table = table.append_column(field, pa.nulls(len(table), field.type))
        return table.select(SAMPLE_SCHEMA.names), parts
    except (pa.ArrowInvalid, OSError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged ({error}); capture again with --verify: it makes its samples anew"
        ) from None


def list_values(table: pa.Table, name: str, at: int) -> np.ndarray:
    """Values of a list column in row `at` of a shard's table (one record batch), copied."""
    column = table.column(name).chunk(0)
    start, stop = column.offsets[at].as_py(), column.offsets[at + 1].as_py()
    return np.array(column.values.slice(start, stop - start).to_numpy(zero_copy_only=False))


def shard_row(table: pa.Table, at: int) -> dict[str, Any]:
    """Row `at` of a shard's table, as `TokenSample.table_row` makes it."""
    others = [name for name in SAMPLE_SCHEMA.names if name not in _TOKENS]
    row: dict[str, Any] = table.select(others).slice(at, 1).to_pylist()[0]
    return {**row, **{name: list_values(table, name, at) for name in _TOKENS}}
