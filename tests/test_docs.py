"""Every command of the README and the docs runs, in the order of the job, on small budgets."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (["python", "cli.py"], ["longdraft"])

# The job's own order: a command needs what the earlier ones made.
ORDER = [
    "doctor",
    "target",
    "prompts",
    "capture",
    "train",
    "inspect",
    "export",
    "replay",
    "eval",
    "bench",
    "plan",
]
# Flags that shrink a documented command to the budget of a test; what the flag says last wins.
SMALL = {
    "capture": ["--limit", "6", "--max-new-tokens", "24", "--kv-cache-gib", "1"],
    "train": [
        "--data.stores", "[runs/demo/store]", "--schedule.minutes=null", "--schedule.epochs=null",
        "--schedule.steps", "2", "--drafter.layers", "1", "--drafter.init_from=null", "--batch.samples", "2",
        "--batch.micro", "1", "--anchors.per_document", "4", "--validation.max_batches", "1",
        "--data.validation_fraction", "0.2", "--precision", "fp32",
    ],
    "eval": ["--limit", "1", "--max-new-tokens", "8"],
    "bench exactness": ["--only", "fewer"],
    "bench device": ["--rows", "8"],
}  # fmt: skip
# Commands that this test does not call, and where they are called.
ELSEWHERE = {
    "make demo": "the stages are the commands below",
    "make test": "it is this",
    "pip install": "the Makefile's install runs before any test",
    "PYTHONPATH=. python benchmarks/aot.py": "tests/benchmarks/test_aot.py",
    "torchrun": "tests/pipelines/test_multi_node.py",
    "python -m torch.distributed.run": "tests/pipelines/test_multi_node.py",
    "deepspeed": "tests/pipelines/test_multi_node.py",
}


def documented_commands():
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    found.append((page.name, words))
    return found


def command_of(words):
    """Arguments of this project's command line, or None for another program."""
    for program in PROGRAMS:
        if words[: len(program)] == program:
            return words[len(program) :]
    return None


def test_commands_of_other_programs_are_run_elsewhere():
    for page, words in documented_commands():
        if command_of(words) is None:
            line = " ".join(words)
            where = [place for start, place in ELSEWHERE.items() if line.startswith(start)]
            assert where, f"{page}: nothing runs `{line}`"
            assert not where[0].startswith("tests/") or (ROOT / where[0]).exists(), where


def test_every_documented_stage_has_its_place_in_the_order():
    stages = {command_of(words)[0] for _, words in documented_commands() if command_of(words)}
    assert stages <= {*ORDER, "summary"}


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_documented_commands_run(tmp_path):
    for name in ("cli.py", "recipes", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = {tuple(command_of(words)): page for page, words in documented_commands() if command_of(words)}
    runnable = sorted(
        (c for c in commands if c[0] in ORDER), key=lambda c: (ORDER.index(c[0]), list(commands).index(c))
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "OMP_NUM_THREADS": "2"}
    for number, command in enumerate(runnable):
        small = list(SMALL.get(command[0], ()))
        if command[0] == "train" and "--out" not in command:
            small += ["--out", "runs/demo/run" if "demo" in command[1] else f"runs/{number}"]
        if "--nproc-per-node" in command:
            small += ["--nproc-per-node", "2", "--batch.samples", "2"]
        done = subprocess.run(
            [sys.executable, str(ROOT / "cli.py"), *command, *small],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, f"{commands[command]}: {' '.join(command)}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs/demo/report/report.md").exists()


def test_the_demo_of_the_makefile_is_the_job_of_the_readme():
    recipe = (ROOT / "Makefile").read_text()
    for stage in ("target", "prompts", "capture", "train", "eval", "summary"):
        assert f"cli.py {stage}" in recipe
