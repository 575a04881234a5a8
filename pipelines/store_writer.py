"""Writer of a feature store.

Samples are packed into parts in `staging/`. Every finished sample is a line of the shard's journal, written
after its rows, so a killed run loses only the sample in progress: the next writer checks the journal's
checksums, keeps what is complete and continues the same files. A shard is committed by renaming its parts and
then its table.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from pipelines.files import sync_folder
from pipelines.rowfile import StoreError, disk_errors
from pipelines.rowformat import FEATURES, LAST
from pipelines.store_parts import PartSeries
from pipelines.store_recovery import (
    clear_staging,
    committed_samples,
    intact_journal_rows,
    next_shard,
    reclaim_parts,
)
from pipelines.store_schema import Manifest, part_family
from pipelines.store_table import TokenSample, journal_line, samples_table, write_shard

PART_BYTES = 1 << 30
_TOKEN_BYTES = 5  # of a token in the table and in the journal's memory
_SYNC_SECONDS = 2.0  # a power loss costs at most this much finished work; a killed process costs none


class StoreWriter:
    """Adds samples to a store, new or existing. One writer at a time.

    Args:
        path: the store's folder.
        manifest: what this run captures; must agree with an existing store's manifest.
        part_bytes: size at which a part is closed and a new one begun.
        verify: check every stored sample against its checksums first and drop the damaged ones.

    Attributes:
        done: ids of samples that are complete, in earlier runs or this one.
        dropped: ids of samples found damaged and dropped; the caller should capture them again.

    Raises:
        StoreError: another writer is active, or the manifest differs.
    """

    def __init__(
        self, path: Path | str, manifest: Manifest, *, part_bytes: int = PART_BYTES, verify: bool = False
    ) -> None:
        self.path = Path(path)
        self.part_bytes = part_bytes
        for name in ("samples", "staging", *manifest.formats):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        self.manifest = self._agree(manifest)
        self.done, self.dropped = committed_samples(self.path, self.manifest, verify=verify)
        self._shard = next_shard(self.path)
        self._rows: list[dict[str, Any]] = []
        self.series = {
            family: PartSeries(self.path / "staging", family, row_format, self._shard)
            for family, row_format in self.manifest.formats.items()
        }
        self._streaming = False
        self._recover()
        self._journal = self._journal_path.open("ab", buffering=0)
        self._last_sync = time.monotonic()

    # ---------------------------------------------------------------- adding samples

    def add(self, sample: TokenSample, rows_TW: Tensor, last_TD: Tensor | None = None) -> None:
        """Write one sample whose stored rows are in memory.

        Args:
            sample: tokens, and which rows these are.
            rows_TW: [stored rows, width].
            last_TD: [stored last hidden states, hidden], if the store has them.

        Raises:
            StoreError: the id exists already, shapes do not fit.
            NonFiniteError: a row holds NaN or infinity; nothing is kept of the sample.
            DiskFullError: no room; nothing is kept of the sample.
        """
        with self.stream() as stream:
            stream.append(rows_TW)
            if last_TD is not None:
                stream.append(last_TD, LAST)
            stream.finish(sample)

    def stream(self) -> SampleStream:
        """Write one sample's rows piece by piece with bounded memory (a context manager).

        Leaving the context without `finish` drops what was appended.
        """
        if self._streaming:
            raise StoreError("one sample is being streamed already; finish it first")
        return SampleStream(self)

    def adopt(self, sample: TokenSample, files: dict[str, list[tuple[Path, str, int]]]) -> None:
        """Take unsealed row files (`RowFile` of the same format) over as parts, by rename.

        For samples as large as a part: their rows are not copied.

        Args:
            sample: tokens, and which rows these are.
            files: family -> (file, sha256 of its rows, rows) in order.

        Raises:
            StoreError: see `add`.
        """
        self._check_new(sample.id)
        self._record(
            sample,
            {
                family: [series.adopt(*file) for file in files.get(family, [])]
                for family, series in self.series.items()
            },
        )
        self._roll()

    def flush(self) -> None:
        """Make every finished sample survive a power loss."""
        for series in self.series.values():
            series.sync()
        os.fsync(self._journal.fileno())
        self._last_sync = time.monotonic()

    def commit(self) -> None:
        """Close the open shard: its samples become visible to readers."""
        if not self._rows:
            return
        parts: dict[str, int] = {}
        for family, series in self.series.items():
            series.seal()
            for name in series.sealed:
                (self.path / "staging" / name).rename(self.path / family / name)
            sync_folder(self.path / family)
            parts |= series.sealed
        staged = self.path / "staging" / f"shard-{self._shard:06d}.arrow"
        with disk_errors(staged):
            write_shard(staged, samples_table(self._rows), parts)
        staged.rename(self.path / "samples" / staged.name)
        sync_folder(self.path / "samples")
        self._journal.close()
        self._journal_path.unlink()
        self._rows = []
        self._shard += 1
        for series in self.series.values():
            series.restart(self._shard)
        self._journal = self._journal_path.open("ab", buffering=0)

    def describe(self, **fields: Any) -> None:
        """Replace fields of the manifest that do not decide the content (`counts`, `parity`)."""
        self.manifest = replace(self.manifest, **fields)
        self.manifest.save(self.path)

    def close(self) -> None:
        """Commit and release the store."""
        self.commit()
        self._journal.close()
        self._journal_path.unlink()
        for series in self.series.values():
            series.drop()
        os.close(self._lock)

    def abandon(self) -> None:
        """Release the store without committing; the next writer recovers what is complete."""
        for series in self.series.values():
            series.close()
        self._journal.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    # ---------------------------------------------------------------- inside a shard

    def _check_new(self, sample_id: str) -> None:
        if sample_id in self.done:
            raise StoreError(f"sample {sample_id} is in {self.path} already")

    def _record(self, sample: TokenSample, segments: dict[str, list[dict[str, Any]]]) -> None:
        row = sample.table_row(segments[FEATURES], segments.get(LAST))
        with disk_errors(self._journal_path):
            self._journal.write(journal_line(row))
        self._rows.append(row)
        self.done.add(sample.id)

    def _roll(self) -> None:
        """Flush when the last flush is old; commit when the shard is full."""
        if time.monotonic() - self._last_sync > _SYNC_SECONDS:
            self.flush()
        tokens = sum(len(row["token_ids"]) for row in self._rows)
        held = sum(series.bytes for series in self.series.values()) + tokens * _TOKEN_BYTES
        if held >= self.part_bytes:
            self.commit()

    # ---------------------------------------------------------------- start-up

    def _take_lock(self) -> int:
        handle = os.open(self.path / "staging" / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise StoreError(f"{self.path} is being written by another process; wait for it to end") from None
        return handle

    def _agree(self, manifest: Manifest) -> Manifest:
        if not (self.path / "manifest.json").exists():
            manifest.save(self.path)
            return manifest
        existing = Manifest.load(self.path)
        difference = existing.difference(manifest)
        if difference and not next_shard(self.path) and not list((self.path / "staging").glob("*.journal")):
            manifest.save(self.path)  # an attempt that never got to its first sample binds nobody
            return manifest
        if difference:
            os.close(self._lock)
            raise StoreError(
                f"{self.path} was made with another setting - {difference}; use the same or another folder"
            )
        existing.save(self.path)  # in this schema version, whatever it was made with
        return existing

    @property
    def _journal_path(self) -> Path:
        return self.path / "staging" / f"shard-{self._shard:06d}.journal"

    def _recover(self) -> None:
        """Continue the shard that a killed writer left: keep complete samples, cut what follows them."""
        staging = self.path / "staging"
        reclaim_parts(self.path, self.manifest, self._shard)
        kept = intact_journal_rows(self._journal_path, self.manifest)
        ends: dict[str, dict[str, int]] = {family: {} for family in self.series}
        for row in kept:
            for segment in row["segments"] + (row["last_segments"] or []):
                name = segment["part"]
                ends[part_family(name)][name] = segment["part_row"] + segment["rows"]
        clear_staging(
            staging, keep={"lock", self._journal_path.name, *(n for of in ends.values() for n in of)}
        )
        for family, series in self.series.items():
            series.recover(ends[family])
        self._rows = kept
        self.done.update(row["id"] for row in kept)
        self._journal_path.write_bytes(b"".join(map(journal_line, kept)))


class SampleStream:
    """Rows of one sample on their way into the open shard; made by `StoreWriter.stream`."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._finished = False

    def __enter__(self) -> Self:
        self._writer._streaming = True
        for series in self._writer.series.values():
            series.begin()
        return self

    def append(self, rows: Tensor, family: str = FEATURES) -> None:
        """Append the next stored rows of a family, [T, width] or packed; see `StoreWriter.add` for errors."""
        self._writer.series[family].append(rows, self._writer.part_bytes)

    def finish(self, sample: TokenSample) -> None:
        """The sample is complete: record it."""
        self._writer._check_new(sample.id)
        segments = {family: series.end() for family, series in self._writer.series.items()}
        self._writer._record(sample, segments)
        self._finished = True
        self._writer._roll()

    def __exit__(self, *_: object) -> None:
        self._writer._streaming = False
        if not self._finished:
            for series in self._writer.series.values():
                series.undo()
