"""How much a store holds, from its tables alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from pipelines.store_schema import read_shard


def store_counts(path: Path) -> dict[str, int]:
    """Samples, tokens, supervised tokens and feature rows of the committed shards."""
    counts = {"samples": 0, "tokens": 0, "supervised": 0, "rows": 0}
    for file in sorted((path / "samples").glob("shard-*.arrow")):
        table, _ = read_shard(file)
        counts["samples"] += len(table)
        counts["tokens"] += pc.sum(pc.list_value_length(table["token_ids"])).as_py() or 0
        counts["supervised"] += pc.sum(pc.list_flatten(table["loss_mask"])).as_py() or 0
        counts["rows"] += pc.sum(table["rows"]).as_py() or 0
    return counts


def store_bytes(path: Path) -> int:
    """Bytes of all files of the store."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
