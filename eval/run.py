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
from typing import Any

import torch
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
from eval.block_drafter import BlockDrafter, without_dflash2
from eval.concurrency import engine_figures
from eval.contexts import EDGES, parse_contexts
from eval.decode import Drafter, Limits
from eval.draft_length import AcceptanceModel, DraftLength, measure_costs
from eval.engine_runs import RunFile
from eval.errors import EvalError
from eval.lookup import LookupDrafter
from eval.measure import TIE_BOUNDS, Bench, measure
from eval.options import EvalOptions, adaptive_of, blocks_of, named
from eval.prepack import can_prepack, prepack_linears
from eval.prompts import Prompt, load_prompts
from eval.provenance import draft_caches, machine, settings_of
from eval.report import build_report, read_report, write_report
from eval.responses import PLAIN, Response, ResponseFile, failed
from eval.sampling import Sampling
from eval.target import Target, choose_attention
from eval.vllm_run import RUNS, EngineEvaluation
from pipelines.target import load_tokenizer, resolve_target

log = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 10.0
_WARM_UP_TOKENS = 8


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
    if options.attention == "auto":  # what was chosen is a setting of the report
        chosen = choose_attention(
            options.torch_device(), getattr(torch, options.dtype), batched=options.batch_size > 1
        )
        options = options.model_copy(update={"attention": chosen})
    loaded = [
        p for source in options.data for p in load_prompts(source, limit=options.limit, seed=options.seed)
    ]
    prompts = list({prompt.key: prompt for prompt in loaded}.values())
    edges = EDGES if options.contexts is None else parse_contexts(options.contexts)
    asked = hashlib.sha256(f"{edges} {[prompt.key for prompt in prompts]}".encode()).hexdigest()[:16]
    settings = settings_of(options, checkpoint)
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
        for response in _measured(options, checkpoint, missing, digest):
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
        edges=edges,
    )
    for name, cache in draft_caches(options, checkpoint).items():
        report["methods"][name]["draft_cache"] = cache
    if options.backend == "vllm":
        report |= engine_figures(RunFile(options.out / RUNS, digest), decoded, options)
    report["settings"] = {"hash": digest, **settings}
    report["run"] = {
        "command": sys.argv,
        "out": str(options.out),
        "asked": asked,
        "drafters": {name: str(folder) for name, folder in map(named, options.drafter)},
        "started": started,
        "seconds": time.time() - started,
        **machine(options),
    }
    write_report(report, options.out)
    return report


def _measured(
    options: EvalOptions, checkpoint: Path, missing: Sequence[tuple[int, Prompt]], digest: str
) -> Iterator[Response]:
    if options.backend == "vllm":
        yield from EngineEvaluation(options, checkpoint, digest).run([prompt for _, prompt in missing])
        return
    bench = _set_up(options, checkpoint)
    _warm_up(bench, missing[0][1])
    yield from _measure_all(bench, missing)


def _set_up(options: EvalOptions, checkpoint: Path) -> Bench:
    device, dtype = options.torch_device(), getattr(torch, options.dtype)
    tokenizer = load_tokenizer(checkpoint)
    target = Target.load(
        checkpoint, dtype=dtype, device=device, attention=options.attention, prepack=options.prepack
    )
    head = target.frozen_head
    blocks, adaptive = blocks_of(options), adaptive_of(options)
    drafters: list[Drafter] = []
    if "lookup" in options.baseline:
        drafters.append(LookupDrafter(blocks["lookup"]))
    for given in options.drafter:
        name, folder = named(given)
        model = load_drafter(folder, dtype).to(device)
        models = [(name, model)]
        if "v1" in options.baseline and model.config.version == 2:
            models.append((f"{name} as v1", without_dflash2(model)))
        for label, each in models:
            if options.prepack and can_prepack(device, dtype):
                prepack_linears(each)
            drafters.append(BlockDrafter(each, head, name=label, block=blocks[label]))
        if name in adaptive:
            block = blocks[name]
            length = DraftLength(AcceptanceModel.load(adaptive[name], block - 1))
            drafters.append(BlockDrafter(model, head, name=f"{name} adaptive", block=block, length=length))
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
        batch_size=options.batch_size,
    )


def _warm_up(bench: Bench, prompt: Prompt) -> None:
    """A few untimed tokens of every method, so that the first prompt does not pay for the machine's start."""
    short = Bench(**{**vars(bench), "limits": Limits(_WARM_UP_TOKENS), "repeats": 1})
    try:
        measure(short, [prompt], 0)
    except Exception:
        # The measured run reports what is wrong with this prompt.
        log.debug("warm-up failed", exc_info=True)
    for drafter in bench.drafters:
        if isinstance(drafter, BlockDrafter) and drafter.length is not None:
            costs = drafter.length.costs = measure_costs(bench.target, drafter)
            log.info(
                "%s: a draft takes %.1f ms, verifying 1 to %d rows %s ms",
                drafter.name,
                1000 * costs.draft,
                drafter.block,
                ", ".join(f"{1000 * seconds:.1f}" for seconds in costs.verify),
            )


def _measure_all(bench: Bench, prompts: Sequence[tuple[int, Prompt]]) -> Iterator[Response]:
    with _progress(len(prompts)) as advance:
        for start in range(0, len(prompts), bench.batch_size):
            places, group = zip(*prompts[start : start + bench.batch_size], strict=True)
            try:
                responses = measure(bench, group, places[0])
            except Exception as error:  # noqa: BLE001 one bad prompt must not lose the finished ones
                responses = [failed(prompt, error) for prompt in group]
            for prompt, response in zip(group, responses, strict=True):
                if response.error is not None:
                    log.warning("%s failed: %s", prompt.id, response.error)
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
