"""Captures that store a part of the rows, in e4m3, and last hidden states: end to end on a tiny target."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from csbp.rows import RowSet
from drafter.config import DrafterConfig
from pipelines.capture import CaptureError, run_capture
from pipelines.capture_options import window_rule
from pipelines.capture_size import StoreSize, render_sizes
from pipelines.store import FeatureStore
from tests.pipelines.test_capture import lines, options, pairs
from tests.pipelines.test_keep import legal, seen_by
from tests.pipelines.tiny_target import HIDDEN, TAPS, make_target

WINDOW = 12
SPARSE = {
    "keep": "windows", "window": WINDOW, "neighbourhoods": 2, "neighbourhood_length": 16, "last_hidden": True,
    "step_tokens": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "llama")


def records() -> list[dict[str, str]]:
    """Short answers to short and to long questions, and texts that are supervised everywhere."""
    long = [{"question": "long " * 40 + str(n), "answer": f"short {n}"} for n in range(3)]
    return [*pairs(3), *long, *({"text": f"text {n} " * 30} for n in range(3))]


def kept_rows(sample: Any) -> RowSet:
    return RowSet.of([(a, b) for a, b in sample.kept.tolist()])


def test_stored_rows_are_those_of_a_full_capture(target: Path, tmp_path: Path) -> None:
    """Bit for bit, and just those that a block in the anchor spans sees."""
    data = lines(tmp_path / "d.jsonl", *records())
    run_capture(options(target, tmp_path / "all", data, step_tokens=64))
    run_capture(options(target, tmp_path / "s", data, **SPARSE))
    full, store = FeatureStore.open(tmp_path / "all"), FeatureStore.open(tmp_path / "s", verify=True)
    assert store.ids == full.ids
    limited = 0
    for index in range(len(store)):
        sample = store.sample(index)
        spans = {a for first, last in sample.anchor_spans.tolist() for a in range(first, last)}
        anchors = [a for a in legal(sample.loss_mask) if a in spans]
        kept = kept_rows(sample)
        assert set(kept.indices().tolist()) == seen_by(anchors, sample.loss_mask, WINDOW)
        for start, stop in kept.ranges:
            assert torch.equal(store.rows(index, start, stop), full.rows(index, start, stop))
        limited += sample.anchor_spans.tolist() != [[0, len(sample.token_ids)]]
    assert limited == 3  # the texts


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_norm_and_head_of_the_last_state_give_the_logits(tmp_path: Path, kind: str) -> None:  # B3
    target = make_target(tmp_path / "t", kind)
    data = lines(tmp_path / "d.jsonl", *records())
    run_capture(options(target, tmp_path / "s", data, **SPARSE))
    model = AutoModelForCausalLM.from_pretrained(target)
    store = FeatureStore.open(tmp_path / "s")
    for index in range(len(store)):
        sample = store.sample(index)
        at = RowSet.of([(a, b) for a, b in sample.last_rows.tolist()]).indices()
        assert bool((sample.loss_mask[at] & sample.loss_mask[at + 1]).all())
        with torch.no_grad():
            logits = model(sample.token_ids[None]).logits[0, at]
            found = model.lm_head(model.model.norm(store.last_hidden(index, at)))
        # Batched and single products differ by float32 rounding; logits here are of the order of 1.
        assert torch.allclose(found, logits, rtol=1e-4, atol=1e-3)


def test_answers_longer_than_the_neighbourhoods_are_thinned_after_generation(
    target: Path, tmp_path: Path
) -> None:
    """Where an answer ends is not known before: more rows are made than are stored."""
    data = lines(tmp_path / "d.jsonl", {"prompt": "say " * 20}, {"turns": ["first", "second"]})
    asked = {**SPARSE, "neighbourhoods": 1, "neighbourhood_length": 8, "window": 4}
    run_capture(options(target, tmp_path / "s", data, regenerate=True, max_new_tokens=60, **asked))
    run_capture(options(target, tmp_path / "all", data, regenerate=True, max_new_tokens=60, step_tokens=64))
    store, full = FeatureStore.open(tmp_path / "s", verify=True), FeatureStore.open(tmp_path / "all")
    assert store.ids == full.ids
    for index in range(len(store)):
        sample = store.sample(index)
        assert torch.equal(sample.token_ids, full.sample(index).token_ids)
        assert sample.num_rows == len(sample.token_ids) - 1
        assert len(kept_rows(sample)) <= 8 + 4 - 1 < int(sample.loss_mask.sum())
        for start, stop in kept_rows(sample).ranges:
            assert torch.equal(store.rows(index, start, stop), full.rows(index, start, stop))


KILL = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from pipelines.store_writer import SampleStream
from tests.pipelines.test_capture import options, run_capture
finish = SampleStream.finish
def killed(self, sample):
    if len(self._writer.done) == 5:
        os.kill(os.getpid(), signal.SIGKILL)  # the rows are written, the sample is not recorded
    finish(self, sample)
SampleStream.finish = killed
run_capture(options(Path({target!r}), Path({out!r}), {data!r}, **{changes!r}))
"""


def test_killed_sparse_capture_ends_in_the_same_store(target: Path, tmp_path: Path) -> None:  # B15, E4
    """Windows, e4m3 and last states: a resumed store equals one made in one go, bit for bit.

    A step of 32 tokens runs every sequence by itself, so batches are the same whatever was finished before.
    """
    root = str(Path(__file__).resolve().parents[2])
    changes = {**SPARSE, "feature_dtype": "fp8", "part_bytes": 1 << 12, "step_tokens": 32}
    entries = records()
    data = lines(tmp_path / "d.jsonl", *entries)
    code = KILL.format(root=root, target=str(target), out=str(tmp_path / "s"), data=data, changes=changes)
    run = subprocess.run([sys.executable, "-c", code], check=False, cwd=root, capture_output=True)
    assert run.returncode == -signal.SIGKILL
    random.Random(3).shuffle(entries)
    lines(tmp_path / "d.jsonl", *entries)
    result = run_capture(options(target, tmp_path / "s", data, **changes))
    assert (result.finished, result.new_samples) == (5, 4)
    run_capture(options(target, tmp_path / "clean", data, **changes))
    resumed, clean = (FeatureStore.open(tmp_path / name, verify=True) for name in ("s", "clean"))
    assert resumed.ids == clean.ids
    for index in range(len(clean)):
        one, other = resumed.sample(index), clean.sample(index)
        for name in ("token_ids", "loss_mask", "kept", "anchor_spans", "last_rows"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        for start, stop in kept_rows(one).ranges:
            assert torch.equal(resumed.rows(index, start, stop), clean.rows(index, start, stop))
        at = RowSet.of([(a, b) for a, b in one.last_rows.tolist()]).indices()
        assert torch.equal(resumed.last_hidden(index, at), clean.last_hidden(index, at))
    assert [file.name for file in (tmp_path / "s/staging").iterdir()] == ["lock"]
    assert run_capture(options(target, tmp_path / "s", data, **changes)).new_samples == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("changes", [{}, SPARSE], ids=["all", "windows"])
def test_announced_size_is_the_size(
    target: Path, tmp_path: Path, dtype: str, changes: dict[str, Any]
) -> None:
    """B12. The table and the journal cost a little more than their tokens."""
    data = lines(tmp_path / "d.jsonl", *records())
    result = run_capture(options(target, tmp_path / "s", data, feature_dtype=dtype, **changes))
    (chosen,) = (StoreSize(**size) for size in result.sizes if size["chosen"])
    assert (chosen.rows, chosen.last_rows) == (result.counts["stored_rows"], result.counts["last_rows"])
    parts = [file for folder in ("features", "last_hidden") for file in (tmp_path / "s" / folder).glob("*")]
    on_disk = sum(file.stat().st_size - 1024 for file in parts)
    assert chosen.bytes == on_disk + round(result.counts["tokens"] * 4.125)
    assert {(size["keep"], size["dtype"]) for size in result.sizes} >= {
        (keep, of) for keep in ("all", "windows") for of in ("bf16", "fp8")
    }
    console = Console(record=True, width=120)
    console.print(render_sizes([StoreSize(**size) for size in result.sizes], at_most=False))
    (line,) = (line for line in console.export_text().splitlines() if "<- chosen" in line)
    assert dtype in line
    assert f"{chosen.rows:,}" in line


def test_answers_to_be_written_are_bounded_from_above(target: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "d.jsonl", {"prompt": "say"}, {"turns": ["first", "second"]})
    asked = options(target, tmp_path / "s", data, regenerate=True, max_new_tokens=6, **SPARSE)
    result = run_capture(asked)
    (chosen,) = (size for size in result.sizes if size["chosen"])
    assert chosen["rows"] >= result.counts["stored_rows"]
    assert chosen["last_rows"] >= result.counts["last_rows"]


def drafter_file(folder: Path, target: Path, window: int | None) -> Path:
    import json

    config = DrafterConfig.for_target(
        json.loads((target / "config.json").read_text()), num_layers=2, block_size=4, target_layer_ids=TAPS,
        mask_token_id=300, sliding_window=window,
    )  # fmt: skip
    file = folder / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    return file


def test_window_is_that_of_the_drafter(target: Path, tmp_path: Path) -> None:
    file = drafter_file(tmp_path, target, window=40)
    asked = options(target, tmp_path / "s", "d", taps=[], drafter=file, keep="windows")
    assert window_rule(asked).window == 40
    assert window_rule(asked.model_copy(update={"window": 60})).window == 60
    assert window_rule(options(target, tmp_path / "s", "d", keep="windows")).window == 2048


@pytest.mark.parametrize(
    ("of_drafter", "asked", "words"), [(None, 64, "see everything"), (40, 39, "see 40, 40")]
)
def test_windows_smaller_than_the_drafters_are_refused(
    target: Path, tmp_path: Path, of_drafter: int | None, asked: int, words: str
) -> None:
    file = drafter_file(tmp_path, target, of_drafter)
    changes = {"taps": [], "drafter": file, "window": asked}
    with pytest.raises(CaptureError, match=words):
        window_rule(options(target, tmp_path / "s", "d", keep="windows", **changes))
    window_rule(options(target, tmp_path / "s", "d", keep="all", **changes))


def test_e4m3_rows_are_close_to_the_target_and_last_states_are_bfloat16(target: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "d.jsonl", *pairs(2))
    run_capture(options(target, tmp_path / "full", data, last_hidden=True))
    run_capture(options(target, tmp_path / "s", data, feature_dtype="fp8", last_hidden=True))
    full, store = FeatureStore.open(tmp_path / "full"), FeatureStore.open(tmp_path / "s")
    for index in range(2):
        rows = full.sample(index).num_rows
        exact = full.rows(index, 0, rows).unflatten(1, (len(TAPS), HIDDEN))
        error = (store.rows(index, 0, rows).float().unflatten(1, (len(TAPS), HIDDEN)) - exact).abs()
        largest = exact.abs().amax(dim=-1, keepdim=True)
        assert bool((error <= torch.maximum(2**-4 * exact.abs(), 2**-9 / 448 * largest)).all())
        at = torch.arange(*full.sample(index).last_rows[0].tolist())
        assert torch.equal(store.last_hidden(index, at), full.last_hidden(index, at).bfloat16())
