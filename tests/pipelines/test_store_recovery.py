"""Feature stores that were damaged, or whose writer was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipelines.inspect_store import inspect_store
from pipelines.rowfile import NonFiniteError, RowFile
from pipelines.store import FeatureStore, StoreError, StoreWriter
from tests.pipelines.test_store import WIDTH, add, check, manifest, rows_of, tokens_of


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        for number in range(6):
            add(writer, f"n{number}", 5 + number)
    return tmp_path / "s"


# -------------------------------------------------------------------- damage


def test_truncated_part_is_named_and_recaptured(store: Path) -> None:  # B9
    (part,) = (store / "features").iterdir()
    os.truncate(part, part.stat().st_size - 1)
    with pytest.raises(StoreError, match=rf"{part.name}: \d+ bytes, expected \d+"):
        FeatureStore.open(store)
    with StoreWriter(store, manifest()) as writer:
        assert writer.dropped == {f"n{number}" for number in range(6)}
        for number in range(6):
            add(writer, f"n{number}", 5 + number)
    again = FeatureStore.open(store, verify=True)
    for name in again.ids:
        check(again, name)


def test_altered_byte_costs_one_sample(store: Path) -> None:
    (part,) = (store / "features").iterdir()
    with part.open("r+b") as stream:
        stream.seek(1024 + 8 * WIDTH * 4)  # row 8 lies in the second sample
        stream.write(b"\xff")
    assert len(FeatureStore.open(store)) == 6  # sizes are right
    with pytest.raises(StoreError, match="n1 "):
        FeatureStore.open(store, verify=True)
    assert [item["sample"] for item in inspect_store(store, verify=True)["damaged"]] == ["n1"]
    with StoreWriter(store, manifest(), verify=True) as writer:
        assert writer.dropped == {"n1"}
        add(writer, "n1", 6)
    again = FeatureStore.open(store, verify=True)
    for name in again.ids:
        check(again, name)


def test_damaged_table_loses_its_shard_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with StoreWriter(tmp_path / "s", manifest()) as writer:
            add(writer, name, 5)
    first = tmp_path / "s/samples/shard-000000.arrow"
    os.truncate(first, first.stat().st_size - 20)
    with pytest.raises(StoreError, match="shard-000000"):
        FeatureStore.open(tmp_path / "s")
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        assert writer.done == {"b"}
        add(writer, "a", 5)
    assert FeatureStore.open(tmp_path / "s", verify=True).ids == ["a", "b"]


def test_non_finite_row_fails_its_sample_and_is_named(tmp_path: Path) -> None:  # B2
    bad = rows_of("bad", 9)
    bad[4, 5] = float("nan")
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        add(writer, "good", 5)
        with pytest.raises(NonFiniteError, match="row 4, column 5"):
            writer.add(tokens_of("bad", 9), bad)
        add(writer, "later", 6)
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert store.ids == ["good", "later"]
    check(store, "later")


def test_overflow_of_the_stored_dtype_is_not_finite(tmp_path: Path) -> None:
    with (
        StoreWriter(tmp_path / "s", manifest(dtype="float16")) as writer,
        pytest.raises(NonFiniteError, match="inf"),
    ):
        writer.add(tokens_of("x", 4), torch.full((4, WIDTH), 1e6))


# -------------------------------------------------------------------- interruption

WRITE = """
import os, signal, sys
sys.path[:0] = {paths!r}
from tests.pipelines.test_store import *
writer = StoreWriter({store!r}, manifest(), part_bytes={part_bytes})
for number in range(20):
    if number == {stop}:
        with writer.stream() as stream:
            stream.append(rows_of("half", 50))
            os.kill(os.getpid(), signal.SIGKILL)
    if f"n{{number:02}}" not in writer.done:
        add(writer, f"n{{number:02}}", 5 + number)
writer.close()
"""


def run_writer(store: Path, stop: int, part_bytes: int = 1 << 30) -> int:
    root = str(Path(__file__).resolve().parents[2])
    code = WRITE.format(paths=[root], store=str(store), stop=stop, part_bytes=part_bytes)
    return subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode


@pytest.mark.parametrize("part_bytes", [1 << 30, 40 * WIDTH * 4])
def test_killed_writer_loses_only_the_sample_in_progress(tmp_path: Path, part_bytes: int) -> None:  # B15
    path = tmp_path / "s"
    assert run_writer(path, 13, part_bytes) == -signal.SIGKILL
    with StoreWriter(path, manifest(), part_bytes=part_bytes) as writer:
        assert writer.done == {f"n{number:02}" for number in range(13)}
        add(writer, "n13", 18)
    store = FeatureStore.open(path, verify=True)
    assert len(store) == 14
    for name in store.ids:
        check(store, name)
    assert [file.name for file in (path / "staging").iterdir()] == ["lock"]  # B10


def test_nothing_half_written_is_visible(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with StoreWriter(path, manifest()) as writer:
        add(writer, "whole", 5)
    writer = StoreWriter(path, manifest())
    add(writer, "open", 6)
    assert FeatureStore.open(path).ids == ["whole"]
    writer.close()
    assert FeatureStore.open(path).ids == ["open", "whole"]


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_kill_between_the_renames_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int
) -> None:
    """The commit of two parts and a table is cut after each rename; recovery ends in the same store."""
    path = tmp_path / "s"
    writer = StoreWriter(path, manifest(), part_bytes=10**9)
    monkeypatch.setattr(writer, "part_bytes", 30 * WIDTH * 4)
    with writer.stream() as stream:
        for rows in rows_of("two", 50).split(10):
            stream.append(rows)
        monkeypatch.setattr(writer, "part_bytes", 10**9)
        stream.finish(tokens_of("two", 50))
    add(writer, "more", 6)
    count = 0
    rename = Path.rename

    def cut(self: Path, target: Path) -> Path:
        nonlocal count
        if count == renamed:
            raise KeyboardInterrupt
        count += 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", cut)
    with pytest.raises(KeyboardInterrupt):
        writer.commit()
    monkeypatch.setattr(Path, "rename", rename)
    writer.abandon()
    with StoreWriter(path, manifest()) as again:
        assert again.done == {"two", "more"}
    store = FeatureStore.open(path, verify=True)
    check(store, "two")
    check(store, "more")


def test_torn_journal_line_and_torn_rows_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "s"
    writer = StoreWriter(path, manifest())
    add(writer, "a", 5)
    add(writer, "b", 6)
    writer.abandon()
    (journal,) = (path / "staging").glob("*.journal")
    journal.write_bytes(journal.read_bytes() + b'{"id": "c", "tok')
    (part,) = (path / "staging").glob("*.safetensors")
    os.truncate(part, part.stat().st_size - 3)  # a power loss kept the journal but not the last rows
    with StoreWriter(path, manifest()) as again:
        assert again.done == {"a"}
        add(again, "b", 6)
    store = FeatureStore.open(path, verify=True)
    check(store, "a")
    check(store, "b")


def test_row_files_of_an_engine_become_parts(tmp_path: Path) -> None:
    row_format = manifest().formats["features"]
    spool = RowFile(tmp_path / "spool.rows", row_format, buffer_bytes=4096)
    for rows in rows_of("big", 60).split(7):
        spool.append(rows)
    segment = spool.end_segment()
    spool.close()
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        add(writer, "before", 5)
        files = [(tmp_path / "spool.rows", segment["sha256"], 60)]
        writer.adopt(tokens_of("big", 60), {"features": files})
        add(writer, "after", 5)
    store = FeatureStore.open(tmp_path / "s", verify=True)
    for name in ("before", "big", "after"):
        check(store, name)
