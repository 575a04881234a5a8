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

from pipelines.capture import CaptureOptions, run_capture
from pipelines.engine import Captured, EngineError, Job, Sampling
from pipelines.engine_vllm import VllmEngine
from pipelines.parity import compare_rows, reference_states
from pipelines.store import FeatureStore
from tests.pipelines.tiny_target import HIDDEN, TAPS, make_target

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]
STEP = 64
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
        "max_model_len": 4096,
        "max_concurrent": 4,
        "step_tokens": STEP,
        "kv_cache_gib": 1,
        **changes,
    }
    return VllmEngine(target, TAPS, spool=folder / "spool", log=folder / "engine.log", **settings)


def run(engine: VllmEngine, jobs: dict[str, tuple[list[int], int]]) -> dict[str, tuple[list[int], Tensor]]:
    """key -> (generated ids, rows) of prompts that are in the engine together."""
    for key, (prompt, new) in jobs.items():
        engine.submit(Job(key, prompt, Sampling(new)))
    return {captured.key: (captured.output_ids, _rows(captured)) for captured in engine.results()}


def _rows(captured: Captured) -> Tensor:
    assert captured.error is None
    return torch.cat(list(captured.rows(len(TAPS) * HIDDEN, torch.float32)))


def check(target: Path, token_ids: list[int], rows: Tensor) -> None:
    assert len(rows) == len(token_ids)
    compare_rows(rows, TAPS, reference_states(target, token_ids, "float32"), 1e-3)


def test_paged_capture(target: Path, tmp_path: Path) -> None:  # B5, B6, B16, G15
    """On a CPU: chunks, prefix-cache hits, generated tokens and mixed batches all give the target's rows."""
    engine = start(target, tmp_path)
    try:
        long, short = ids(1, 5 * STEP + 7), ids(2, 20)
        alone = run(engine, {"long": (long, 0)})["long"][1]  # six steps
        check(target, long, alone)
        again = run(engine, {"again": (long, 0)})["again"][1]  # nearly all from the prefix cache
        assert torch.equal(again, alone)
        branch = long[:200] + ids(3, 90)  # a shared prefix with a new tail
        mixed = run(engine, {"branch": (branch, 0), "short": (short, 12), "fresh": (ids(4, 150), 0)})
        check(target, branch, mixed["branch"][1])
        check(target, ids(4, 150), mixed["fresh"][1])
        output, rows = mixed["short"]
        assert len(output) == 12
        check(target, (short + output)[:-1], rows)  # the last token was never an input
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
        "max_new_tokens": 9, "temperature": 1.0, "seed": SEED, "feature_dtype": "float32", "max_length": 1000,
        "kv_cache_gib": 1,
    })  # fmt: skip
    result = run_capture(options)
    assert max(result.parity["worst"].values()) < 1e-3
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert result.generated_tokens == result.counts["supervised"]
    for index in range(len(store)):
        sample = store.sample(index)
        assert sample.num_rows == len(sample.token_ids) - 1
        check(target, sample.token_ids.tolist()[:-1], store.rows(index, 0, sample.num_rows))
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
