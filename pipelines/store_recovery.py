"""What a new writer finds in a store: committed samples, damage, and what a killed writer left.

Tables can hold billions of tokens, so only ids and places are brought into Python unless checksums are asked
for.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.files import sync_folder
from pipelines.rowfile import StoreError, segment_digest
from pipelines.store_schema import Manifest, part_family, part_path, part_problem
from pipelines.store_table import journal_row, read_shard, row_digest, shard_row, write_shard

_PART_NAME = re.compile(r"shard-(\d{6})\.(part|last)-(\d{3,})\.safetensors")


def committed_samples(path: Path, manifest: Manifest, *, verify: bool) -> tuple[set[str], set[str]]:
    """(ids of intact samples, ids of damaged ones) of a store; the damaged ones are dropped from it.

    Args:
        path: the store's folder.
        manifest: of the store.
        verify: compare all checksums, not only the sizes of the parts.
    """
    done: set[str] = set()
    dropped: set[str] = set()
    for file in _tables(path):
        try:
            table, parts = read_shard(file)
        except StoreError:
            file.unlink()  # its ids are unknown now; its parts become orphans and are removed below
            continue
        damaged = _damaged(table, parts, path, manifest, verify=verify)
        if any(damaged):
            _keep(file, table.filter(pa.array([not bad for bad in damaged])), parts, path / "staging")
        for sample_id, bad in zip(table["id"].to_pylist(), damaged, strict=True):
            (dropped if bad else done).add(sample_id)
    _remove_orphans(path, manifest)
    return done, dropped


def next_shard(path: Path) -> int:
    """Number of the first shard without a table."""
    return 1 + max((int(file.stem.removeprefix("shard-")) for file in _tables(path)), default=-1)


def reclaim_parts(path: Path, manifest: Manifest, shard: int) -> None:
    """Take back the parts of a commit that was killed between renaming its parts and its table."""
    for family in manifest.formats:
        for part in (path / family).glob(f"shard-{shard:06d}.*"):
            part.rename(path / "staging" / part.name)


def intact_journal_rows(journal: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Table rows of the journal up to the first whose tokens or stored rows are not as recorded."""
    if not journal.exists():
        return []
    kept: list[dict[str, Any]] = []
    for line in journal.read_bytes().split(b"\n"):
        try:
            row = journal_row(line)
            intact = _intact(row, lambda name: journal.parent / name, manifest)
        except (ValueError, TypeError, KeyError):
            break  # the line that was being written
        if not intact:
            break
        kept.append(row)
    return kept


def clear_staging(staging: Path, keep: set[str]) -> None:
    """Remove everything in `staging` but the named files."""
    for file in staging.iterdir():
        if file.name in keep:
            continue
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()


def _tables(path: Path) -> list[Path]:
    return sorted((path / "samples").glob("shard-*.arrow"))


def _damaged(
    table: pa.Table, parts: dict[str, int], path: Path, manifest: Manifest, *, verify: bool
) -> list[bool]:
    broken = {name for name, rows in parts.items() if part_problem(path, name, rows, manifest)}
    damaged = []
    for at, names in enumerate(_part_names(table)):
        bad = not broken.isdisjoint(names)
        if verify and not bad:
            bad = not _intact(shard_row(table, at), lambda name: part_path(path, name), manifest)
        damaged.append(bad)
    return damaged


def _part_names(table: pa.Table) -> list[set[str]]:
    """Parts that each sample lies in."""
    columns = zip(table["segments"].to_pylist(), table["last_segments"].to_pylist(), strict=True)
    return [{segment["part"] for segment in rows + (last or [])} for rows, last in columns]


def _intact(row: dict[str, Any], place: Callable[[str], Path], manifest: Manifest) -> bool:
    if row_digest(row) != row["digest"]:
        return False
    for segment in row["segments"] + (row["last_segments"] or []):
        file = place(segment["part"])
        row_bytes = manifest.formats[part_family(segment["part"])].row_bytes
        if not file.is_file():
            return False
        if segment_digest(file, segment["part_row"], segment["rows"], row_bytes) != segment["sha256"]:
            return False
    return True


def _keep(file: Path, table: pa.Table, parts: dict[str, int], staging: Path) -> None:
    """Replace a table by one with fewer samples; parts that nothing uses become orphans."""
    if len(table):
        used = set().union(*_part_names(table))
        staged = staging / file.name
        write_shard(staged, table, {name: rows for name, rows in parts.items() if name in used})
        staged.replace(file)
    else:
        file.unlink()
    sync_folder(file.parent)


def _remove_orphans(path: Path, manifest: Manifest) -> None:
    """Delete parts that no table names, unless their shard's journal can still claim them."""
    named: set[str] = set()
    for file in _tables(path):
        named.update(read_shard(file)[1])
    for part in [part for family in manifest.formats for part in (path / family).iterdir()]:
        match = _PART_NAME.fullmatch(part.name)
        journal = path / "staging" / f"shard-{match.group(1)}.journal" if match else None
        if part.name not in named and not (journal and journal.exists()):
            part.unlink()
