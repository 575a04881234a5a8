"""Captures with the transformers backend, end to end on a tiny target."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from csbp.rows import RowSet
from pipelines.capture import CaptureError, CaptureOptions, render_capture, run_capture
from pipelines.capture_tasks import complete_records, job_seed
from pipelines.engine import EngineError, Job, Sampling
from pipelines.engine_hf import HfEngine
from pipelines.engine_vllm import refuse_target
from pipelines.parity import reference_states
from pipelines.records import parse_record
from pipelines.rowfile import DiskFullError
from pipelines.rowformat import row_formats
from pipelines.store import FeatureStore, StoreError, StoreWriter
from pipelines.target import load_tokenizer
from tests.pipelines.tiny_target import HIDDEN, TAPS, make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "llama")


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def pairs(count: int) -> list[dict[str, str]]:
    return [{"question": f"question {n}?", "answer": f"answer {n}" * (1 + n % 4)} for n in range(count)]


def options(target: Path, out: Path, data: str, **changes: Any) -> CaptureOptions:
    return CaptureOptions.model_validate({
        "target": str(target), "data": [data], "out": out, "backend": "hf", "taps": TAPS,
        "feature_dtype": "fp32", **changes,
    })  # fmt: skip


def everything(length: int) -> dict[str, RowSet]:
    return {"features": RowSet.of([(0, length)])}


def reference_rows(target: Path, ids: list[int]) -> torch.Tensor:
    states = reference_states(target, ids, "float32")
    return torch.cat([states[tap] for tap in TAPS], dim=1)


def check_rows(store: FeatureStore, target: Path, index: int) -> None:
    sample = store.sample(index)
    rows = store.rows(index, 0, sample.num_rows)
    expected = reference_rows(target, sample.token_ids.tolist())[: sample.num_rows]
    # Batched and single matrix products differ by fp32 rounding only, which every layer passes on.
    assert rows.shape == expected.shape
    assert bool(((rows - expected).norm(dim=-1) <= 2e-4 * expected.norm(dim=-1)).all())


# -------------------------------------------------------------------- rows


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rows_are_the_outputs_of_the_tapped_layers(tmp_path: Path, kind: str) -> None:  # B4
    """Prompts of different length share right-padded batches; a long one runs in chunks over a cache."""
    target = make_target(tmp_path / "target", kind)
    data = lines(tmp_path / "d.jsonl", *pairs(7), {"text": "a longer text " * 20})
    run_capture(options(target, tmp_path / "s", data, step_tokens=160))
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert len(store) == 8
    assert int(store.lengths.max()) > 160
    for index in range(len(store)):
        check_rows(store, target, index)


def test_batch_equals_one_by_one(target: Path) -> None:  # B4
    rng = random.Random(0)
    jobs = [
        Job(str(n), [rng.randrange(256) for _ in range(length)], Sampling(), everything(length))
        for n, length in enumerate((5, 40, 17, 33))
    ]
    found = []
    for step in (4096, 1):  # 1: nothing shares a batch, and chunks are single tokens
        engine = HfEngine(target, TAPS, dtype="float32", step_tokens=step)
        engine.start()
        for job in jobs:
            engine.submit(job)
        formats = row_formats("float32", len(TAPS), HIDDEN, last_hidden=False)
        found.append({c.key: c.read(formats)["features"] for c in engine.results()})
        engine.stop()
    for job in jobs:
        assert torch.allclose(found[0][job.key], found[1][job.key], rtol=1e-4, atol=1e-4)


def test_answer_of_a_prompt_alone_equals_that_in_a_batch(target: Path) -> None:
    rng = random.Random(1)
    jobs = [
        Job(str(n), [rng.randrange(256) for _ in range(length)], Sampling(6), everything(length + 6))
        for n, length in enumerate((9, 30, 21))
    ]
    found = []
    for step in (4096, 7):  # 7: every prompt is read alone, in chunks, and answered on the same cache
        engine = HfEngine(target, TAPS, dtype="float32", step_tokens=step)
        engine.start()
        for job in jobs:
            engine.submit(job)
        formats = row_formats("float32", len(TAPS), HIDDEN, last_hidden=False)
        found.append({c.key: (c.output_ids, c.read(formats)["features"]) for c in engine.results()})
        engine.stop()
    for job in jobs:
        (ids, rows), (alone_ids, alone_rows) = found[0][job.key], found[1][job.key]
        assert alone_ids == ids
        assert len(alone_rows) == len(job.token_ids) + len(ids) - 1
        assert torch.allclose(alone_rows, rows, rtol=1e-4, atol=1e-4)


def test_regeneration_stores_what_the_target_wrote(target: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "d.jsonl", {"prompt": "say"}, {"turns": ["first", "second"]})
    result = run_capture(options(target, tmp_path / "s", data, regenerate=True, max_new_tokens=6))
    store = FeatureStore.open(tmp_path / "s", verify=True)
    assert result.generated_tokens == result.counts["supervised"]
    for index in range(len(store)):
        sample = store.sample(index)
        assert sample.num_rows == len(sample.token_ids) - 1
        check_rows(store, target, index)
        # Greedy: at every supervised position the target's own next token stands there.
        states = reference_states(target, sample.token_ids.tolist(), "float32")[-1]
        head = load_file(target / "model.safetensors")["lm_head.weight"]
        greedy = (states @ head.T).argmax(dim=-1)
        at = sample.loss_mask.nonzero().flatten()
        assert torch.equal(sample.token_ids[at], greedy[at - 1])


def test_seed_of_an_answer_depends_on_content_only() -> None:
    one, other = parse_record({"prompt": "a"}, "x", 1), parse_record({"prompt": "a"}, "y", 9)
    assert job_seed(one, 0, 5) == job_seed(other, 0, 5)
    assert len({job_seed(one, 0, 5), job_seed(one, 1, 5), job_seed(one, 0, 6)}) == 3


def test_conversation_is_recorded(target: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "d.jsonl", *pairs(2))
    run_capture(options(target, tmp_path / "s", data))
    store = FeatureStore.open(tmp_path / "s")
    sample = store.sample(0)
    assert sample.id.startswith(sample.conversation)
    assert sample.metadata["source"].startswith(data + ":")
    assert sample.metadata["prompt_length"] == int(sample.loss_mask.nonzero()[0])


# -------------------------------------------------------------------- resume


def test_second_run_does_nothing(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = lines(tmp_path / "d.jsonl", *pairs(3))
    asked = options(target, tmp_path / "s", data)
    run_capture(asked)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "s/features").iterdir()}
    monkeypatch.setattr(HfEngine, "start", lambda _: pytest.fail("the engine was started for nothing"))
    result = run_capture(asked)
    assert (result.new_samples, result.finished) == (0, 3)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "s/features").iterdir()} == before


KILL = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from pipelines import capture_run
from tests.pipelines.test_capture import options, run_capture
record = capture_run.CapturePass._write
def write(self, *arguments):
    if self.figures.samples == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    record(self, *arguments)
capture_run.CapturePass._write = write
run_capture(options(Path({target!r}), Path({out!r}), {data!r}))
"""


def test_killed_capture_redoes_only_what_is_missing(target: Path, tmp_path: Path) -> None:  # B15, E4
    root = str(Path(__file__).resolve().parents[2])
    records = pairs(5)
    data = lines(tmp_path / "d.jsonl", *records)
    code = KILL.format(root=root, target=str(target), out=str(tmp_path / "s"), data=data)
    run = subprocess.run([sys.executable, "-c", code], check=False, cwd=root, capture_output=True)
    assert run.returncode == -signal.SIGKILL
    random.Random(1).shuffle(records)  # the order of the input does not matter
    lines(tmp_path / "d.jsonl", *records)
    result = run_capture(options(target, tmp_path / "s", data))
    assert (result.finished, result.new_samples) == (3, 2)
    store = FeatureStore.open(tmp_path / "s", verify=True)
    clean = tmp_path / "clean"
    run_capture(options(target, clean, data))
    assert store.ids == FeatureStore.open(clean).ids
    for index in range(5):
        check_rows(store, target, index)
    assert [file.name for file in (tmp_path / "s/staging").iterdir()] == ["lock"]  # B10


def test_damaged_part_is_captured_again(target: Path, tmp_path: Path) -> None:  # B9
    data = lines(tmp_path / "d.jsonl", *pairs(4))
    asked = options(target, tmp_path / "s", data)
    run_capture(asked)
    (part,) = (tmp_path / "s/features").iterdir()
    os.truncate(part, part.stat().st_size - 1)
    result = run_capture(asked)
    assert (result.recaptured, result.new_samples) == (4, 4)
    assert len(FeatureStore.open(tmp_path / "s", verify=True)) == 4


def test_conversation_is_complete_only_with_all_its_samples() -> None:
    assert complete_records({"a-0of1", "b-0of2", "c-0of2", "c-1of2"}) == {"a", "c"}


# -------------------------------------------------------------------- refusals and rejections


def test_bad_records_are_counted_and_listed_and_the_rest_goes_on(target: Path, tmp_path: Path) -> None:
    bad = [
        "{broken",
        {"messages": [{"role": "foo", "content": "x"}]},
        {"text": "x" * 400},
        {"prompt": "no answer"},
    ]
    data = lines(tmp_path / "d.jsonl", *pairs(4), *bad)
    result = run_capture(options(target, tmp_path / "s", data, max_length=200))
    assert result.counts["samples"] == 4
    listed = [json.loads(line) for line in (tmp_path / "s/rejected.jsonl").read_text().splitlines()]
    assert [(entry["source"], entry["line"]) for entry in sorted(listed, key=lambda e: e["line"])] == [
        (data, line) for line in (5, 6, 7, 8)
    ]
    reasons = " ".join(entry["reason"] for entry in listed)
    for words in ("not valid JSON", "unknown role 'foo'", "more than max_length 200", "no assistant message"):
        assert words in reasons
    assert result.counts["rejected"] == 4
    assert render_capture(result).renderables


def test_template_error_of_one_row_costs_one_row(tmp_path: Path) -> None:  # A8
    template = (
        "{% for m in messages %}{{ raise_exception('refused') if 'bad' in m['content'] }}"
        "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    target = make_target(tmp_path / "t", template=template)
    rows = [{"question": q, "answer": "a"} for q in ("one", "bad", "two")]
    result = run_capture(options(target, tmp_path / "s", lines(tmp_path / "d.jsonl", *rows)))
    assert result.counts["samples"] == 2
    assert list(result.rejected.values()) == [1]
    assert "refused" in next(iter(result.rejected))


def test_nothing_supervised_is_an_error_of_the_run(tmp_path: Path) -> None:  # A1
    target = make_target(tmp_path / "t", template="{% for m in messages %}{{ m['role'] }}{% endfor %}")
    with pytest.raises(CaptureError, match="0 supervised tokens"):
        run_capture(options(target, tmp_path / "s", lines(tmp_path / "d.jsonl", *pairs(3))))


def test_half_the_rows_invalid_leaves_no_staging(tmp_path: Path) -> None:  # B2, B10
    target = make_target(tmp_path / "t")
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][load_tokenizer(target).convert_tokens_to_ids("Z")] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    rows = [{"question": "q", "answer": ("Z" if n % 2 else "y") * (n + 1)} for n in range(6)]
    data = lines(tmp_path / "d.jsonl", *rows)
    result = run_capture(options(target, tmp_path / "s", data, step_tokens=1))
    assert result.counts == {"samples": 3, "tokens": result.counts["tokens"], "rejected": 3} | result.counts
    listed = [json.loads(line) for line in (tmp_path / "s/rejected.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in listed] == [2, 4, 6]
    assert all("non-finite" in entry["reason"] for entry in listed)
    assert [file.name for file in (tmp_path / "s/staging").iterdir()] == ["lock"]
    assert len(FeatureStore.open(tmp_path / "s", verify=True)) == 3


def test_size_is_said_before_and_refused_beyond_the_budget(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # B12
    data = lines(tmp_path / "d.jsonl", {"text": "x" * 100})
    row = len(TAPS) * HIDDEN * 4
    with pytest.raises(CaptureError, match=rf"100 rows x {row:,} bytes.*budget"):
        run_capture(options(target, tmp_path / "s", data, disk_budget=1e-6))
    assert "fp32" in capsys.readouterr().err
    assert not list((tmp_path / "s/samples").iterdir())


def test_full_disk_stops_with_one_error_and_goes_on_later(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = lines(tmp_path / "d.jsonl", *pairs(5))
    asked = options(target, tmp_path / "s", data)
    add = StoreWriter._record
    written = 0

    def full(self: StoreWriter, *arguments: Any) -> None:
        nonlocal written
        written += 1
        if written > 2:
            raise DiskFullError("no room to write it")
        add(self, *arguments)

    monkeypatch.setattr(StoreWriter, "_record", full)
    with pytest.raises(StoreError, match="no room"):
        run_capture(asked)
    monkeypatch.undo()
    result = run_capture(asked)
    assert (result.finished, result.new_samples) == (2, 3)


def test_store_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "d.jsonl", *pairs(1))
    run_capture(options(target, tmp_path / "s", data))
    other = make_target(tmp_path / "other", rms_norm_eps=1e-3)
    with pytest.raises(StoreError, match="target_fingerprint"):
        run_capture(options(other, tmp_path / "s", data))
    with pytest.raises(StoreError, match="settings"):
        run_capture(options(target, tmp_path / "s", data, regenerate=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taps": [2, 1]}, "increase strictly"),
        ({"taps": [1, 5]}, "must lie in 0..4"),
        ({"max_length": 4096}, "below the target's 512 positions"),
        ({"template_args": ["thinking"]}, "expected key=value"),
        ({"drafter": Path("nowhere.json"), "taps": []}, "not a drafter's config"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CaptureError, match=words):
        run_capture(options(target, tmp_path / "s", lines(tmp_path / "d.jsonl", *pairs(1)), **changes))


def test_taps_of_a_drafter_are_used(target: Path, tmp_path: Path) -> None:
    from drafter.config import DrafterConfig

    config = DrafterConfig.for_target(
        json.loads((target / "config.json").read_text()), num_layers=1, block_size=4, target_layer_ids=[1, 4],
        mask_token_id=300,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    data = lines(tmp_path / "d.jsonl", *pairs(1))
    run_capture(options(target, tmp_path / "s", data, taps=[], drafter=tmp_path))
    assert FeatureStore.open(tmp_path / "s").manifest.target_layer_ids == [1, 4]


def test_latent_attention_is_refused_before_anything_is_read(target: Path, tmp_path: Path) -> None:  # B17
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "mla").mkdir()
    (tmp_path / "mla/config.json").write_text(json.dumps({**config, "kv_lora_rank": 512}))
    with pytest.raises(EngineError, match=r"MLA.*--backend hf"):
        refuse_target(tmp_path / "mla")
