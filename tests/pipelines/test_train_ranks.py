"""Training on several gloo ranks: the same run as on one, and what happens when a rank dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from pipelines.launch import LaunchError, train_on_ranks
from pipelines.logs import read_metrics
from pipelines.runfile import RunConfig, save_run
from pipelines.trainer import run_train
from pipelines.training_state import find_checkpoint, list_checkpoints, read_state, read_weights
from tests.pipelines.tiny_run import make_run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.ranks


def train(config: RunConfig, ranks: int, **overrides):
    """Run `config` on gloo ranks of their own."""
    path = config.out.with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_run(config, path)
    return train_on_ranks(path, overrides, ranks)


def train_lines(config: RunConfig) -> list[dict]:
    return [line for line in read_metrics(config.out / "metrics.jsonl") if line["kind"] == "train"]


def validation(config: RunConfig) -> dict:
    return [line for line in read_metrics(config.out / "metrics.jsonl") if line["kind"] == "validation"][-1]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """30 steps on one rank."""
    config = make_run(tmp_path_factory.mktemp("one"), schedule={"steps": 30}, drafter=DRAFTER)
    run_train(config)
    return config


DRAFTER = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}


@pytest.mark.parametrize(
    ("ranks", "context_ranks", "micro", "zero"),
    [(2, 2, 2, 0), (2, 1, 2, 1), (4, 2, 1, 2)],
    ids=["context-2", "replicas-2-zero-1", "context-2-replicas-2-zero-2"],
)
def test_ranks_train_the_same_drafter(one_rank, tmp_path, ranks, context_ranks, micro, zero):
    config = make_run(
        one_rank.out.parent,
        out=tmp_path / "run",
        schedule={"steps": 30},
        drafter=DRAFTER,
        batch={"samples": 4, "micro": micro},
        parallel={"context_ranks": context_ranks, "zero": zero},
    )
    result = train(config, ranks)
    assert result.status == "finished"
    for a, b in zip(train_lines(one_rank), train_lines(config), strict=True):
        # float32, sums in another order; counts are exact
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["coverage"] == pytest.approx(b["coverage"])
    weights, expected = (read_weights(find_checkpoint(run.out)) for run in (config, one_rank))
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)
    assert validation(config)["blocks"] == validation(one_rank)["blocks"]
    assert validation(config)["ce"] == pytest.approx(validation(one_rank)["ce"], rel=1e-4)


def test_more_ranks_than_blocks(tmp_path):
    """One block per sample on two context ranks: one rank has none in every step."""
    sections = {"anchors": {"per_document": 1}, "batch": {"samples": 2, "micro": 1}, "drafter": DRAFTER}
    alone = make_run(tmp_path, out=tmp_path / "alone", **sections)
    run_train(alone)
    shared = make_run(tmp_path, out=tmp_path / "shared", parallel={"context_ranks": 2, "zero": 1}, **sections)
    train(shared, 2)
    # the same with the choice left to the planner: a run this small fits on one context rank, so two replicas
    chosen = make_run(tmp_path, out=tmp_path / "chosen", parallel={"context_ranks": "auto"}, **sections)
    train(chosen, 2)
    assert json.loads((chosen.out / "facts.json").read_text())["context_ranks"] == 1
    a, b = (read_weights(find_checkpoint(run.out)) for run in (alone, shared))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-5, msg=name)


def test_resume_on_another_number_of_ranks(one_rank, tmp_path):
    config = make_run(one_rank.out.parent, out=tmp_path / "run", schedule={"steps": 30}, drafter=DRAFTER)
    stopped = train(config, 2, **{"checkpoint.stop_at": 13, "parallel.zero": 1})
    assert (stopped.status, stopped.step) == ("stopped", 13)
    assert run_train(config).status == "finished"
    weights, expected = (read_weights(find_checkpoint(run.out)) for run in (config, one_rank))
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)


def start(folder: Path, **sections) -> tuple[subprocess.Popen, RunConfig]:
    config = make_run(folder, schedule={"steps": 100_000}, checkpoint={"every": 3}, **sections)
    save_run(config, folder / "run.yaml")
    code = (
        "import json, sys; from pipelines.launch import train_on_ranks; "
        "print(json.dumps(train_on_ranks(sys.argv[1], {}, 2).to_dict()))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "run.yaml")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list_checkpoints(config.out):
        assert process.poll() is None, process.stderr.read()[-3000:]
        time.sleep(0.2)
    return process, config


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return sorted(
        (child for child in children if "pipelines.launch" in " ".join(child.cmdline())),
        key=lambda child: int(child.environ()["RANK"]),
    )


def test_dead_rank_ends_the_others_within_a_minute_and_is_named(tmp_path):
    process, config = start(tmp_path, parallel={"context_ranks": 2})
    ranks = ranks_of(process)
    assert len(ranks) == 2
    ranks[1].kill()
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert process.returncode != 0
    assert "rank 1" in err
    assert "SIGKILL" in err
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    step = read_state(find_checkpoint(config.out)).step
    resumed = train(config, 2, **{"checkpoint.stop_at": step + 3})
    assert (resumed.status, resumed.step) == ("stopped", step + 3)


def test_sigterm_to_the_launcher_saves_on_all_ranks(tmp_path):
    process, config = start(tmp_path)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err[-3000:]
    result = json.loads(out.strip().splitlines()[-1])
    assert result["status"] == "stopped"
    assert list_checkpoints(config.out)[-1] == result["step"]


def test_error_of_a_rank_is_said_in_a_line(tmp_path):
    config = make_run(tmp_path, parallel={"context_ranks": 3})
    with pytest.raises(LaunchError, match=r"rank \d .* failed with exit code 1"):
        train(config, 2)


def test_launcher_inside_a_launcher_is_refused(tmp_path, monkeypatch):
    config = make_run(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="leave --nproc-per-node out"):
        train(config, 2)
