"""Ranks started by the command itself: a dead rank, a stop signal, an error, and the planner's choice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipelines.launch import LOST_PEER, _failure
from pipelines.runfile import RunConfig, save_run
from pipelines.training_state import find_checkpoint, list_checkpoints, read_state
from tests.pipelines.tiny_run import make_run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.ranks


def start(config: RunConfig, *flags: str) -> subprocess.Popen:
    path = config.out.with_suffix(".yaml")
    save_run(config, path)
    return subprocess.Popen(
        [sys.executable, "cli.py", "train", str(path), "--nproc-per-node", "2", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def endless(folder: Path, **sections) -> RunConfig:
    return make_run(folder, schedule={"steps": 100_000}, checkpoint={"every": 3}, **sections)


def wait_for_checkpoint(process: subprocess.Popen, config: RunConfig) -> None:
    while not list_checkpoints(config.out):
        assert process.poll() is None, process.stderr.read()[-3000:]
        time.sleep(0.1)


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return sorted(
        (child for child in children if "pipelines.launch" in " ".join(child.cmdline())),
        key=lambda child: int(child.environ()["RANK"]),
    )


def test_dead_rank_ends_the_others_within_a_minute_and_is_named(tmp_path):
    config = endless(tmp_path, parallel={"context_ranks": 2})
    process = start(config)
    wait_for_checkpoint(process, config)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    ranks[1].kill()
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert process.returncode == 1
    assert "rank 1" in err
    assert "SIGKILL" in err
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    # the same command goes on, with the choice of context ranks left to the planner
    step = read_state(find_checkpoint(config.out)).step
    flags = ["--context-ranks", "auto", "--checkpoint.stop_at", str(step + 3)]
    again = start(config, *flags, "--json", str(tmp_path / "result.json"))
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"]) == ("stopped", step + 3)
    assert json.loads((config.out / "facts.json").read_text())["context_ranks"] == 1


def test_sigterm_to_the_command_saves_on_all_ranks(tmp_path):
    config = endless(tmp_path)
    process = start(config, "--json", str(tmp_path / "result.json"))
    wait_for_checkpoint(process, config)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "stopped"
    assert list_checkpoints(config.out)[-1] == result["step"]


def test_ranks_whose_launcher_was_killed_save_and_end(tmp_path):
    """Nobody watches them any more, and the next call of the command would write to the same folder."""
    config = endless(tmp_path)
    process = start(config)
    wait_for_checkpoint(process, config)
    ranks = ranks_of(process)
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    _, err = process.communicate()
    assert "stopped by the end of its launcher" in err
    said = int(err.split("after step ")[1].split(";")[0])
    assert list_checkpoints(config.out)[-1] == said


def test_error_of_a_rank_is_said_in_a_line(tmp_path):
    process = start(make_run(tmp_path, parallel={"context_ranks": 3}))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "TopologyError: context_ranks must divide the world of 2 ranks, found 3" in err
    assert "failed with exit code 1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("consequence", [LOST_PEER, -signal.SIGTERM])
@pytest.mark.parametrize("cause", [-signal.SIGKILL, 1])
def test_the_rank_that_ended_first_is_named_though_both_are_seen_in_the_same_second(cause, consequence):
    ends = {
        0: SimpleNamespace(exitcode=consequence, pid=10, timestamp=5),
        1: SimpleNamespace(exitcode=cause, pid=11, timestamp=5),
    }
    said = _failure(SimpleNamespace(failures=ends), Path("run"))
    assert said.startswith("rank 1 (process 11) ")
    assert ("was killed by SIGKILL" if cause < 0 else "failed with exit code 1") in said
