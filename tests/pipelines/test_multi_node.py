"""Two launchers on this machine stand for two nodes: the same run as on one, and a node that dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from pipelines.logs import read_metrics
from pipelines.runfile import RunConfig, save_run
from pipelines.trainer import run_train
from pipelines.training_state import find_checkpoint, list_checkpoints, read_weights
from tests.pipelines.tiny_run import make_run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.ranks
SECTIONS = {"drafter": {"layers": 2, "layer_types": ["sliding_attention", "full_attention"]}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(arguments: list[str]) -> subprocess.Popen:
    """A launcher in a process group of its own, as on a node of its own."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def torchrun(config: RunConfig, node: int, port: int, *flags: str) -> subprocess.Popen:
    """Node `node` of two, with one rank."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return start([sys.executable, *launcher, "cli.py", "train", str(run_file(config)), *flags])


def deepspeed(config: RunConfig, node: int, port: int, *flags: str) -> subprocess.Popen:
    """The same without ssh: every node starts its own launcher."""
    hosts = config.out.parent / "hostfile"
    hosts.write_text("first slots=1\nsecond slots=1\n")
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(hosts), "--no_ssh"]
    launcher += ["--node_rank", str(node), "--master_addr", "127.0.0.1", "--master_port", str(port)]
    return start([*launcher, "--no_local_rank", "cli.py", "train", str(run_file(config)), *flags])


LAUNCHERS = {"torchrun": torchrun, "deepspeed": deepspeed}


def run_file(config: RunConfig) -> Path:
    path = config.out.with_suffix(".yaml")
    save_run(config, path)
    return path


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    config = make_run(tmp_path_factory.mktemp("one"), **SECTIONS)
    run_train(config)
    return config


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_two_nodes_train_what_one_rank_trains(one_rank, launcher):
    if launcher == "deepspeed" and shutil.which("deepspeed", path=Path(sys.executable).parent) is None:
        pytest.skip("DeepSpeed's launcher is not installed beside this Python")
    folder = one_rank.out.parent
    config = make_run(folder, out=folder / launcher, parallel={"context_ranks": 2, "zero": 1}, **SECTIONS)
    port, result = free_port(), folder / f"{launcher}.json"
    nodes = [LAUNCHERS[launcher](config, node, port, "--json", str(result)) for node in (0, 1)]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)[-5000:]
    assert json.loads(result.read_text())["status"] == "finished"
    assert "training finished" in said[0]
    assert "training finished" not in said[1]  # one rank speaks
    assert json.loads((config.out / "facts.json").read_text())["ranks"] == 2
    ours, alone = (read_metrics(run.out / "metrics.jsonl") for run in (config, one_rank))
    for a, b in zip(ours, alone, strict=True):
        name = "loss" if a["kind"] == "train" else "ce"
        assert a[name] == pytest.approx(b[name], rel=1e-5)
    weights, expected = (read_weights(find_checkpoint(run.out)) for run in (config, one_rank))
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("dies", ["a rank of the second node", "the first node"])
def test_node_that_dies_ends_the_other_within_a_minute(tmp_path, dies):
    config = make_run(
        tmp_path,
        schedule={"steps": 100_000},
        checkpoint={"every": 3},
        parallel={"context_ranks": 2},
        **SECTIONS,
    )
    port = free_port()
    nodes = [torchrun(config, node, port) for node in (0, 1)]
    try:
        while not list_checkpoints(config.out):
            assert all(node.poll() is None for node in nodes), nodes[0].communicate()[0][-3000:]
            time.sleep(0.1)
        dead, other = nodes if dies == "the first node" else reversed(nodes)
        (rank,) = psutil.Process(dead.pid).children()
        if dies == "the first node":
            dead.kill()
        rank.kill()
        began = time.monotonic()
        said, _ = other.communicate(timeout=60)
        assert time.monotonic() - began < 60
        assert other.returncode not in (0, None)
        assert "lost a peer" in said
        assert dead.wait(timeout=60) != 0
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
