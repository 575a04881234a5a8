"""Acceptance length on captured responses, without the target: exact for greedy responses, and cheap.

A greedy response is known before it is drafted, so speculative decoding can be replayed over it. All of its
anchors are drafted at once from the stored features, then the walk from anchor to anchor counts the steps
that decoding would have taken. What decoding adds is time: this has no speed-up.

Shape legend: A anchors, K drafts, T context rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from csbp.layout import BlockLayout
from csbp.plan import plan_step
from csbp.topology import Grid
from drafter.checkpoint import load_drafter
from drafter.context import Features
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.proposal import propose
from eval.decode import Step
from eval.draft_length import AcceptanceModel
from eval.errors import EvalError
from eval.metrics import acceptance_at, acceptance_length, buckets_present, in_bucket
from eval.statistics import compare, estimate
from pipelines.rejected import write_rejected
from pipelines.store import FeatureStore, Sample
from pipelines.target import resolve_target

ANCHORS_AT_ONCE = 256

#: Of some anchors: scores of their drafts [A, K, 2], drafts accepted [A], drafts that can be judged [A].
Evidence = list[tuple[Tensor, Tensor, Tensor]]


class ReplayOptions(BaseModel):
    """What to replay."""

    model_config = ConfigDict(extra="forbid")

    store: list[Path] = Field(description="Feature stores with greedy responses of the target.")
    drafter: list[str] = Field(description="Drafter directories, each optionally as NAME=DIRECTORY.")
    target: str | None = Field(None, description="Target checkpoint; by default the one the store names.")
    limit: int | None = Field(None, ge=1, description="Samples of each store, chosen by their ids.")
    block: int | None = Field(
        None, ge=2, description="Rows of a block, anchor included; default: as each drafter was trained."
    )
    adaptive: Path | None = Field(
        None, description="Also fit, for one drafter, how likely each draft is accepted: a file for `eval`."
    )
    rejected: Path | None = Field(
        None,
        description="Also write, for one drafter, the anchors at which not all drafts were accepted: a file "
        "for `train` with anchors.rule rejected.",
    )
    seed: int = Field(0, description="Of the resampling.")


@dataclass(frozen=True)
class _Method:
    name: str
    model: Drafter
    head: FrozenHead
    block: int


def run_replay(options: ReplayOptions) -> dict[str, Any]:
    """Acceptance length by drafter, draft position and context, with intervals over samples, and paired
    differences.

    Raises:
        EvalError: a drafter that does not fit a store, a block longer than trained, no supervised token.
        StoreError, TargetError, CheckpointError: something that cannot be read.
    """
    stores = [FeatureStore.open(path) for path in options.store]
    target = resolve_target(options.target or stores[0].manifest.target)
    methods = [_method(text, options.block, FrozenHead.from_checkpoint(target)) for text in options.drafter]
    for method in methods:
        for store in stores:
            _check_fit(method, store)
    places = [(store, index) for store in stores for index in _chosen(store, options.limit)]
    for name, file in (("adaptive", options.adaptive), ("rejected", options.rejected)):
        if file is not None and len(methods) > 1:
            raise EvalError(f"--{name} is for one drafter, found {len(methods)}")
    evidence: Evidence | None = None if options.adaptive is None else []
    steps: dict[str, dict[str, list[Step]]] = {method.name: {} for method in methods}
    rejected: dict[str, list[int]] = {}
    with _progress() as progress:
        bar = progress.add_task("replay", total=len(places) * len(methods))
        for store, index in places:
            name = store.ids[index]
            for method in methods:
                spans = replay_spans(method.model, method.head, store, index, method.block, evidence)
                if spans:
                    steps[method.name][name] = [step for _, found in spans for step in found]
                    rejected[name] = [
                        start + step.context
                        for start, found in spans
                        for step in found
                        if step.accepted < step.drafted
                    ]
                progress.advance(bar)
    if not any(steps.values()):
        raise EvalError(
            f"no sample of {', '.join(map(str, options.store))} has two neighbouring tokens that the target "
            "produced; capture with --regenerate"
        )
    report = _report(steps, options)
    if options.adaptive is not None and evidence is not None:
        fitted = AcceptanceModel.fit(*(torch.cat(parts) for parts in zip(*evidence, strict=True)))
        fitted.save(options.adaptive)
        report["adaptive"] = {"file": str(options.adaptive), **vars(fitted)}
    if options.rejected is not None:
        write_rejected(options.rejected, rejected)
        report["rejected"] = {"file": str(options.rejected), "anchors": sum(map(len, rejected.values()))}
    return report


def replay_spans(
    model: Drafter,
    head: FrozenHead,
    store: FeatureStore,
    index: int,
    block: int,
    evidence: Evidence | None = None,
) -> list[tuple[int, list[Step]]]:
    """The steps of greedy speculative decoding over one captured sample; times are zero.

    For every span of the target's tokens, the first token of its document and the steps, whose context counts
    from there.

    Args:
        model: in evaluation mode.
        head: the target's tables.
        store: of the sample.
        index: of the sample in it.
        block: rows of a block, anchor included.
        evidence: gets what every anchor's drafts were worth.
    """
    sample = store.sample(index)
    spans = list(_spans(sample.loss_mask))
    anchors = torch.cat([torch.arange(start, stop - 1) for start, stop in spans] or [torch.arange(0)])
    if not len(anchors):
        return []
    accepted = torch.zeros(len(sample.token_ids), dtype=torch.int64)
    for part in anchors.split(ANCHORS_AT_ONCE):
        accepted[part] = _accepted(model, head, store, index, sample, part, block, evidence)
    steps = []
    for start, stop in spans:
        document = int(torch.searchsorted(sample.document_starts, start, right=True)) - 1
        first = int(sample.document_starts[document])
        steps.append((first, walk(accepted[start:stop].tolist(), start - first, block - 1)))
    return steps


def walk(accepted: Sequence[int], context: int, drafts: int) -> list[Step]:
    """Steps from the first token of a span, which the prefill gives, to its end.

    Args:
        accepted: for each token as an anchor, the drafts that agree with what follows.
        context: tokens before the span.
        drafts: of a full step; what lies behind the end of the span was never there to be compared.
    """
    steps, at, last = [], 0, len(accepted) - 1
    while at < last:
        rest = last - at
        agreed = min(accepted[at], rest)
        emitted = min(agreed + 1, rest)
        steps.append(Step(context + at, min(drafts, rest), agreed, emitted, 0.0, 0.0, 0.0))
        at += emitted
    return steps


def _spans(mask: Tensor) -> Iterator[tuple[int, int]]:
    """Runs of true entries with at least two tokens."""
    edges = torch.diff(torch.cat([torch.zeros(1), mask.float(), torch.zeros(1)]))
    starts, stops = (edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist()
    return ((start, stop) for start, stop in zip(starts, stops, strict=True) if start and stop - start > 1)


@torch.no_grad()
def _accepted(
    model: Drafter,
    head: FrozenHead,
    store: FeatureStore,
    index: int,
    sample: Sample,
    anchors_A: Tensor,
    block: int,
    evidence: Evidence | None,
) -> Tensor:
    """int64 [A]: drafts of each anchor that agree with the sample's own next tokens."""
    document = torch.searchsorted(sample.document_starts, anchors_A, right=True) - 1
    starts_A = sample.document_starts[document]
    layout = BlockLayout(anchors_A, starts_A, len(sample.token_ids), block)
    plan = plan_step(layout, model.config.layer_masks, Grid.single())
    rows = [store.rows(index, start, stop) for start, stop in plan.rows]
    ids_A = sample.token_ids[anchors_A]
    hidden_ABD = model(
        Features(torch.cat(rows)),
        plan.row_positions,
        embed_blocks(head, model.config, ids_A, block),
        layout.positions[:, None] + torch.arange(block),
        plan.attention(),
    )
    proposal = propose(model, hidden_ABD, ids_A, head, scored=evidence is not None)
    reached_AK = anchors_A[:, None] + torch.arange(1, block)
    inside_AK = reached_AK < len(sample.token_ids)
    truth_AK = sample.token_ids[reached_AK.clamp(max=len(sample.token_ids) - 1)]
    accepted_A = ((proposal.ids == truth_AK) & inside_AK).long().cumprod(1).sum(1)
    if evidence is not None and proposal.scores is not None:
        supervised_AK = inside_AK & sample.loss_mask[reached_AK.clamp(max=len(sample.token_ids) - 1)]
        evidence.append((proposal.scores, accepted_A, supervised_AK.long().cumprod(1).sum(1)))
    return accepted_A


def _method(text: str, block: int | None, head: FrozenHead) -> _Method:
    name, mark, folder = text.partition("=")
    path = Path(folder if mark else text)
    model = load_drafter(path).eval()
    rows = model.config.block_size if block is None else block
    if not 2 <= rows <= model.config.block_size:
        raise EvalError(
            f"block is {rows}, but {path} was trained with {model.config.block_size} rows: take 2 to "
            f"{model.config.block_size}"
        )
    return _Method(name if mark else path.name, model, head.to(dtype=model.norm.weight.dtype), rows)


def _check_fit(method: _Method, store: FeatureStore) -> None:
    config, manifest = method.model.config, store.manifest
    expected = (list(config.target_layer_ids), config.target_hidden_size)
    found = (list(manifest.target_layer_ids), manifest.hidden_size)
    if expected != found:
        raise EvalError(
            f"drafter {method.name} reads layers {expected[0]} of {expected[1]} elements, {store.path} holds "
            f"{found[0]} of {found[1]}: capture the store again with the drafter's taps"
        )


def _chosen(store: FeatureStore, limit: int | None) -> list[int]:
    """Indices of the samples, a choice that depends on their ids alone."""
    order = sorted(range(len(store)), key=lambda at: hashlib.sha256(store.ids[at].encode()).digest())
    return sorted(order[:limit])


def _report(steps: dict[str, dict[str, list[Step]]], options: ReplayOptions) -> dict[str, Any]:
    ids = list(next(iter(steps.values())))
    figures: dict[str, Any] = {}
    ratios = {}
    for name, by_sample in steps.items():
        prompts = [by_sample[sample_id] for sample_id in ids]
        ratios[name] = acceptance_length(prompts)
        deepest = max(step.drafted for prompt in prompts for step in prompt)
        figures[name] = {
            "acceptance_length": estimate(ratios[name], seed=options.seed).to_dict(),
            "positions": [
                estimate(acceptance_at(prompts, position), seed=options.seed).to_dict()
                for position in range(1, deepest + 1)
            ],
            "contexts": {
                bucket: estimate(acceptance_length(in_bucket(prompts, bucket)), seed=options.seed).to_dict()
                for bucket in buckets_present(prompts)
            },
            "samples": {
                sample_id: [sum(step.emitted for step in by_sample[sample_id]), len(by_sample[sample_id])]
                for sample_id in ids
            },
        }
    names = list(steps)
    return {
        "config": options.model_dump(mode="json"),
        "samples": len(ids),
        "drafters": figures,
        "comparisons": [
            {
                "first": first,
                "second": second,
                "acceptance_length": compare(ratios[first], ratios[second], seed=options.seed).to_dict(),
            }
            for at, second in enumerate(names)
            for first in names[at + 1 :]
        ],
    }


def _progress() -> Progress:
    from rich.console import Console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def render_replay(report: dict[str, Any]) -> Table:
    """One row a drafter."""
    table = Table(
        title=f"acceptance length over {report['samples']} captured responses, replayed",
        caption="\n".join([*map(_difference, report["comparisons"]), *_files(report)]),
    )
    for column in ("drafter", "acceptance length", "95 % interval", "accepted by position", "by context"):
        table.add_column(column)
    for name, figures in report["drafters"].items():
        tau = figures["acceptance_length"]
        table.add_row(
            name,
            f"{tau['value']:.3f}",
            "" if tau["low"] is None else f"{tau['low']:.3f}-{tau['high']:.3f}",
            " ".join(f"{at['value']:.2f}" for at in figures["positions"]),
            ", ".join(f"{bucket} {at['value']:.2f}" for bucket, at in figures["contexts"].items()),
        )
    return table


def _files(report: dict[str, Any]) -> list[str]:
    lines = []
    if fitted := report.get("adaptive"):
        lines.append(
            f"acceptance model in {fitted['file']}: log loss {fitted['log_loss']:.3f} nats over "
            f"{fitted['drafts']} drafts, {fitted['base_log_loss']:.3f} by position alone"
        )
    if rejected := report.get("rejected"):
        lines.append(f"{rejected['anchors']:,} anchors with rejected drafts in {rejected['file']}")
    return lines


def _difference(comparison: dict[str, Any]) -> str:
    found = comparison["acceptance_length"]
    text = f"{comparison['first']} - {comparison['second']}: {found['difference']:+.3f}"
    if found["low"] is None:
        return text
    return f"{text} [{found['low']:+.3f}, {found['high']:+.3f}], p {found['p_value']:.3g}"
