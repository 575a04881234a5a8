"""`bench store`: speed and memory of the feature store for one long sample.

A process writes the sample as a capture does, chunk by chunk; another reads all of it back in windows, in
order and then at random places, and compares every row with rows made anew. Memory is the largest resident
set of each process, imports included.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table
from torch import Tensor

from pipelines.capture_options import FEATURE_DTYPES
from pipelines.logs import peak_memory_bytes
from pipelines.rowfile import StoreError
from pipelines.rowformat import FEATURES
from pipelines.store import FeatureStore, Manifest, StoreWriter, TokenSample

_PATTERNS, _FACTORS = 1009, 1013  # coprime: no two of a million rows are alike
_RANDOM_WINDOWS = 64


class BenchStoreOptions(BaseModel):
    """The sample, and how it is written and read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int = Field(65536, ge=2, description="Length of the sample.")
    taps: int = Field(5, ge=1, description="Taps of a row.")
    hidden: int = Field(576, ge=1, description="Width of a tap; 576 is the embedded target's.")
    feature_dtype: Literal["bf16", "fp16", "fp32", "fp8"] = Field("bf16", description="dtype of the rows.")
    chunk: int = Field(512, ge=1, description="Rows written at once.")
    window: int = Field(2048, ge=1, description="Rows read at once.")
    folder: Path | None = Field(
        None,
        description="Where the store is made and removed again; by default the folder for temporary files.",
    )
    seed: int = Field(0, description="Of the rows.")

    @property
    def manifest(self) -> Manifest:
        return Manifest(
            "bench", "-", "-", list(range(self.taps)), self.hidden, FEATURE_DTYPES[self.feature_dtype]
        )


@dataclass(frozen=True)
class Passage:
    """One way of the sample, to the disk or back.

    Attributes:
        seconds: in the store's own calls, `fsync` included.
        bytes: of rows.
        base_rss, peak_rss: resident set before the first row, and the largest so far.
    """

    seconds: float
    bytes: int
    base_rss: int
    peak_rss: int

    @property
    def mb_per_second(self) -> float:
        return self.bytes / 1e6 / self.seconds


@dataclass(frozen=True)
class BenchStoreResult:
    """What was measured.

    Attributes:
        options: as given.
        write, read: the two processes.
        rows_compared: rows read and compared; each at least once.
        rows_wrong: of these, rows that are not what was written.
        page_cache_dropped: the parts were read from the disk, not from memory.
    """

    options: BenchStoreOptions
    write: Passage
    read: Passage
    rows_compared: int
    rows_wrong: int
    page_cache_dropped: bool

    def to_dict(self) -> dict[str, Any]:
        content = {**asdict(self), "options": self.options.model_dump(mode="json")}
        for name in ("write", "read"):
            content[name]["mb_per_second"] = getattr(self, name).mb_per_second
        return content


def run_bench_store(options: BenchStoreOptions) -> BenchStoreResult:
    """Write, read, compare, remove.

    Raises:
        StoreError: no room for it.
    """
    folder = options.folder or Path(tempfile.gettempdir())
    needed = options.tokens * options.manifest.formats[FEATURES].row_bytes
    free = psutil.disk_usage(str(folder)).free
    if needed > 0.9 * free:
        raise StoreError(
            f"{options.tokens:,} tokens need {needed / 2**30:.1f} GiB, {folder} has {free / 2**30:.1f} GiB "
            "free; give another --folder or fewer --tokens"
        )
    # Started afresh, so that the memory of this process counts in neither.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-store-") as place:
        with context.Pool(1) as pool:
            write = pool.apply(write_sample, (options, Path(place)))
        with context.Pool(1) as pool:
            read, compared, wrong, dropped = pool.apply(read_sample, (options, Path(place)))
    return BenchStoreResult(options, write, read, compared, wrong, dropped)


def render_bench_store(result: BenchStoreResult) -> Table:
    options = result.options
    table = Table(
        title=f"one sample of {options.tokens:,} tokens, {options.taps} taps x {options.hidden}, "
        f"{options.feature_dtype}: {result.write.bytes / 2**30:.2f} GiB",
        title_justify="left",
    )
    for name in ("", "seconds", "MB/s", "peak memory, MiB", "before, MiB"):
        table.add_column(name, justify="right" if name else "left")
    for name, passage in (("write", result.write), ("read", result.read)):
        table.add_row(
            name,
            f"{passage.seconds:.1f}",
            f"{passage.mb_per_second:,.0f}",
            f"{passage.peak_rss / 2**20:,.0f}",
            f"{passage.base_rss / 2**20:,.0f}",
        )
    source = "from disk" if result.page_cache_dropped else "from the page cache"
    table.caption = f"{result.rows_compared:,} rows read {source} and compared, {result.rows_wrong:,} differ"
    return table


def write_sample(options: BenchStoreOptions, folder: Path) -> Passage:
    """Body of the writing process."""
    reference = ReferenceRows(options)
    ids = torch.randint(1 << 15, (options.tokens,), generator=torch.Generator().manual_seed(options.seed))
    sample = TokenSample("long", ids, torch.ones(options.tokens, dtype=torch.bool))
    base, seconds = _resident(), 0.0
    started = time.perf_counter()
    writer = StoreWriter(folder, options.manifest)
    with writer, writer.stream() as stream:
        for start in range(0, options.tokens, options.chunk):
            seconds += time.perf_counter() - started
            rows = reference.rows(start, min(options.tokens, start + options.chunk))
            started = time.perf_counter()
            stream.append(rows)
        stream.finish(sample)
    seconds += time.perf_counter() - started
    size = options.tokens * options.manifest.formats[FEATURES].row_bytes
    return Passage(seconds, size, base, _peak())


def read_sample(options: BenchStoreOptions, folder: Path) -> tuple[Passage, int, int, bool]:
    """Body of the reading process: (figures, rows compared, rows that differ, page cache dropped)."""
    reference = ReferenceRows(options)
    dropped = _drop_page_cache(folder / FEATURES)
    row_format = options.manifest.formats[FEATURES]
    base, seconds, compared, wrong = _resident(), 0.0, 0, 0
    store = FeatureStore.open(folder)
    for start in _window_starts(options):
        stop = min(options.tokens, start + options.window)
        started = time.perf_counter()
        rows = store.rows(0, start, stop)
        seconds += time.perf_counter() - started
        for first in range(start, stop, options.chunk):
            last = min(stop, first + options.chunk)
            expected = row_format.unpack(row_format.pack(row_format.cast(reference.rows(first, last))))
            wrong += int((rows[first - start : last - start] != expected).any(dim=1).sum())
        compared += len(rows)
        del rows
    return Passage(seconds, compared * row_format.row_bytes, base, _peak()), compared, wrong, dropped


class ReferenceRows:
    """Rows that say which they are, made without keeping them."""

    def __init__(self, options: BenchStoreOptions) -> None:
        generator = torch.Generator().manual_seed(options.seed)
        self._patterns = torch.randn(_PATTERNS, options.taps * options.hidden, generator=generator)
        self._factors = torch.linspace(0.5, 2.0, _FACTORS)

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, width]."""
        at = torch.arange(start, stop)
        return self._patterns[at % _PATTERNS] * self._factors[at % _FACTORS, None]


def _window_starts(options: BenchStoreOptions) -> list[int]:
    """Windows that cover the sample, then some at random."""
    generator = torch.Generator().manual_seed(options.seed)
    last = max(1, options.tokens - options.window)
    random = torch.randint(last, (_RANDOM_WINDOWS,), generator=generator).tolist()
    return [*range(0, options.tokens, options.window), *random]


def _drop_page_cache(folder: Path) -> bool:
    """Ask the system to forget the files' pages; False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    """Largest resident set of this process; on Linux `getrusage` also counts the parent's before `exec`."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found.group(1)) * 1024 if found else peak_memory_bytes(torch.device("cpu"))
