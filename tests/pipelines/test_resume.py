"""Interrupted runs: bit-identical to uninterrupted ones, whatever interrupted them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipelines.logs import read_metrics
from pipelines.optimization import ScheduleConfig
from pipelines.trainer import run_train
from pipelines.training_state import (
    CheckpointError,
    find_checkpoint,
    list_checkpoints,
    read_moments,
    read_state,
    read_weights,
)
from tests.pipelines.tiny_run import make_run, make_store, make_target

ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, environment: dict[str, str] | None = None, **sections) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.pipelines.train_process",
            str(folder),
            json.dumps(sections, default=str),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen, word: str) -> None:
    for line in process.stdout:
        if word in line:
            return
    pytest.fail(f"{word} never came: {process.stderr.read()[-2000:]}")


def assert_same_state(one: Path, other: Path) -> None:
    for read in (read_weights, read_moments):
        a, b = read(find_checkpoint(one)), read(find_checkpoint(other))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def train_lines(run: Path) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_resumed_run_is_bit_identical(tmp_path, stop_at, stage):
    common = {
        "parallel": {"zero": stage},
        "objective": {"vocabulary_sample": 20, "selector_blocks_fraction": 0.5},
    }
    whole = make_run(tmp_path, out=tmp_path / "whole", **common)
    run_train(whole)
    stopped = run_train(make_run(tmp_path, checkpoint={"stop_at": stop_at, "every": 3}, **common))
    assert (stopped.status, stopped.step) == ("stopped", stop_at)
    resumed = run_train(make_run(tmp_path, **common))
    assert (resumed.status, resumed.step) == ("finished", 8)
    assert_same_state(whole.out, tmp_path / "run")


def test_learning_rate_after_resume_is_that_of_the_uninterrupted_run(tmp_path):
    log = {"logging": {"every": 1, "tensorboard": False}}
    whole = make_run(tmp_path, out=tmp_path / "whole", **log)
    run_train(whole)
    run_train(make_run(tmp_path, checkpoint={"stop_at": 5}, **log))
    run_train(make_run(tmp_path, **log))
    rates = [[line["lr"] for line in train_lines(run)] for run in (whole.out, tmp_path / "run")]
    assert rates[0] == rates[1]
    schedule = ScheduleConfig(steps=8)
    assert rates[0][5] == 3e-3 * schedule.factor(5, 8, 0.0)


def test_every_step_has_one_line_after_a_crash(tmp_path):
    log = {"logging": {"every": 1, "tensorboard": False}, "checkpoint": {"every": 3}}
    config = make_run(tmp_path, checkpoint={"every": 3, "stop_at": 3}, logging=log["logging"])
    run_train(config)
    with (config.out / "metrics.jsonl").open(
        "a"
    ) as stream:  # what a killed process had logged beyond its save
        stream.write(json.dumps({"kind": "train", "step": 4, "loss": 0.0}) + "\n" + '{"kind": "tr')
    run_train(make_run(tmp_path, **log))
    assert [line["step"] for line in train_lines(config.out)] == list(range(1, 9))
    assert train_lines(config.out)[3]["loss"] > 0


def test_state_says_where_the_sampler_stands(tmp_path):
    run_train(make_run(tmp_path, checkpoint={"stop_at": 6}))
    state = read_state(find_checkpoint(tmp_path / "run"))
    assert (state.step, state.samples, state.epoch) == (6, 24, 1)  # 20 training samples


def test_resume_with_other_micro_batches_and_zero_stage(tmp_path):
    whole = make_run(tmp_path, out=tmp_path / "whole")
    run_train(whole)
    run_train(make_run(tmp_path, checkpoint={"stop_at": 4}))
    run_train(make_run(tmp_path, batch={"samples": 4, "micro": 4}, parallel={"zero": 1}))
    a, b = (read_weights(find_checkpoint(run)) for run in (whole.out, tmp_path / "run"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, msg=name)


def test_kill_during_a_save_leaves_the_checkpoint_before(tmp_path):
    make_store(tmp_path / "store", make_target(tmp_path / "target"))
    whole = make_run(tmp_path, out=tmp_path / "whole", checkpoint={"every": 2})
    run_train(whole)
    process = start(tmp_path, {"TRAIN_HOLD_SAVE": "1"}, checkpoint={"every": 2})
    wait_for(process, "HELD")
    process.kill()
    process.wait()
    run = tmp_path / "run"
    assert list_checkpoints(run) == [2]
    assert (run / "checkpoints" / "step-00000004.part").is_dir()
    result = run_train(make_run(tmp_path, checkpoint={"every": 2}))
    assert result.status == "finished"
    assert_same_state(whole.out, run)
    assert not list(run.glob("checkpoints/*.part"))


def test_sigterm_saves_and_ends_well(tmp_path):
    make_store(tmp_path / "store", make_target(tmp_path / "target"))
    sections = {
        "schedule": {"steps": 100_000},
        "validation": {"every": 5},
        "logging": {"every": 1, "tensorboard": False},
    }
    process = start(tmp_path, **sections)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not train_lines(tmp_path / "run"):
        assert process.poll() is None, process.stderr.read()[-2000:]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err[-2000:]
    result = json.loads(out.split("RESULT ")[1])
    assert result["status"] == "stopped"
    assert list_checkpoints(tmp_path / "run")[-1] == result["step"]
    assert "stopped by SIGTERM after step" in err


def test_damaged_checkpoint_is_named(tmp_path):
    run_train(make_run(tmp_path, checkpoint={"stop_at": 4}))
    (find_checkpoint(tmp_path / "run") / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="step-00000004 is not a usable checkpoint"):
        run_train(make_run(tmp_path))


def test_other_data_are_refused_on_resume(tmp_path):
    run_train(make_run(tmp_path, checkpoint={"stop_at": 2}))
    (tmp_path / "store").rename(tmp_path / "old")
    make_store(tmp_path / "store", tmp_path / "target", samples=30)
    with pytest.raises(CheckpointError, match="fingerprint"):
        run_train(make_run(tmp_path))
