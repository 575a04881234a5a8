"""How much a store holds, from its tables alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.store_table import read_shard


def store_counts(path: Path) -> dict[str, int]:
    """Samples, tokens, supervised tokens, rows that the target made, and rows that are stored."""
    counts = dict.fromkeys(("samples", "tokens", "supervised", "rows", "stored_rows", "last_rows"), 0)
    for file in sorted((path / "samples").glob("shard-*.arrow")):
        table, _ = read_shard(file)
        counts["samples"] += len(table)
        counts["tokens"] += pc.sum(pc.list_value_length(table["token_ids"])).as_py() or 0
        counts["supervised"] += pc.sum(pc.list_flatten(table["loss_mask"])).as_py() or 0
        counts["rows"] += pc.sum(table["rows"]).as_py() or 0
        counts["stored_rows"] += _rows_of(table["segments"])
        counts["last_rows"] += _rows_of(table["last_segments"])
    return counts


def store_bytes(path: Path) -> int:
    """Bytes of all files of the store."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _rows_of(segments: pa.ChunkedArray) -> int:
    return pc.sum(pc.struct_field(pc.list_flatten(segments), "rows")).as_py() or 0
