"""The store at length: memory does not follow the sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipelines.bench_store import BenchStoreOptions, ReferenceRows, render_bench_store, run_bench_store
from pipelines.rowfile import StoreError
from pipelines.store import FeatureStore

MIB = 2**20


def test_long_sample_is_written_and_read_with_bounded_memory(tmp_path: Path) -> None:
    """65,536 tokens of the embedded target's shape, 360 MiB of rows.

    Library code that is loaded on first use counts too: the growth was 65 MiB here, 76 at 1,048,576 tokens.
    """
    result = run_bench_store(BenchStoreOptions(tokens=65536, window=1024, folder=tmp_path))
    assert result.write.bytes == 65536 * 5 * 576 * 2
    assert (result.rows_wrong, result.rows_compared) == (0, 65536 + 64 * 1024)
    for passage in (result.write, result.read):
        assert passage.peak_rss - passage.base_rss < 96 * MIB
    assert result.read.peak_rss < 512 * MIB
    assert list(tmp_path.iterdir()) == []
    assert "65,536" in str(render_bench_store(result).title)
    assert result.to_dict()["read"]["mb_per_second"] > 0


def test_rows_of_the_bench_differ_and_wrong_ones_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines import bench_store

    options = BenchStoreOptions(tokens=3000, taps=1, hidden=8, window=500)
    rows = ReferenceRows(options).rows(0, 3000)
    assert len(rows.unique(dim=0)) == 3000
    bench_store.write_sample(options, tmp_path / "s")
    read = FeatureStore.rows

    def shifted(self: FeatureStore, index: int, start: int, stop: int) -> torch.Tensor:
        return read(self, index, max(0, start - 1), max(0, start - 1) + stop - start)

    monkeypatch.setattr(FeatureStore, "rows", shifted)
    _, compared, wrong, _ = bench_store.read_sample(options, tmp_path / "s")
    assert wrong > 0.8 * compared
    monkeypatch.undo()
    assert bench_store.read_sample(options, tmp_path / "s")[2] == 0


def test_no_room_is_said_before(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="GiB free"):
        run_bench_store(BenchStoreOptions(tokens=1 << 40, folder=tmp_path))
