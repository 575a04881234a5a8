"""Writer of a feature store.

Samples are packed into parts in `staging/`. Every finished sample is a line of the shard's journal, written
after its rows, so a killed run loses only the sample in progress: the next writer checks the journal's
checksums, keeps what is complete and continues the same files. A shard is committed by renaming its parts and
then its table.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from pipelines.files import sync_folder
from pipelines.rowfile import HEADER_BYTES, RowFile, StoreError, disk_errors
from pipelines.store_recovery import (
    clear_staging,
    committed_samples,
    intact_journal_rows,
    next_shard,
    reclaim_parts,
)
from pipelines.store_schema import Manifest, TokenSample, samples_table, write_shard

PART_BYTES = 1 << 30
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
        for name in ("samples", "features", "staging"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        self.manifest = self._agree(manifest)
        self._width, self._dtype = self.manifest.feature_width, self.manifest.torch_dtype
        self.done, self.dropped = committed_samples(self.path, self.manifest, verify=verify)
        self._shard = next_shard(self.path)
        self._rows: list[dict[str, Any]] = []
        self._sealed: dict[str, int] = {}  # part name -> rows, of the open shard
        self._part: RowFile | None = None
        self._streaming = False
        self._recover()
        self._journal = self._journal_path.open("ab", buffering=0)
        self._last_sync = time.monotonic()

    # ---------------------------------------------------------------- adding samples

    def add(self, sample: TokenSample, rows_TW: Tensor) -> None:
        """Write one sample whose feature rows [L or L - 1, width] are in memory.

        Raises:
            StoreError: the id exists already, shapes do not fit.
            NonFiniteError: a row holds NaN or infinity; nothing is kept of the sample.
            DiskFullError: no room; nothing is kept of the sample.
        """
        with self.stream() as stream:
            stream.append(rows_TW)
            stream.finish(sample)

    def stream(self) -> SampleStream:
        """Write one sample's rows piece by piece with bounded memory (a context manager).

        Leaving the context without `finish` drops what was appended.
        """
        if self._streaming:
            raise StoreError("one sample is being streamed already; finish it first")
        return SampleStream(self)

    def adopt(self, sample: TokenSample, files: list[Path], digests: list[str], rows: list[int]) -> None:
        """Take unsealed row files (`RowFile`, same width and dtype) over as parts, by rename.

        For samples as large as a part: their rows are not copied. `digests`: sha256 of each file's rows.

        Raises:
            StoreError: see `add`.
        """
        self._check_new(sample.id)
        self._seal_part()
        segments = []
        for file, digest, count in zip(files, digests, rows, strict=True):
            name = self._next_part_name()
            target = self.path / "staging" / name
            file.rename(target)
            self._sealed[name] = count
            part = RowFile(target, self._width, self._dtype)
            part.rewind(count)
            part.seal()
            segments.append({"part": name, "part_row": 0, "rows": count, "sha256": digest})
        self._record(sample, segments)
        self._roll()

    def flush(self) -> None:
        """Make every finished sample survive a power loss."""
        if self._part is not None:
            self._part.sync()
        os.fsync(self._journal.fileno())
        self._last_sync = time.monotonic()

    def commit(self) -> None:
        """Close the open shard: its samples become visible to readers."""
        if not self._rows:
            return
        self._seal_part()
        staging, features = self.path / "staging", self.path / "features"
        for name in self._sealed:
            (staging / name).rename(features / name)
        sync_folder(features)
        staged = staging / f"shard-{self._shard:06d}.arrow"
        with disk_errors(staged):
            write_shard(staged, samples_table(self._rows), self._sealed)
        staged.rename(self.path / "samples" / staged.name)
        sync_folder(self.path / "samples")
        self._journal.close()
        self._journal_path.unlink()
        self._rows, self._sealed = [], {}
        self._shard += 1
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
        if self._part is not None:
            self._part.close()
            self._part.path.unlink(missing_ok=True)
        os.close(self._lock)

    def abandon(self) -> None:
        """Release the store without committing; the next writer recovers what is complete."""
        if self._part is not None:
            self._part.close()
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

    def _open_part(self) -> RowFile:
        if self._part is None:
            file = self.path / "staging" / self._next_part_name()
            self._part = RowFile(file, self._width, self._dtype)
        return self._part

    def _next_part_name(self) -> str:
        return f"shard-{self._shard:06d}.part-{len(self._sealed):03d}.safetensors"

    def _seal_part(self) -> None:
        if self._part is None:
            return
        if self._part.rows:
            self._part.seal()
            self._sealed[self._part.path.name] = self._part.rows
        else:
            self._part.close()
            self._part.path.unlink()
        self._part = None

    def _record(self, sample: TokenSample, segments: list[dict[str, Any]]) -> None:
        row = sample.table_row(sum(segment["rows"] for segment in segments), segments)
        with disk_errors(self._journal_path):
            self._journal.write(json.dumps(row).encode() + b"\n")
        self._rows.append(row)
        self.done.add(sample.id)

    def _roll(self) -> None:
        """Flush when the last flush is old; commit when the shard is full."""
        if time.monotonic() - self._last_sync > _SYNC_SECONDS:
            self.flush()
        open_bytes = self._part.bytes if self._part is not None else 0
        sealed_rows = sum(self._sealed.values())
        if open_bytes + sealed_rows * self._width * self._dtype.itemsize >= self.part_bytes:
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
        return existing

    @property
    def _journal_path(self) -> Path:
        return self.path / "staging" / f"shard-{self._shard:06d}.journal"

    def _recover(self) -> None:
        """Continue the shard that a killed writer left: keep complete samples, cut what follows them."""
        staging = self.path / "staging"
        reclaim_parts(self.path, self._shard)
        kept = intact_journal_rows(self._journal_path, self._width * self._dtype.itemsize)
        ends: dict[str, int] = {}
        for row in kept:
            for segment in row["segments"]:
                ends[segment["part"]] = segment["part_row"] + segment["rows"]
        clear_staging(staging, keep={"lock", self._journal_path.name, *ends})
        names = sorted(ends)
        for name in names:
            rows = RowFile(staging / name, self._width, self._dtype)
            rows.rewind(ends[name])
            if name == names[-1]:
                self._part = rows
            else:
                rows.seal()
                self._sealed[name] = ends[name]
        self._rows = kept
        self.done.update(row["id"] for row in kept)
        self._journal_path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in kept))


class SampleStream:
    """Rows of one sample on their way into the open shard; made by `StoreWriter.stream`."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._segments: list[dict[str, Any]] = []
        self._finished = False
        self._start: tuple[int, int] = (0, 0)

    def __enter__(self) -> Self:
        writer = self._writer
        writer._streaming = True
        part = writer._open_part()
        part.begin_segment()
        self._start = (len(writer._sealed), part.rows)
        return self

    def append(self, rows_TW: Tensor) -> None:
        """Append the next [T, width] rows; see `StoreWriter.add` for errors."""
        writer = self._writer
        row_bytes = writer._width * writer._dtype.itemsize
        for piece in torch.split(rows_TW, max(1, (16 << 20) // row_bytes)):
            part = writer._open_part()
            if part.bytes - HEADER_BYTES >= writer.part_bytes:
                self._close_segment(part)
                writer._seal_part()
                part = writer._open_part()
                part.begin_segment()
            part.append(piece)

    def finish(self, sample: TokenSample) -> None:
        """The sample is complete: record it."""
        self._writer._check_new(sample.id)
        self._close_segment(self._writer._open_part())
        self._writer._record(sample, self._segments)
        self._finished = True
        self._writer._roll()

    def _close_segment(self, part: RowFile) -> None:
        segment = part.end_segment()
        if segment["rows"]:
            self._segments.append(segment)

    def __exit__(self, *_: object) -> None:
        writer = self._writer
        writer._streaming = False
        if self._finished:
            return
        parts, rows = self._start
        begun = list(writer._sealed)[parts:]  # sealed since: the first of them also holds earlier samples
        if begun:
            if writer._part is not None:
                writer._part.close()
                writer._part.path.unlink()
            for name in begun[1:]:
                (writer.path / "staging" / name).unlink()
            for name in begun:
                del writer._sealed[name]
            writer._part = RowFile(writer.path / "staging" / begun[0], writer._width, writer._dtype)
        if writer._part is not None:
            writer._part.rewind(rows)
