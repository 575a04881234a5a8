"""Stores that hold some rows only, last hidden states, and e4m3 rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from pipelines.inspect_store import inspect_store, render_store
from pipelines.rowformat import RowFormat, all_finite
from pipelines.store import FeatureStore, StoreError, StoreWriter, TokenSample
from pipelines.store_counts import store_counts
from tests.pipelines.test_store import HIDDEN, WIDTH, manifest, rows_of, tokens_of

WINDOWS = {"rule": "windows", "window": 4}


def last_of(name: str, length: int) -> Tensor:
    return rows_of(f"{name}-last", length)[:, :HIDDEN]


def sparse(name: str, length: int, kept: list[list[int]], last: list[list[int]] | None = None) -> TokenSample:
    pairs = torch.tensor(kept, dtype=torch.int64).view(-1, 2)
    last_rows = None if last is None else torch.tensor(last, dtype=torch.int64).view(-1, 2)
    return replace(
        tokens_of(name, length), num_rows=length, kept=pairs, anchor_spans=pairs, last_rows=last_rows
    )


def picked(rows: Tensor, ranges: list[list[int]]) -> Tensor:
    return torch.cat([rows[:0], *(rows[start:stop] for start, stop in ranges)])


def ranges_below(limit: int) -> st.SearchStrategy[list[list[int]]]:
    edges = st.lists(st.integers(0, limit), unique=True, max_size=8).map(sorted)
    return edges.map(lambda e: [list(pair) for pair in zip(e[::2], e[1::2], strict=False)])


@settings(max_examples=40, deadline=None)
@given(kept=ranges_below(30), last=ranges_below(30), part_rows=st.integers(1, 20), data=st.data())
def test_kept_rows_read_as_written_and_others_not_at_all(
    tmp_path_factory: pytest.TempPathFactory,
    kept: list[list[int]],
    last: list[list[int]],
    part_rows: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("sparse") / "s"
    facts = manifest(keep=WINDOWS, last_hidden=True)
    rows, states = rows_of("a", 30), last_of("a", 30)
    with StoreWriter(path, facts, part_bytes=part_rows * WIDTH * 4) as writer:
        writer.add(sparse("a", 30, kept, last), picked(rows, kept), picked(states, last))
        writer.add(sparse("b", 30, [[0, 30]], [[0, 30]]), rows_of("b", 30), last_of("b", 30))
    store = FeatureStore.open(path, verify=True)
    sample = store.sample(0)
    assert (sample.num_rows, sample.kept.tolist(), sample.last_rows.tolist()) == (30, kept, last)
    start = data.draw(st.integers(0, 30))
    stop = data.draw(st.integers(start, 30))
    if start == stop or any(a <= start and stop <= b for a, b in kept):
        assert torch.equal(store.rows(0, start, stop), rows[start:stop])
    else:
        with pytest.raises(StoreError, match=rf"rows \[{start}, {stop}\) of sample a .*--keep all"):
            store.rows(0, start, stop)
    held = [row for a, b in last for row in range(a, b)]
    positions = torch.tensor(
        data.draw(st.lists(st.sampled_from(held)) if held else st.just([])), dtype=torch.int64
    )
    assert torch.equal(store.last_hidden(0, positions), states[positions])
    absent = data.draw(st.sampled_from(sorted(set(range(30)) - set(held)) or [30]))
    with pytest.raises(StoreError, match=rf"no last hidden state at position {absent}"):
        store.last_hidden(0, torch.tensor([*held, absent]))
    assert torch.equal(store.rows(1, 0, 30), rows_of("b", 30))
    assert torch.equal(store.last_hidden(1, torch.tensor([29, 0, 29])), last_of("b", 30)[[29, 0, 29]])
    counts = store_counts(path)
    assert (counts["rows"], counts["stored_rows"], counts["last_rows"]) == (
        60,
        30 + len(picked(rows, kept)),
        30 + len(held),
    )


def test_missing_last_row_is_zeros_in_a_sparse_store_too(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", manifest(keep=WINDOWS)) as writer:
        sample = replace(sparse("a", 9, [[2, 5], [6, 8]]), num_rows=8)
        writer.add(sample, picked(rows_of("a", 9), [[2, 5], [6, 8]]))
    store = FeatureStore.open(tmp_path / "s")
    assert torch.equal(store.rows(0, 6, 9), torch.cat([rows_of("a", 9)[6:8], torch.zeros(1, WIDTH)]))
    assert torch.equal(store.rows(0, 8, 9), torch.zeros(1, WIDTH))
    with pytest.raises(StoreError, match="stored"):
        store.rows(0, 5, 9)


def test_everything_is_kept_unless_said_otherwise(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        writer.add(tokens_of("a", 9), rows_of("a", 8))
    store = FeatureStore.open(tmp_path / "s")
    sample = store.sample(0)
    assert (sample.kept.tolist(), sample.anchor_spans.tolist()) == ([[0, 8]], [[0, 9]])
    assert (sample.last_rows.tolist(), store.has_last_hidden) == ([], False)
    with pytest.raises(StoreError, match="capture with --last-hidden"):
        store.last_hidden(0, torch.tensor([3]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kept": torch.tensor([[0, 5], [5, 9]])}, "kept must be ascending ranges"),
        ({"kept": torch.tensor([[0, 4]])}, "9 feature rows for ranges of 4"),
        ({"anchor_spans": torch.tensor([[3, 11]])}, "anchor_spans must be ascending ranges in"),
        ({"last_rows": torch.tensor([[0, 3]])}, "the store has no last hidden states"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with StoreWriter(tmp_path / "s", manifest()) as writer, pytest.raises(StoreError, match=words):
        writer.add(replace(tokens_of("a", 9), num_rows=9, **changes), rows_of("a", 9))


@pytest.mark.parametrize("changes", [{"keep": WINDOWS}, {"last_hidden": True}])
def test_store_of_another_rule_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with StoreWriter(tmp_path / "s", manifest()) as writer:
        writer.add(tokens_of("a", 9), rows_of("a", 9))
    with pytest.raises(StoreError, match=next(iter(changes))):
        StoreWriter(tmp_path / "s", manifest(**changes))


def test_altered_last_state_costs_its_sample(tmp_path: Path) -> None:
    facts = manifest(last_hidden=True)
    with StoreWriter(tmp_path / "s", facts) as writer:
        for name in ("a", "b"):
            sample = replace(tokens_of(name, 9), last_rows=torch.tensor([[3, 8]]))
            writer.add(sample, rows_of(name, 9), last_of(name, 9)[3:8])
    (part,) = (tmp_path / "s/last_hidden").iterdir()
    with part.open("r+b") as stream:
        stream.seek(1024 + 6 * HIDDEN * 4)
        stream.write(b"\xff")
    with pytest.raises(StoreError, match=r"last-000.*sample b \(last_hidden rows altered\)"):
        FeatureStore.open(tmp_path / "s", verify=True)
    with StoreWriter(tmp_path / "s", facts, verify=True) as writer:
        assert (writer.done, writer.dropped) == ({"a"}, {"b"})
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(StoreError, match=rf"{part.name}: \d+ bytes, expected"):
        FeatureStore.open(tmp_path / "s")


def test_version_1_store_means_keep_all_and_can_be_continued(tmp_path: Path) -> None:
    """Written as version 1 wrote it: fewer columns, and a manifest with `window_rule`."""
    path = tmp_path / "s"
    with StoreWriter(path, manifest()) as writer:
        writer.add(tokens_of("a", 9), rows_of("a", 9))
    content = json.loads((path / "manifest.json").read_text())
    del content["keep"], content["last_hidden"]
    (path / "manifest.json").write_text(json.dumps({**content, "schema_version": 1, "window_rule": "all"}))
    (file,) = (path / "samples").iterdir()
    with pa.memory_map(str(file)) as source:
        table = pa.ipc.open_file(source).read_all()
        old = table.drop_columns(["kept", "anchor_spans", "last_rows", "last_segments"])
        with pa.OSFile(str(tmp_path / "old"), "wb") as sink, pa.ipc.new_file(sink, old.schema) as writer:
            writer.write_table(old)
    (tmp_path / "old").replace(file)
    store = FeatureStore.open(path, verify=True)
    assert (store.manifest.keep, store.has_last_hidden) == ({"rule": "all"}, False)
    assert torch.equal(store.rows(0, 2, 9), rows_of("a", 9)[2:])
    assert store.sample(0).kept.tolist() == [[0, 9]]
    with StoreWriter(path, manifest()) as writer:
        writer.add(tokens_of("b", 9), rows_of("b", 9))
    assert FeatureStore.open(path, verify=True).ids == ["a", "b"]
    assert json.loads((path / "manifest.json").read_text())["schema_version"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:  # B2
    for length in (1, 7, 33, 100):
        values = torch.randn(length, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert all_finite(values)
        for at in range(length):
            changed = values.clone()
            changed[at] = value
            assert not all_finite(changed)
    assert all_finite(torch.empty(0, dtype=dtype))


# -------------------------------------------------------------------- e4m3


@settings(max_examples=60, deadline=None)
@given(
    taps=st.integers(1, 4),
    hidden=st.integers(1, 40),
    spread=st.integers(0, 12),
    exponent=st.integers(-60, 60),
    seed=st.integers(0, 2**31),
)
def test_error_of_e4m3_is_bounded_within_each_tap(
    taps: int, hidden: int, spread: int, exponent: int, seed: int
) -> None:  # B13
    """|error| <= max(2^-4 |x|, 2^-9 m / 448), m the tap's largest magnitude in the row (see `rowformat`)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, taps, hidden, generator=generator, dtype=torch.float64)
    x *= torch.exp2(spread * torch.randn(7, taps, hidden, generator=generator, dtype=torch.float64))
    x *= 100.0 ** torch.arange(taps, dtype=torch.float64)[:, None] * 2.0**exponent
    x = x.float().double()
    row_format = RowFormat("features", torch.float8_e4m3fn, taps, hidden)
    packed = row_format.pack(row_format.cast(x.flatten(1)))
    assert packed.shape == (7, row_format.row_bytes)
    read = row_format.unpack(packed)
    assert read.dtype == torch.bfloat16
    largest = x.abs().amax(dim=-1, keepdim=True)
    bound = torch.maximum(2.0**-4 * x.abs(), 2.0**-9 / 448 * largest)
    assert bool(((read.double().view_as(x) - x).abs() <= bound).all())


def test_one_large_tap_does_not_crush_the_others() -> None:  # B13
    """The same values in a small tap, beside a tap of its size and beside one 100 times larger."""
    generator = torch.Generator().manual_seed(0)
    small, large = torch.randn(64, 2, 576, generator=generator).unbind(1)
    row_format = RowFormat("features", torch.float8_e4m3fn, 2, 576)

    def read(factor: float) -> Tensor:
        rows = torch.stack([small, factor * large], dim=1).flatten(1)
        return row_format.unpack(row_format.pack(rows))[:, :576].float()

    assert torch.equal(read(1.0), read(100.0))
    # Rounding to 4 significant bits is uniform below 2^-4 at the least significand: RMS 2^-4 / sqrt(3) there.
    assert float((read(100.0) - small).norm() / small.norm()) < 0.03


def test_zero_rows_and_extreme_values_survive_e4m3() -> None:
    row_format = RowFormat("features", torch.float8_e4m3fn, 1, 4)
    rows = torch.tensor([[0.0, 0, 0, 0], [3e38, -3e38, 1e30, 0], [1e-38, -1e-38, 0, 0], [448.0, 1, -1, 0.5]])
    read = row_format.unpack(row_format.pack(rows)).float()
    assert bool(torch.isfinite(read).all())
    assert torch.equal(read[0], rows[0])
    assert torch.equal(read[3], rows[3])
    assert torch.allclose(read[1:3, :2], rows[1:3, :2], rtol=2**-4)


def test_packed_rows_pack_to_the_same_values_again() -> None:
    row_format = RowFormat("features", torch.float8_e4m3fn, 2, 33)
    rows = torch.randn(50, 66, generator=torch.Generator().manual_seed(1))
    once = row_format.unpack(row_format.pack(rows))
    assert torch.equal(row_format.unpack(row_format.pack(row_format.cast(once))), once)


def test_e4m3_store_reads_as_bfloat16_and_keeps_last_states_in_it(tmp_path: Path) -> None:
    facts = manifest(dtype="float8_e4m3fn", last_hidden=True)
    with StoreWriter(tmp_path / "s", facts) as writer:
        sample = replace(tokens_of("a", 20), last_rows=torch.tensor([[3, 8]]))
        writer.add(sample, rows_of("a", 20), last_of("a", 20)[3:8])
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert (store.dtype, store.manifest.torch_dtype) == (torch.bfloat16, torch.bfloat16)
    row_format = facts.formats["features"]
    assert torch.equal(store.rows(0, 4, 9), row_format.unpack(row_format.pack(rows_of("a", 20)[4:9])))
    assert torch.equal(store.last_hidden(0, torch.tensor([7, 3])), last_of("a", 20)[[7, 3]].bfloat16())
    (part,) = (tmp_path / "s/features").iterdir()
    assert part.stat().st_size == 1024 + 20 * (WIDTH + 2 * 2)
    from safetensors.torch import load_file

    assert load_file(part)["features"].shape == (20, WIDTH + 4)


def test_inspection_shows_what_is_kept(tmp_path: Path) -> None:
    rule = {"rule": "windows", "window": 4, "neighbourhoods": 2, "neighbourhood_length": 8}
    facts = manifest(keep=rule, last_hidden=True, dtype="float8_e4m3fn")
    with StoreWriter(tmp_path / "s", facts) as writer:
        writer.add(sparse("a", 40, [[0, 3], [10, 14]], [[12, 13]]), rows_of("a", 7), last_of("a", 1))
        writer.add(sparse("b", 40, [], []), rows_of("b", 0), last_of("b", 0))
    report = inspect_store(tmp_path / "s", verify=True)
    assert (report["rows"], report["stored_rows"], report["last_rows"]) == (80, 7, 1)
    assert (report["keep"], report["last_hidden"], report["row_bytes"]) == (rule, True, WIDTH + 4)
    assert report["bytes_of"] == {"features": 1024 + 7 * (WIDTH + 4), "last_hidden": 1024 + HIDDEN * 2}
    console = Console(record=True, width=120)
    console.print(render_store(report))
    text = console.export_text()
    for words in ("7 rows (8.8%): windows of 4, at most 2 neighbourhoods of 8 tokens", "float8_e4m3fn"):
        assert words in text
