from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipelines.inspect_store import inspect_store
from pipelines.rowfile import DiskFullError
from pipelines.store import FeatureStore, Manifest, StoreError, StoreWriter, TokenSample

TAPS, HIDDEN = [1, 4], 3
WIDTH = len(TAPS) * HIDDEN


def manifest(**changes: object) -> Manifest:
    fields = {
        "target": "t", "target_fingerprint": "a", "tokenizer_fingerprint": "b", "target_layer_ids": TAPS,
        "hidden_size": HIDDEN, "dtype": "float32",
    }  # fmt: skip
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def rows_of(name: str, length: int) -> Tensor:
    """Rows that say whose they are."""
    seed = int.from_bytes(name.encode()[-4:], "little")
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens_of(name: str, length: int) -> TokenSample:
    return TokenSample(name, torch.arange(length) % 7, torch.arange(length) >= 2, source=f"f:{length}")


def add(writer: StoreWriter, name: str, length: int, rows: int | None = None) -> None:
    writer.add(tokens_of(name, length), rows_of(name, length if rows is None else rows))


def check(store: FeatureStore, name: str) -> None:
    index = store.ids.index(name)
    sample = store.sample(index)
    length = len(sample.token_ids)
    assert torch.equal(store.rows(index, 0, sample.num_rows), rows_of(name, sample.num_rows))
    assert torch.equal(sample.token_ids, torch.arange(length) % 7)
    assert torch.equal(sample.loss_mask, torch.arange(length) >= 2)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        for number in range(6):
            add(writer, f"n{number}", 5 + number)
    return tmp_path / "s"


def test_samples_come_back_whole_and_in_id_order(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        for name in ("b", "c", "a"):
            add(writer, name, 9)
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert store.ids == ["a", "b", "c"]
    assert store.lengths.tolist() == [9, 9, 9]
    for name in store.ids:
        check(store, name)
    sample = store.sample(0)
    assert sample.metadata == {"source": "f:9", "prompt_length": 2}
    assert sample.document_starts.tolist() == [0]
    assert store.feature_width == WIDTH


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=8),
    part_rows=st.integers(1, 60),
    piece=st.integers(1, 17),
    data=st.data(),
)
def test_any_window_equals_the_rows_written(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    part_rows: int,
    piece: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("windows")
    with StoreWriter(path / "s", manifest(), part_bytes=part_rows * WIDTH * 4) as writer:
        for number, length in enumerate(lengths):
            with writer.stream() as stream:
                for rows in rows_of(f"n{number}", length).split(piece):
                    stream.append(rows)
                stream.finish(tokens_of(f"n{number}", length))
    store = FeatureStore.open(path / "s", verify=True)
    for _ in range(5):
        index = data.draw(st.integers(0, len(lengths) - 1))
        length = int(store.lengths[index])
        start = data.draw(st.integers(0, length))
        stop = data.draw(st.integers(start, length))
        assert torch.equal(store.rows(index, start, stop), rows_of(store.ids[index], length)[start:stop])


def test_long_sample_is_a_stream_of_parts(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", manifest(), part_bytes=100 * WIDTH * 4) as writer:
        with writer.stream() as stream:
            for rows in rows_of("long", 1000).split(70):
                stream.append(rows)
            stream.finish(tokens_of("long", 1000))
        add(writer, "short", 5)
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert len(list((tmp_path / "s/features").iterdir())) > 5
    check(store, "long")
    check(store, "short")


def test_many_small_samples_share_a_part(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        for number in range(200):
            add(writer, f"n{number:03}", 4)
    assert (
        len([file for file in (tmp_path / "s").rglob("*") if file.is_file()]) == 4
    )  # lock, manifest, table, part


def test_parts_are_plain_safetensors_and_tables_plain_datasets(store: Path, tmp_path: Path) -> None:
    from datasets import load_dataset
    from safetensors.torch import load_file

    (part,) = (store / "features").iterdir()
    assert load_file(part)["features"].shape == (sum(range(5, 11)), WIDTH)
    tables = [str(file) for file in (store / "samples").iterdir()]
    table = load_dataset("arrow", data_files=tables, split="train", cache_dir=str(tmp_path / "cache"))
    assert table[0]["token_ids"] == [0, 1, 2, 3, 4]


def test_rows_of_a_generated_last_token_read_as_zeros(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        add(writer, "g", 8, rows=7)
    store = FeatureStore.open(tmp_path / "s")
    assert store.sample(0).num_rows == 7
    assert torch.equal(store.rows(0, 5, 8), torch.cat([rows_of("g", 7)[5:], torch.zeros(1, WIDTH)]))
    assert torch.equal(store.rows(0, 7, 8), torch.zeros(1, WIDTH))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6), (6, 7)])
def test_range_outside_the_sample_is_an_error(store: Path, start: int, stop: int) -> None:
    with pytest.raises(StoreError, match="5 tokens"):
        FeatureStore.open(store).rows(0, start, stop)


def test_stored_dtype_is_kept(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", manifest(dtype="bfloat16")) as writer:
        add(writer, "x", 6)
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert store.dtype == torch.bfloat16
    assert torch.equal(store.rows(0, 0, 6), rows_of("x", 6).bfloat16())


def test_window_reads_touch_only_their_pages(tmp_path: Path) -> None:
    """A sparse part of 4 GiB: only the asked-for rows come into memory."""
    path = tmp_path / "s"
    with StoreWriter(path, manifest()) as writer:
        add(writer, "x", 10)
    (part,) = (path / "features").iterdir()
    rows = 2**32 // (WIDTH * 4)
    table = next((path / "samples").iterdir())
    from pipelines.rowfile import _header  # the header of a part that was never written out
    from pipelines.store_table import samples_table, write_shard

    with part.open("r+b") as stream:
        stream.write(_header(rows, manifest().formats["features"]))
        stream.truncate(1024 + rows * WIDTH * 4)
    row = tokens_of("x", 10).table_row([{"part": part.name, "part_row": 0, "rows": 10, "sha256": ""}])
    write_shard(table, samples_table([row]), {part.name: rows})
    before = psutil.Process().memory_info().rss
    assert torch.equal(FeatureStore.open(path).rows(0, 2, 6), rows_of("x", 10)[2:6])
    assert psutil.Process().memory_info().rss - before < 2**26


# -------------------------------------------------------------------- refusals

FULL = """
import resource, sys
sys.path[:0] = {paths!r}
from tests.pipelines.test_store import *
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    with StoreWriter({store!r}, manifest()) as writer:
        for number in range(100):
            add(writer, f"n{{number:02}}", 20)
except DiskFullError as error:
    print(error)
"""


def test_full_disk_is_one_error_and_keeps_what_is_complete(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    path = tmp_path / "s"
    code = FULL.format(paths=[root], store=str(path))
    run = subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True, text=True)
    assert "no room to write" in run.stdout
    assert "run the same command again" in run.stdout
    with StoreWriter(path, manifest()) as writer:
        kept = set(writer.done)
    assert kept
    store = FeatureStore.open(path, verify=True)
    assert set(store.ids) == kept
    for name in store.ids:
        check(store, name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_fingerprint", "x"),
        ("tokenizer_fingerprint", "x"),
        ("target_layer_ids", [1, 3]),
        ("dtype", "float16"),
    ],
)
def test_other_target_is_refused(store: Path, field: str, value: object) -> None:  # A12, D13
    with pytest.raises(StoreError, match=field):
        StoreWriter(store, manifest(**{field: value}))


def test_settings_of_an_attempt_without_samples_bind_nobody(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "s", manifest()).close()
    with StoreWriter(tmp_path / "s", manifest(dtype="float16")) as writer:
        add(writer, "x", 5)
    assert FeatureStore.open(tmp_path / "s").dtype == torch.float16


def test_second_writer_is_refused(store: Path) -> None:
    with StoreWriter(store, manifest()), pytest.raises(StoreError, match="another process"):
        StoreWriter(store, manifest())


def test_sample_that_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        with pytest.raises(StoreError, match="3 feature rows for 5 tokens"):
            add(writer, "x", 5, rows=3)
        starts = TokenSample("y", torch.arange(5), torch.ones(5), torch.tensor([1, 3]))
        with pytest.raises(StoreError, match="document_starts"):
            writer.add(starts, rows_of("y", 5))
        add(writer, "z", 5)
        with pytest.raises(StoreError, match="already"):
            add(writer, "z", 5)
    assert FeatureStore.open(tmp_path / "s", verify=True).ids == ["z"]


def test_newer_schema_and_no_store_say_so(store: Path, tmp_path: Path) -> None:
    content = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps({**content, "schema_version": 99}))
    with pytest.raises(StoreError, match="schema version 99"):
        FeatureStore.open(store)
    with pytest.raises(StoreError, match="not a feature store"):
        FeatureStore.open(tmp_path)


def test_inspection_counts_what_is_there(store: Path) -> None:
    report = inspect_store(store, verify=True)
    assert (report["samples"], report["tokens"], report["rows"]) == (6, 45, 45)
    assert report["supervised"] == 45 - 6 * 2
    assert report["damaged"] == []
    assert [tap["layer"] for tap in report["taps"]] == TAPS
    assert report["length"]["histogram"] == [(8, 4), (16, 2)]
    assert DiskFullError.__mro__[1] is StoreError  # one except clause covers both
