"""The vLLM backend on a real engine: three starts in all, each for several properties."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from csbp.rows import RowSet
from pipelines.capture import CaptureOptions, run_capture
from pipelines.engine import Captured, EngineError, Job, Sampling
from pipelines.engine_vllm import VllmEngine
from pipelines.parity import compare_rows, reference_states
from pipelines.rowformat import FEATURES, LAST, row_formats
from pipelines.store import FeatureStore
from tests.pipelines.test_keep import legal, seen_by
from tests.pipelines.tiny_target import HIDDEN, LAYERS, TAPS, make_target

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]
STEP = 64
WINDOW = 12
WIDTH = len(TAPS) * HIDDEN
FORMATS = row_formats("float32", len(TAPS), HIDDEN, last_hidden=True)
SEED = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "t", "qwen3", max_position_embeddings=4096)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other collapse when other tests run beside them."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def start(target: Path, folder: Path, **changes: Any) -> VllmEngine:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "feature_dtype": "float32",
        "last_hidden": True,
        "max_model_len": 4096,
        "max_concurrent": 4,
        "step_tokens": STEP,
        "kv_cache_gib": 1,
        **changes,
    }
    return VllmEngine(target, TAPS, spool=folder / "spool", log=folder / "engine.log", **settings)


def run(engine: VllmEngine, jobs: dict[str, tuple[list[int], int]]) -> dict[str, tuple[list[int], Tensor]]:
    """key -> (generated ids, rows and last hidden states) of prompts that are in the engine together."""
    for key, (prompt, new) in jobs.items():
        everything = RowSet.of([(0, len(prompt) + new)])
        engine.submit(Job(key, prompt, Sampling(new), {FEATURES: everything, LAST: everything}))
    return {captured.key: (captured.output_ids, _rows(captured)) for captured in engine.results()}


def _rows(captured: Captured) -> Tensor:
    assert captured.error is None
    return torch.cat(list(captured.read(FORMATS).values()), dim=1)


def check(target: Path, token_ids: list[int], rows: Tensor) -> None:
    """Taps, and the last hidden state as the tap of the last layer."""
    assert len(rows) == len(token_ids)
    compare_rows(rows, [*TAPS, LAYERS - 1], reference_states(target, token_ids, "float32"), 1e-3)


def check_sparse(store: FeatureStore, index: int, target: Path) -> None:
    """The rows that blocks in the target's answers can see, and last hidden states where they predict."""
    sample = store.sample(index)
    assert sample.num_rows == len(sample.token_ids) - 1
    anchors = legal(sample.loss_mask)
    kept, labels = (RowSet.of(ranges.tolist()) for ranges in (sample.kept, sample.last_rows))
    assert set(kept.indices().tolist()) == seen_by(anchors, sample.loss_mask, WINDOW)
    assert labels.indices().tolist() == anchors
    states = reference_states(target, sample.token_ids.tolist(), "float32")
    expected = torch.cat([states[tap] for tap in TAPS], dim=1)
    for start, stop in kept.ranges:
        assert torch.allclose(store.rows(index, start, stop), expected[start:stop], rtol=1e-3, atol=1e-3)
    found = store.last_hidden(index, labels.indices())
    assert torch.allclose(found, states[LAYERS - 1][labels.indices()], rtol=1e-3, atol=1e-3)


def check_seeds(engine: VllmEngine) -> None:
    """The seed alone decides a drawn answer, not in how many chunks its prompt was prefilled."""
    nothing = {FEATURES: RowSet.of([]), LAST: RowSet.of([])}
    drawn = []
    for keys in (["chunks"], ["cached", "beside it"]):
        for key in keys:
            engine.submit(
                Job(key, ids(7, 3 * STEP + 5), Sampling(8, temperature=1.0), nothing, seed=len(key))
            )
        drawn += [(captured.key, captured.output_ids) for captured in engine.results()]
    answers = dict(drawn)
    assert answers["chunks"] == answers["cached"]  # keys of six letters: one seed
    assert answers["beside it"] != answers["cached"]


def test_paged_capture(target: Path, tmp_path: Path) -> None:  # B5, B6, B16, G15
    """On a CPU: chunks, prefix-cache hits, generated tokens and mixed batches all give the target's rows."""
    engine = start(target, tmp_path)
    try:
        long, short = ids(1, 5 * STEP + 7), ids(2, 20)
        alone = run(engine, {"long": (long, 0)})["long"][1]  # six steps
        check(target, long, alone)
        again = run(engine, {"again": (long, 0)})["again"][1]  # nearly all from the prefix cache
        assert torch.equal(again, alone)
        wanted = {
            FEATURES: RowSet.of([(3, 5), (STEP - 2, 2 * STEP + 1)]),
            LAST: RowSet.of([(STEP, STEP + 3)]),
        }
        engine.submit(Job("some", ids(5, 3 * STEP), Sampling(), wanted))
        engine.submit(Job("none", ids(6, 20), Sampling(), {FEATURES: RowSet.of([]), LAST: RowSet.of([])}))
        some = {captured.key: captured.read(FORMATS) for captured in engine.results()}
        whole = run(engine, {"whole": (ids(5, 3 * STEP), 0)})["whole"][1]
        for family, columns in ((FEATURES, slice(0, WIDTH)), (LAST, slice(WIDTH, None))):
            assert torch.equal(some["some"][family], whole[wanted[family].indices(), columns])
            assert len(some["none"][family]) == 0
        branch = long[:200] + ids(3, 90)  # a shared prefix with a new tail
        mixed = run(engine, {"branch": (branch, 0), "short": (short, 12), "fresh": (ids(4, 150), 0)})
        check(target, branch, mixed["branch"][1])
        check(target, ids(4, 150), mixed["fresh"][1])
        output, rows = mixed["short"]
        assert len(output) == 12
        check(target, (short + output)[:-1], rows)  # the last token was never an input
        check_seeds(engine)
    finally:
        engine.stop()
    assert not (tmp_path / "spool").exists()


def test_bounded_capture(target: Path, tmp_path: Path) -> None:
    """Pages for hidden states do not grow with the prompt: 3,000 tokens fit where paged ones could not."""
    engine = start(target, tmp_path, bounded=True)
    try:
        engine.start()
        engine.wait_ready()
        assert engine.bounded, engine.bounded_refused
        long, short = ids(1, 3000), ids(2, 20)
        together = run(engine, {"long": (long, 0), "short": (short, 12)})
        check(target, long, together["long"][1])
        output, rows = together["short"]
        check(target, (short + output)[:-1], rows)
    finally:
        engine.stop()


def test_capture_command_regenerates_with_vllm(target: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    records = [{"turns": ["one", "two"]}, {"prompt": "three"}, {"prompt": "four"}]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = CaptureOptions.model_validate({
        "target": str(target), "data": [str(data)], "out": tmp_path / "s", "taps": TAPS, "regenerate": True,
        "max_new_tokens": 9, "temperature": 1.0, "seed": SEED, "feature_dtype": "fp32", "max_length": 1000,
        "kv_cache_gib": 1, "keep": "windows", "window": WINDOW, "last_hidden": True,
    })  # fmt: skip
    result = run_capture(options)
    assert max(result.parity["worst"].values()) < 1e-3
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert result.generated_tokens == result.counts["supervised"]
    for index in range(len(store)):
        check_sparse(store, index, target)
    second = run_capture(options)
    assert (second.new_samples, second.finished) == (0, 3)


def test_target_without_the_interface_points_to_the_other_backend(
    target: Path, tmp_path: Path
) -> None:  # B17
    """Known before the model is loaded; the answer of vLLM's own class decides."""
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "t").mkdir()
    changed = {**config, "architectures": ["Gemma3ForCausalLM"]}
    (tmp_path / "t/config.json").write_text(json.dumps(changed))
    engine = start(tmp_path / "t", tmp_path)
    with pytest.raises(EngineError, match=r"no auxiliary hidden-state interface.*--backend hf"):
        engine.start()
    engine.stop()
