"""One evaluation: options in, report out. Interleaved, resumable, streamed to disk."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from drafter.checkpoint import load_drafter
from eval.block_drafter import BlockDrafter, read_config, without_dflash2
from eval.decode import Drafter, Limits
from eval.errors import EvalError
from eval.lookup import LookupDrafter
from eval.measure import TIE_BOUNDS, Bench, measure
from eval.prepack import can_prepack, prepack_linears
from eval.prompts import Prompt, load_prompts
from eval.report import build_report, read_report, write_report
from eval.responses import PLAIN, Response, ResponseFile, failed
from eval.sampling import Sampling
from eval.target import Target
from pipelines.target import config_fingerprint, load_tokenizer, resolve_target, tokenizer_fingerprint

log = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 10.0
_WARM_UP_TOKENS = 8
_DEFAULT_BLOCK = 8


class EvalOptions(BaseModel):
    """What to evaluate and how."""

    model_config = ConfigDict(extra="forbid")

    target: str = Field(description="Target checkpoint directory or hub id")
    drafter: list[str] = Field(
        default=[], description="Drafter directories, each optionally as NAME=DIRECTORY"
    )
    data: list[str] = Field(
        default=["builtin"],
        description="builtin, humaneval, stdlib, hub:ID[@split] or JSONL files, each optionally as NAME=FILE",
    )
    limit: int | None = Field(
        default=None, ge=1, description="Prompts per data set, spread over its categories"
    )
    max_new_tokens: int = Field(default=256, ge=2, description="Longest response, in tokens")
    temperature: float = Field(default=0.0, ge=0.0, description="0 decodes greedily")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Of the target; drafters never apply it")
    top_k: int = Field(default=0, ge=0, description="Of the target; 0 keeps all tokens")
    block: int | None = Field(
        default=None,
        ge=2,
        description="Rows of a block, anchor included; default: as each drafter was trained",
    )
    baseline: list[Literal["lookup", "v1", "none"]] = Field(
        default=["lookup"],
        description="lookup: n-gram prompt lookup; v1: each drafter without convolutions and selector; none: "
        "only plain decoding and the drafters",
    )
    repeats: int = Field(default=1, ge=1, description="Timed runs of every method on every prompt")
    seed: int = Field(default=0, description="Of prompt choice, sampling and resampling")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Of all weights")
    device: str = Field(default="auto", description="auto, cpu or cuda")
    attention: str = Field(default="folded", description="folded, or an attn_implementation of transformers")
    prepack: bool = Field(
        default=True, description="Keep packed copies of the weights for few-row steps on a CPU"
    )
    template_args: dict[str, Any] = Field(default={}, description="Arguments of the target's chat template")
    stop: bool = Field(default=True, description="End responses at the target's stop tokens")
    out: Path = Field(default=Path("runs/eval"), description="Folder of responses, report and plots")

    @field_validator("baseline")
    @classmethod
    def _none_stands_alone(cls, baseline: list[str]) -> list[str]:
        if "none" in baseline and len(baseline) > 1:
            raise ValueError(
                f"`none` beside other baselines ({', '.join(baseline)}): give `none` or the others"
            )
        return [name for name in baseline if name != "none"]

    def torch_device(self) -> torch.device:
        """The device that `device` names."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


def run_eval(options: EvalOptions) -> dict[str, Any]:
    """Decode all prompts with all methods, then write and return the report.

    An evaluation that was killed continues where it stopped when it is started again with the same options;
    one that is finished returns its report as it is. A prompt that fails is recorded, reported and tried
    again by the next run; the others keep their results.

    Raises:
        EvalError: options that cannot be evaluated, or not one prompt that could be decoded.
        TargetError, ConfigError, CheckpointError: a checkpoint that cannot be read.
    """
    started = time.time()
    checkpoint = resolve_target(options.target)
    loaded = [
        p for source in options.data for p in load_prompts(source, limit=options.limit, seed=options.seed)
    ]
    prompts = list({prompt.key: prompt for prompt in loaded}.values())
    asked = hashlib.sha256("".join(prompt.key for prompt in prompts).encode()).hexdigest()[:16]
    settings = _settings(options, checkpoint)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    options.out.mkdir(parents=True, exist_ok=True)
    file = ResponseFile(options.out / "responses.jsonl", digest)
    file.mend()
    done = file.read()
    missing = [(place, prompt) for place, prompt in enumerate(prompts) if prompt.key not in done]
    if len(missing) < len(prompts):
        log.info("%d of %d prompts are already in %s", len(prompts) - len(missing), len(prompts), file.path)
    if not missing:
        report = read_report(options.out)
        if report is not None and (report["settings"]["hash"], report["run"].get("asked")) == (digest, asked):
            return report
    else:
        bench = _set_up(options, checkpoint)
        _warm_up(bench, missing[0][1])
        for response in _measure_all(bench, missing):
            file.append(response)
            done[response.key] = response

    responses = [done[prompt.key] for prompt in prompts]
    decoded = [response for response in responses if response.error is None]
    if not decoded:
        raise EvalError(f"none of {len(responses)} prompts could be decoded; the first: {responses[0].error}")
    report = build_report(
        decoded,
        [response for response in responses if response.error is not None],
        methods=[PLAIN, *settings["methods"]],
        seed=options.seed,
        greedy=options.temperature <= 0,
        tie_bound=TIE_BOUNDS[getattr(torch, options.dtype)],
    )
    report["settings"] = {"hash": digest, **settings}
    report["run"] = {
        "command": sys.argv,
        "out": str(options.out),
        "asked": asked,
        "started": started,
        "seconds": time.time() - started,
        **_machine(options),
    }
    write_report(report, options.out)
    return report


def _blocks(options: EvalOptions) -> dict[str, int]:
    """Every speculative method, in the order to show them, and the rows of its block.

    Raises:
        EvalError: no method, or two of one name.
    """
    blocks: list[tuple[str, int]] = []
    if "lookup" in options.baseline:
        blocks.append(("lookup", options.block or _DEFAULT_BLOCK))
    for given in options.drafter:
        name, folder = _named(given)
        config = read_config(folder)
        block = options.block or config.block_size
        blocks.append((name, block))
        if "v1" in options.baseline and config.version == 2:
            blocks.append((f"{name} as v1", block))
    names = [PLAIN, *(name for name, _ in blocks)]
    if len(names) == 1:
        raise EvalError("nothing to compare with plain decoding: give a drafter or the baseline `lookup`")
    if len(set(names)) < len(names):
        raise EvalError(f"two methods share a name among {', '.join(names)}; give drafters as NAME=DIRECTORY")
    return dict(blocks)


def _named(given: str) -> tuple[str, Path]:
    """Split NAME=DIRECTORY; a directory alone is named by its last part."""
    name, _, place = given.rpartition("=")
    return name or Path(place).name, Path(place)


def _set_up(options: EvalOptions, checkpoint: Path) -> Bench:
    device, dtype = options.torch_device(), getattr(torch, options.dtype)
    tokenizer = load_tokenizer(checkpoint)
    target = Target.load(
        checkpoint, dtype=dtype, device=device, attention=options.attention, prepack=options.prepack
    )
    head = target.frozen_head
    blocks = _blocks(options)
    drafters: list[Drafter] = []
    if "lookup" in options.baseline:
        drafters.append(LookupDrafter(blocks["lookup"]))
    for given in options.drafter:
        name, folder = _named(given)
        model = load_drafter(folder, dtype).to(device)
        models = [(name, model)]
        if "v1" in options.baseline and model.config.version == 2:
            models.append((f"{name} as v1", without_dflash2(model)))
        for label, each in models:
            if options.prepack and can_prepack(device, dtype):
                prepack_linears(each)
            drafters.append(BlockDrafter(each, head, name=label, block=blocks[label]))
    return Bench(
        target=target,
        tokenizer=tokenizer,
        drafters=drafters,
        limits=Limits(options.max_new_tokens, target.stop_ids(tokenizer) if options.stop else frozenset()),
        sampling=Sampling(options.temperature, options.top_p, options.top_k),
        template_args=options.template_args,
        seed=options.seed,
        repeats=options.repeats,
        tie_bound=TIE_BOUNDS[dtype],
    )


def _settings(options: EvalOptions, checkpoint: Path) -> dict[str, Any]:
    """Everything that a response depends on; not which prompts are asked nor where results go."""
    kept = options.model_dump(mode="json", exclude={"data", "limit", "out", "target", "drafter", "device"})
    blocks = _blocks(options)
    return {
        **kept,
        "target": {
            "name": options.target,
            "config": config_fingerprint(checkpoint),
            "tokenizer": tokenizer_fingerprint(checkpoint),
            "weights": _weights_hash(checkpoint),
        },
        "drafters": {given: _weights_hash(_named(given)[1]) for given in options.drafter},
        "methods": {name: {"block": block} for name, block in blocks.items()},
        "device": options.torch_device().type,
        "threads": torch.get_num_threads(),
    }


def _weights_hash(directory: Path) -> str:
    """Hash of both configs, and of names, sizes and end megabytes of the weights: cheap at any size."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    generation = directory / "generation_config.json"  # names the stop tokens
    digest.update(generation.read_bytes() if generation.is_file() else b"")
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _warm_up(bench: Bench, prompt: Prompt) -> None:
    """A few untimed tokens of every method, so that the first prompt does not pay for the machine's start."""
    short = Bench(**{**vars(bench), "limits": Limits(_WARM_UP_TOKENS), "repeats": 1})
    try:
        measure(short, prompt, 0)
    except Exception:
        # The measured run reports what is wrong with this prompt.
        log.debug("warm-up failed", exc_info=True)


def _measure_all(bench: Bench, prompts: Sequence[tuple[int, Prompt]]) -> Iterator[Response]:
    with _progress(len(prompts)) as advance:
        for place, prompt in prompts:
            try:
                response = measure(bench, prompt, place)
            except Exception as error:  # noqa: BLE001 one bad prompt must not lose the finished ones
                log.warning("%s failed: %s", prompt.id, error)
                response = failed(prompt, error)
            yield response
            advance(prompt.id)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar with ETA on a terminal's stderr, a log line now and then elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task("prompts", total=total)
            yield lambda label: progress.update(task, advance=1, description=label[-30:])
        return
    started = last = time.monotonic()
    count = 0

    def advance(label: str) -> None:
        nonlocal last, count
        count += 1
        now = time.monotonic()
        if now - last >= _LOG_EVERY_SECONDS or count == total:
            last = now
            left = (now - started) / count * (total - count)
            log.info("%d of %d prompts (%s), about %.0f s left", count, total, label, left)

    yield advance


def _machine(options: EvalOptions) -> dict[str, Any]:
    import platform
    from importlib.metadata import version

    device = options.torch_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "hardware": {"device": device.type, "name": name, "threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "transformers", "numpy")},
        },
    }


def _cpu_name() -> str:
    import platform

    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
