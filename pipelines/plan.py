"""`plan`: can a drafter be trained at this context on these GPUs, with how many context ranks, how fast."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Group
from rich.table import Table

from csbp.choice import Placement
from csbp.cost import AnchorRule, DrafterShape, Workload
from csbp.device import PRESETS, DeviceConstants, device_constants
from csbp.footprint import Recompute, StepSettings
from csbp.planner import GIB, HEADROOM, Candidate, Plan, PlanError, Question, choose_context_ranks, make_plan
from csbp.routes import Transport
from drafter.config import FULL, SLIDING, DrafterConfig

SHAPES = Path(__file__).parent / "shapes"
BYTES = {"fp32": 4, "bf16": 2, "float32": 4, "bfloat16": 2, "float16": 2}


class PlanOptions(BaseModel):
    """What to plan for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(
        description="A drafter's config.json, a target's config.json or folder (then the default drafter for "
        "it), or the name of a shipped shape."
    )
    context: int = Field(description="Tokens of a sequence.", ge=2)
    gpus: int = Field(8, ge=1, description="Ranks altogether.")
    gpu_memory: float | None = Field(
        None, gt=0, description="GiB of one GPU; by default what the device has."
    )
    device: str = Field(
        "h100-80gb",
        description=f"{', '.join(PRESETS)}, or a .json file that `bench device --out` wrote.",
    )
    anchors: int = Field(512, ge=1, description="Blocks drawn from one sequence.")
    anchor_rule: AnchorRule = Field(
        "uniform",
        description="`uniform` draws anchors anywhere; `locality` in neighbourhoods, as published throughput "
        "figures did (in one).",
    )
    neighbourhoods: int = Field(1, ge=1, description="Of a sequence, under the locality rule.")
    sequences: int = Field(1, ge=1, description="Sequences that one replica takes at once.")
    block_size: int | None = Field(None, ge=2, description="Rows of a block; by default the drafter's.")
    layers: int | None = Field(None, ge=1, description="Draft layers; by default the drafter's.")
    window: int | None = Field(
        None,
        ge=0,
        description="Sliding window of every layer, 0 for full attention; by default the drafter's.",
    )
    full_layers: int = Field(
        0, ge=0, description="Of the layers, how many (the last ones) get full attention."
    )
    taps: int | None = Field(None, ge=1, description="Target layers that are read; by default the drafter's.")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="Compute dtype of matrix products.")
    feature_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Dtype of stored features."
    )
    zero: Literal[0, 1, 2] = Field(1, description="DeepSpeed ZeRO stage.")
    vocabulary_sample: int = Field(0, ge=0, description="Tokens that the loss scores, 0 for all.")
    selector_fraction: float = Field(1.0, gt=0, le=1, description="Share of blocks that train the selector.")
    accumulate: bool = Field(False, description="An optimizer step has several micro-batches.")
    placement: Placement | Literal["auto"] = Field(
        "auto", description="How blocks and context rows are dealt out, as `parallel.placement` of a run."
    )
    transport: Transport | Literal["auto"] = Field(
        "auto", description="How context rows reach the blocks of every layer, as `parallel.transport`."
    )
    retain: int | None = Field(
        None, ge=1, description="Received shards that a ring keeps, as `parallel.retain`; by default all."
    )
    recompute: Recompute = Field(
        "none", description="What the backward pass makes again, as `parallel.recompute` of a run."
    )
    headroom: float = Field(HEADROOM, ge=0, lt=1, description="Share of the memory that stays free.")


@dataclass(frozen=True)
class PlanReport:
    """A plan with what it was made for."""

    options: PlanOptions
    question: Question
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        return {
            "options": self.options.model_dump(),
            "device": {
                "name": self.question.device.name,
                "source": self.question.device.source,
                "memory_gib": self.question.device.memory_bytes / GIB,
            },
            "parameters": self.question.shape.parameter_count,
            "chosen": self.plan.chosen.to_dict(),
            "candidates": [
                {**candidate.to_dict(), "verdict": verdict}
                for candidate, verdict in zip(self.plan.candidates, self.plan.verdicts, strict=True)
            ],
        }


def run_plan(options: PlanOptions) -> PlanReport:
    """Plan a training run.

    Raises:
        PlanError: nothing fits, or `target` names nothing.
        ShapeError: the anchors do not fit in the context.
        ConfigError: the config is no drafter's and no target's.
    """
    shape = _shape(options)
    device = device_constants(options.device)
    if options.gpu_memory is not None:
        device = device.with_memory(options.gpu_memory * GIB)
    question = Question(
        shape=shape,
        work=Workload(
            options.context,
            options.anchors,
            options.sequences,
            options.anchor_rule,
            options.neighbourhoods if options.anchor_rule == "locality" else 1,
        ),
        settings=StepSettings(
            compute_bytes=BYTES[options.precision],
            feature_bytes=BYTES[options.feature_dtype],
            zero_stage=options.zero,
            vocabulary_sample=options.vocabulary_sample,
            selector_fraction=options.selector_fraction,
            accumulate=options.accumulate,
            retain=options.retain,
            recompute_context=options.recompute in ("context", "all"),
            recompute_blocks=options.recompute in ("blocks", "all"),
            placement=options.placement,
            transports=(options.transport,),
        ),
        world=options.gpus,
        device=device,
        headroom=options.headroom,
    )
    return PlanReport(options, question, make_plan(question))


def drafter_shape(config: DrafterConfig, *, tied_head: bool = False) -> DrafterShape:
    """The sizes of a config that decide cost."""
    second = config.version == 2
    return DrafterShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        vocabulary=config.vocab_size,
        feature_width=config.feature_width,
        block_size=config.block_size,
        masks=config.layer_masks,
        conv_kernel=config.conv_kernel_size if second else 0,
        conv_group=config.conv_group_size,
        selector_rank=config.selector_rank if second else 0,
        selector_top_k=config.selector_top_k if second else 0,
        attention_bias=config.attention_bias,
        tied_head=tied_head,
        low_rank_selector=config.selector_parametrisation == "low_rank",
    )


def auto_context_ranks(
    shape: DrafterShape, work: Workload, settings: StepSettings, world: int, device: DeviceConstants
) -> int:
    """P for `parallel.context_ranks: auto`.

    Args:
        shape: of the drafter that is trained.
        work: the largest micro-step of one replica.
        settings: of the step.
        world: N ranks.
        device: of a rank, from `this_device`.

    Raises:
        PlanError: no P fits.
    """
    return choose_context_ranks(Question(shape, work, settings, world, device))


def this_device(ranks: int, rates: str = "auto") -> DeviceConstants:
    """Memory of this machine's device for each of its ranks, and rates.

    Args:
        ranks: of this machine, which share its memory if there is no GPU.
        rates: a preset or file as for `plan --device`; `auto` takes the preset that is nearest.
    """
    if not torch.cuda.is_available():
        memory, near = psutil.virtual_memory().available / ranks, "cpu"
    else:
        memory = float(torch.cuda.mem_get_info()[1])
        near = "h200" if "H200" in torch.cuda.get_device_name() else "h100-80gb"
    return device_constants(near if rates == "auto" else rates).with_memory(memory)


def named_shape(target: str) -> DrafterShape:
    """The drafter that a config, a target or a shipped name stands for. Errors as in `run_plan`."""
    config, tied = _named_config(target)
    return drafter_shape(config, tied_head=tied)


def _shape(options: PlanOptions) -> DrafterShape:
    config, tied = _named_config(options.target)
    changed = DrafterConfig.from_dict(_overridden(config.to_dict(), options))
    return drafter_shape(changed, tied_head=tied)


def _named_config(target: str) -> tuple[DrafterConfig, bool]:
    """The drafter's config, and whether the target is known to tie its head to its embedding."""
    content = _read_config(target)
    if "dflash_config" in content or "speculators_model_type" in content:
        return DrafterConfig.from_dict(content), False
    text = content.get("text_config") or content
    if "vocab_size" not in text:
        raise PlanError(
            f"--target {target}: its config.json has neither a dflash_config nor a target's vocab_size"
        )
    tied = bool(text.get("tie_word_embeddings", content.get("tie_word_embeddings", False)))
    return DrafterConfig.for_target(content, mask_token_id=int(text["vocab_size"]) - 1), tied


def _read_config(target: str) -> dict[str, Any]:
    path = Path(target)
    if path.is_dir():
        path /= "config.json"
    shipped = SHAPES / f"{target}.json"
    if not path.is_file() and shipped.is_file():
        path = shipped
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
        raise PlanError(
            f"--target {target} is no file, no folder with a config.json and no shipped shape; give the path "
            f"of a drafter's or a target's config.json, or one of: {names}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is not JSON ({error}); expected a config.json") from error
    if not isinstance(content, dict):
        raise PlanError(f"{path} holds a {type(content).__name__}; expected the object of a config.json")
    return content


def _overridden(config: dict[str, Any], options: PlanOptions) -> dict[str, Any]:
    """The drafter's config with the options that change its shape."""
    draft = dict(config["dflash_config"])
    layers = options.layers or config["num_hidden_layers"]
    types = (config["layer_types"] * layers)[:layers] if options.layers else list(config["layer_types"])
    if options.window is not None:
        types = [SLIDING if options.window else FULL] * layers
        config = {
            **config,
            "sliding_window": options.window or None,
            "use_sliding_window": bool(options.window),
        }
    if options.full_layers:
        types[max(0, layers - options.full_layers) :] = [FULL] * min(options.full_layers, layers)
    if options.taps is not None:
        draft["target_layer_ids"] = list(range(1, options.taps + 1))
    if options.block_size is not None:
        config, draft["block_size"] = {**config, "block_size": options.block_size}, options.block_size
    return {**config, "num_hidden_layers": layers, "layer_types": types, "dflash_config": draft}


def render_plan(report: PlanReport) -> Group:
    """For the terminal: a row and a verdict per P, then memory and time by part, then what was assumed."""
    plan, question, work = report.plan, report.question, report.question.work
    title = (
        f"{question.shape.parameter_count:,} parameters, {work.sequences} x {work.context:,} tokens, "
        f"{work.anchors:,} {work.anchor_rule} anchors of {question.shape.block_size}, {question.world} ranks "
        f"of {question.device.memory_bytes / GIB:.1f} GiB"
    )
    overview = Table(title=title, padding=(0, 0, 0, 1))
    for column in (
        "P",
        "replicas",
        "rows read",
        "peak GiB",
        "step s",
        "sent MiB",
        "tok/s group",
        "tok/s all",
    ):
        overview.add_column(column, justify="right")
    for candidate in plan.candidates:
        style = "bold" if candidate is plan.chosen else None if candidate.fits else "dim"
        overview.add_row(*_cells(candidate), style=style)
    verdicts = [
        f"P = {candidate.context_ranks}: {verdict} ({_route(candidate)})"
        for candidate, verdict in zip(plan.candidates, plan.verdicts, strict=True)
    ]
    return Group(overview, *verdicts, _memory_table(plan), _time_table(plan), *_notes(report))


def _cells(candidate: Candidate) -> list[str]:
    return [
        str(candidate.context_ranks),
        str(candidate.replicas),
        f"{candidate.feature_rows:,.0f}",
        f"{candidate.peak_bytes / GIB:.1f}",
        f"{candidate.step_seconds:.3f}",
        f"{candidate.sent_bytes / 2**20:,.0f}",
        f"{candidate.group_rate:,.0f}",
        f"{candidate.fleet_rate:,.0f}",
    ]


def _route(candidate: Candidate) -> str:
    """Placement, and transports with their number of layers."""
    counts = {name: candidate.transports.count(name) for name in dict.fromkeys(candidate.transports)}
    layers = ", ".join(f"{name} x {count}" for name, count in counts.items())
    return layers if candidate.context_ranks == 1 else f"blocks {candidate.placement}, layers {layers}"


def _memory_table(plan: Plan) -> Table:
    table = Table(title="GiB of a rank at the peak of a step")
    table.add_column("part")
    for candidate in plan.candidates:
        table.add_column(f"P = {candidate.context_ranks}", justify="right")
    for part in dict.fromkeys(part for candidate in plan.candidates for part in candidate.peak):
        sizes = [candidate.peak.get(part, 0.0) / GIB for candidate in plan.candidates]
        if any(sizes):
            table.add_row(part, *(f"{size:.2f}" for size in sizes))
    table.add_row("moment", *(candidate.moment for candidate in plan.candidates))
    table.add_row("peak", *(f"{c.peak_bytes / GIB:.2f}" for c in plan.candidates), style="bold")
    return table


def _time_table(plan: Plan) -> Table:
    table = Table(title="Milliseconds of a step and the update after it")
    table.add_column("part")
    for candidate in plan.candidates:
        table.add_column(f"P = {candidate.context_ranks}", justify="right")
    for part in plan.chosen.time:
        table.add_row(part, *(f"{1000 * candidate.time[part]:.1f}" for candidate in plan.candidates))
    return table


def _notes(report: PlanReport) -> list[str]:
    chosen = report.plan.chosen
    alone = report.plan.candidates[-1]
    recompute = report.options.recompute
    again = "" if recompute == "none" else f" --parallel.recompute {recompute}"
    notes = [
        f"Chosen: P = {chosen.context_ranks}, {chosen.replicas} replica(s); train with "
        f"--parallel.context_ranks {chosen.context_ranks} --parallel.zero {report.options.zero}{again}.",
        f"Device: {report.question.device.source}.",
        "Times and memory are estimates from closed forms; docs/planning.md has the formulas.",
    ]
    if chosen is not alone:
        notes.insert(
            1,
            f"Of all {report.question.world} ranks: one sequence on all of them would give "
            f"{alone.fleet_rate:,.0f} tokens/s; {chosen.replicas} replicas give {chosen.fleet_rate:,.0f} "
            f"({chosen.fleet_rate / alone.fleet_rate:.2f}x).",
        )
    return notes
