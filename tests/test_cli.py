"""The command line: help, flags from options models, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from pipelines.command_line import UsageError, with_flags

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "capture", "train", "eval", "replay", "target", "prompts", "inspect", "export", "check", "plan",
    "summary", "doctor", "bench device", "bench memory", "bench exactness", "bench csbp",
    "bench long", "bench store",
)  # fmt: skip


def run(*arguments):
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *arguments],
        capture_output=True, text=True, env=environment, check=False, timeout=300,
    )  # fmt: skip


class Options(BaseModel):
    place: Path = Field(description="By place.")
    names: list[str] = Field(default=[], description="Repeated.")
    count: int = Field(default=3, ge=1, description="A number.")
    kind: Literal["a", "b"] = Field(default="a", description="A choice.")
    ranks: int | Literal["auto"] = Field(default=1, description="Mixed: stays text until validated.")
    fast: bool = Field(default=True, description="A switch.")
    limit: float | None = Field(default=None, description="Optional.")
    extras: dict[str, bool] = Field(default={}, description="KEY=VALUE, repeated.")


def call(*arguments):
    seen = []

    def job(options, note: Annotated[str | None, typer.Option("--note")] = None):
        seen.append((options, note))

    app = typer.Typer()
    app.command()(with_flags(job, Options, ("place",)))
    result = CliRunner().invoke(app, arguments)
    return seen[0] if seen else None, result


def test_flags_carry_names_types_and_defaults_of_the_model():
    (options, note), _ = call(
        "here", "--names", "x", "--names", "y", "--ranks", "auto", "--no-fast", "--note", "hi",
        "--extras", "thinking=false", "--extras", "tools=true",
    )  # fmt: skip
    table = {"thinking": False, "tools": True}
    assert options == Options(place=Path("here"), names=["x", "y"], ranks="auto", fast=False, extras=table)
    assert note == "hi"


def test_values_that_are_not_given_take_the_defaults_of_the_model():
    (options, note), _ = call("here")
    assert options == Options(place=Path("here"))
    assert note is None


def test_a_value_outside_its_range_names_its_flag():
    _, result = call("here", "--count", "0")
    assert isinstance(result.exception, UsageError)
    assert "--count" in str(result.exception)
    assert "found 0" in str(result.exception)


def test_a_table_needs_pairs():
    _, result = call("here", "--extras", "thinking")
    assert "expected KEY=VALUE, found 'thinking'" in str(result.exception)


def test_help_shows_the_descriptions_of_the_model():
    _, result = call("--help")
    assert "Mixed: stays text" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command):
    result = run(*command.split(), "--help")
    assert result.returncode == 0, result.stderr
    assert f"python cli.py {command}" in " ".join(result.stdout.split())


def test_wrong_use_exits_2_and_failure_exits_1(tmp_path):
    assert run("plan", "--target", "qwen3.8-27b-dflash2", "--context", "1").returncode == 2
    assert run("train", str(tmp_path / "missing.yaml")).returncode == 2
    assert run("inspect", str(tmp_path)).returncode == 2
    failed = run("summary", str(tmp_path))
    assert failed.returncode == 1
    assert "make demo" in failed.stderr


def test_doctor_reports_as_json(tmp_path):
    result = run("doctor", "--json", str(tmp_path / "doctor.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads((tmp_path / "doctor.json").read_text())
    assert figures["versions"]["torch"]
    assert figures["problems"] == []
