"""`longdraft capture`: records -> token ids and masks -> the target -> a feature store.

Everything can be killed at any moment and called again: what is in the store stays, the rest is done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.table import Table

from csbp.rows import RowSet
from pipelines.capture_options import (
    CaptureError,
    CaptureOptions,
    choose_taps,
    length_limit,
    new_manifest,
    window_rule,
)
from pipelines.capture_run import CapturePass, PassFigures
from pipelines.capture_size import StoreSize, render_sizes, store_sizes
from pipelines.capture_tasks import Plan, Task, make_plan
from pipelines.chat import ChatRenderer
from pipelines.dialogue import Dialogue, eos_ids
from pipelines.engine import Engine, EngineError, Job, Sampling
from pipelines.engine_hf import HfEngine
from pipelines.engine_vllm import VllmEngine, refuse_target
from pipelines.files import write_text_atomically
from pipelines.parity import PARITY_TOKENS, compare_captured
from pipelines.records import Rejection, read_records
from pipelines.store import Manifest, StoreWriter
from pipelines.store_counts import store_bytes, store_counts
from pipelines.target import load_tokenizer, resolve_target

__all__ = ["CaptureError", "CaptureOptions", "CaptureResult", "render_capture", "run_capture"]

_BOUNDED_FROM = 16_384  # tokens; below, whole samples in pages cost little and prefix caching helps


@dataclass
class CaptureResult:
    """What a capture did and what the store holds now.

    Attributes:
        out: the store.
        counts: samples, tokens, supervised, rows of the store, and rejected records of this call.
        new_samples, new_rows, generated_tokens, seconds: of this call's pass.
        finished, repeated: records found complete, records equal to an earlier one.
        recaptured: damaged samples that were dropped first.
        rejected: reason -> records.
        bytes: size of the store on disk.
        sizes: what each way to store the rows of this call would take (`pipelines.capture_size`).
        parity: comparison of the first sample, {} if none was made.
        notes: what the user should know.
    """

    out: str
    counts: dict[str, int]
    new_samples: int = 0
    new_rows: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    finished: int = 0
    repeated: int = 0
    recaptured: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    sizes: list[dict[str, Any]] = field(default_factory=list)
    parity: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_capture(options: CaptureOptions) -> CaptureResult:
    """Capture, continue, or find that all is there.

    Raises:
        CaptureError: options that do not fit the target, a size over the budget, or no usable record at all.
        TargetError, DataSourceError: the target or the data cannot be read.
        StoreError: the store belongs to other settings, another process writes it, or the disk is full.
        EngineError: the engine cannot run the target or has failed.
        ParityError: the engine's rows are not the target's hidden states.
    """
    target = resolve_target(options.target)
    taps = choose_taps(options, target)
    limit = length_limit(options, target)
    if options.backend == "vllm":
        refuse_target(target)
    rule = window_rule(options)
    manifest = new_manifest(options, target, taps)
    first_run = not (options.out / "manifest.json").exists()
    with (
        StoreWriter(options.out, manifest, part_bytes=options.part_bytes, verify=options.verify) as writer,
        stopping(_engine(options, manifest, target, limit)) as engine,
    ):
        if first_run:
            engine.start()  # an engine that cannot take the target says so before the data are read
        renderer = _renderer(options, target)
        plan = make_plan(read_records(options.data, options.limit), renderer, writer.done, options, limit)
        _save_rejections(options.out, plan.rejections)
        if not plan.tasks and not plan.finished:
            raise CaptureError(_nothing_usable(plan.rejections))
        figures, sizes = PassFigures(), []
        if plan.tasks:
            sizes = store_sizes(plan, options, rule, manifest)
            _check_size(plan, sizes, options)
            engine.start()
            if isinstance(engine, VllmEngine) and options.parity and not writer.manifest.parity:
                _check_parity(engine, plan.tasks[0], renderer, writer, target)
            kept = rule if options.keep == "windows" else None
            figures = CapturePass(engine, writer, renderer, options, kept, limit).run(plan.tasks)
        rejections = [*plan.rejections, *figures.rejections]
        _save_rejections(options.out, rejections)
        writer.commit()
        counts = {**store_counts(options.out), "rejected": len(rejections)}
        if not counts["samples"]:
            raise CaptureError(_nothing_usable(rejections))
        writer.describe(counts=counts)
        return CaptureResult(
            out=str(options.out),
            counts=counts,
            new_samples=figures.samples,
            new_rows=figures.rows,
            generated_tokens=figures.generated_tokens,
            seconds=figures.seconds,
            finished=plan.finished,
            repeated=plan.repeated,
            recaptured=len(writer.dropped),
            rejected=dict(Counter(rejection.reason for rejection in rejections)),
            bytes=store_bytes(options.out),
            sizes=[size.to_dict() for size in sizes],
            parity=writer.manifest.parity,
            notes=_notes(engine),
        )


def render_capture(result: CaptureResult) -> Group:
    """Tables for the terminal."""
    counts = result.counts
    table = Table(title=f"capture in {result.out}", show_header=False, title_justify="left")
    table.add_row("samples", f"{counts['samples']:,} ({result.new_samples:,} new, {result.finished:,} found)")
    table.add_row("tokens", f"{counts['tokens']:,}, {counts['supervised']:,} supervised")
    table.add_row("rows stored", f"{counts['stored_rows']:,} of {counts['rows']:,}")
    if counts["last_rows"]:
        table.add_row("last hidden states", f"{counts['last_rows']:,}")
    table.add_row("size", f"{result.bytes / 2**30:.3f} GiB")
    if result.seconds:
        speed = f"{result.new_rows / result.seconds:,.0f} rows/s"
        if result.generated_tokens:
            speed += f", {result.generated_tokens / result.seconds:,.0f} generated tokens/s"
        table.add_row("pass", f"{result.seconds:.1f} s, {speed}")
    if result.parity:
        worst = max(result.parity["worst"].values())
        table.add_row("parity with transformers", f"{worst:.2e} relative over {result.parity['tokens']} rows")
    if result.repeated:
        table.add_row("repeated records", f"{result.repeated:,}")
    if result.recaptured:
        table.add_row("damaged samples captured again", f"{result.recaptured:,}")
    parts: list[Any] = [table]
    if result.rejected:
        rejected = Table(title=f"rejected: {counts['rejected']:,} (see rejected.jsonl)", title_justify="left")
        rejected.add_column("records", justify="right")
        rejected.add_column("reason")
        for reason, count in Counter(result.rejected).most_common(8):
            rejected.add_row(f"{count:,}", reason)
        parts.append(rejected)
    return Group(*parts, *result.notes)


@contextmanager
def stopping(engine: Engine) -> Iterator[Engine]:
    """Stop the engine however the body ends."""
    try:
        yield engine
    finally:
        engine.stop()


def _engine(options: CaptureOptions, manifest: Manifest, target: Path, limit: int) -> Engine:
    taps = manifest.target_layer_ids
    dtype = manifest.target_dtype  # resolved: vLLM's own "auto" turns a float32 checkpoint into bfloat16
    ends = _ends(load_tokenizer(target), target)
    if options.backend == "hf":
        return HfEngine(
            target,
            taps,
            last_hidden=options.last_hidden,
            dtype=dtype,
            eos_ids=ends,
            step_tokens=options.step_tokens,
        )
    bounded = options.hidden_cache == "bounded" or (options.hidden_cache == "auto" and limit > _BOUNDED_FROM)
    return VllmEngine(
        target,
        taps,
        spool=options.out / "staging" / "spool",
        log=options.out / "engine.log",
        dtype=dtype,
        feature_dtype=manifest.dtype,
        last_hidden=options.last_hidden,
        max_model_len=limit + 1,
        max_concurrent=options.max_concurrent,
        step_tokens=options.step_tokens,
        bounded=bounded,
        kv_cache_gib=options.kv_cache_gib,
        tensor_parallel=options.tensor_parallel,
        part_bytes=options.part_bytes,
        eos_ids=ends,
        seed=options.seed,
    )


def _renderer(options: CaptureOptions, target: Path) -> ChatRenderer:
    tokenizer = load_tokenizer(target)
    return ChatRenderer(tokenizer, _ends(tokenizer, target), options.template_variables())


def _ends(tokenizer: Any, target: Path) -> frozenset[int]:
    file = target / "generation_config.json"
    return eos_ids(tokenizer, json.loads(file.read_text()) if file.is_file() else {})


def _check_size(plan: Plan, sizes: list[StoreSize], options: CaptureOptions) -> None:
    """Say how large the store can become, whatever is chosen; refuse beyond the budget or beyond the disk.

    Raises:
        CaptureError: too large.
    """
    (chosen,) = (size for size in sizes if size.chosen)
    there, free = store_bytes(options.out), psutil.disk_usage(str(options.out)).free
    console = Console(stderr=True)
    console.print(render_sizes(sizes, at_most=options.regenerate))
    console.print(f"{len(plan.tasks):,} records to capture; {free / 2**30:.1f} GiB free", highlight=False)
    size = (
        f"{'at most ' * options.regenerate}{chosen.rows:,} rows x {chosen.row_bytes:,} bytes and what goes "
        f"with them, {chosen.bytes / 2**30:.2f} GiB,"
    )
    smaller = "use fewer records (--limit), fewer taps, --feature-dtype fp8 or --keep windows"
    if options.disk_budget is not None and there + chosen.bytes > options.disk_budget * 2**30:
        raise CaptureError(
            f"the store would need {size} besides the {there / 2**30:.2f} GiB that it has, more than "
            f"the budget of {options.disk_budget:g} GiB; {smaller}"
        )
    if not options.regenerate and chosen.bytes > free:
        raise CaptureError(
            f"the store would need {size} but {options.out} has {free / 2**30:.2f} GiB free; {smaller}, or "
            "another disk"
        )


def _check_parity(
    engine: Engine, task: Task, renderer: ChatRenderer, writer: StoreWriter, target: Path
) -> None:
    """Capture the beginning of the first sample with the engine and with transformers; compare.

    Raises:
        ParityError: they differ beyond rounding.
        EngineError: the engine gave no rows.
    """
    manifest = writer.manifest
    ids = task.given[0].token_ids.tolist() if task.given else Dialogue(task.record, renderer).next_prompt()
    ids = (ids or [])[:PARITY_TOKENS]
    rows = dict.fromkeys(manifest.formats, RowSet.of([(0, len(ids))]))
    engine.submit(Job("parity", ids, Sampling(), rows))
    (captured,) = engine.results()
    if captured.error:
        raise EngineError(f"the first sample gave no usable rows: {captured.error}")
    found = captured.read(manifest.formats)
    captured.discard()
    writer.describe(parity=compare_captured(found, manifest, ids, target).to_dict())


def _save_rejections(out: Path, rejections: list[Rejection]) -> None:
    lines = (json.dumps(asdict(rejection), ensure_ascii=False) for rejection in rejections)
    write_text_atomically(out / "rejected.jsonl", "".join(line + "\n" for line in lines))


def _nothing_usable(rejections: list[Rejection]) -> str:
    if not rejections:
        return "the data hold no record"
    reason, count = Counter(rejection.reason for rejection in rejections).most_common(1)[0]
    first = next(rejection for rejection in rejections if rejection.reason == reason)
    return (
        f"none of the {len(rejections)} records gives a sample with supervised tokens; {count} of "
        f"them, first {first.source}:{first.line}: {reason}"
    )


def _notes(engine: Engine) -> list[str]:
    if isinstance(engine, VllmEngine) and engine.bounded_refused:
        return [
            f"this vLLM has no bounded hidden-state cache ({engine.bounded_refused}); plain pages were used"
        ]
    return []
