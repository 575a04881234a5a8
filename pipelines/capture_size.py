"""How large a store becomes, for every way to capture the same data, before anything runs.

A feature row is taps * hidden values of 4, 2 or (e4m3) 1 byte, in e4m3 with 2 bytes more per tap; a last
hidden state is hidden values of 4 or 2 bytes; a token is 4 bytes and a bit of mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from pipelines.capture_options import FEATURE_DTYPES, CaptureOptions
from pipelines.capture_tasks import Plan, Task, sample_id
from pipelines.keep import WindowRule, choose_rows
from pipelines.rowformat import FEATURES, LAST, row_formats
from pipelines.store import Manifest

TOKEN_BYTES = 4.125


@dataclass(frozen=True)
class StoreSize:
    """One way to capture.

    Attributes:
        keep: all or windows.
        dtype: of the rows, as a flag has it.
        last_hidden: whether last hidden states are stored.
        row_bytes: of one feature row.
        rows, last_rows: feature rows and last hidden states that are stored, at most.
        bytes: of rows, last hidden states and tokens.
        chosen: this is what was asked for.
    """

    keep: str
    dtype: str
    last_hidden: bool
    row_bytes: int
    rows: int
    last_rows: int
    bytes: int
    chosen: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def store_sizes(plan: Plan, options: CaptureOptions, rule: WindowRule, manifest: Manifest) -> list[StoreSize]:
    """Sizes for both rules, bf16, fp8 and the chosen dtype, without and with last hidden states.

    Args:
        plan: of the capture. The rows of given answers are counted; those of answers to be written are
            bounded from above.
        options: of the capture.
        rule: windows to be compared with keeping all.
        manifest: of the store.
    """
    counts = {"all": _count(plan, options, None), "windows": _count(plan, options, rule)}
    dtypes = dict.fromkeys(["bf16", "fp8", options.feature_dtype])
    taps = len(manifest.target_layer_ids)
    sizes = []
    for keep, (tokens, rows, last_rows) in counts.items():
        for dtype in dtypes:
            for last_hidden in (False, True):
                formats = row_formats(FEATURE_DTYPES[dtype], taps, manifest.hidden_size, last_hidden=True)
                stored = last_rows if last_hidden else 0
                of_rows = rows * formats[FEATURES].row_bytes + stored * formats[LAST].row_bytes
                asked = (options.keep, options.feature_dtype, options.last_hidden)
                sizes.append(
                    StoreSize(
                        keep,
                        dtype,
                        last_hidden,
                        formats[FEATURES].row_bytes,
                        rows,
                        stored,
                        of_rows + round(tokens * TOKEN_BYTES),
                        (keep, dtype, last_hidden) == asked,
                    )
                )
    return sizes


def render_sizes(sizes: Iterable[StoreSize], *, at_most: bool) -> Table:
    """The choices side by side, the chosen one marked."""
    table = Table(
        title="size of the store" + (", estimated from above" if at_most else ""), title_justify="left"
    )
    for name in ("keep", "dtype", "B/row", "rows", "last states", "GiB", ""):
        table.add_column(name, justify="left" if name in ("keep", "dtype", "") else "right", no_wrap=True)
    for size in sizes:
        table.add_row(
            size.keep,
            size.dtype,
            f"{size.row_bytes:,}",
            f"{size.rows:,}",
            f"{size.last_rows:,}" if size.last_hidden else "-",
            f"{size.bytes / 2**30:,.3f}",
            "<- chosen" if size.chosen else "",
        )
    return table


def _count(plan: Plan, options: CaptureOptions, rule: WindowRule | None) -> tuple[int, int, int]:
    """(tokens, feature rows, last hidden states), at most."""
    totals = [
        _dialogue_rows(task, options, rule) if task.turns else _given_rows(task, rule) for task in plan.tasks
    ]
    return tuple(map(sum, zip(*totals, strict=True)))  # type: ignore[return-value]


def _given_rows(task: Task, rule: WindowRule | None) -> tuple[int, int, int]:
    tokens = rows = last_rows = 0
    for sample in task.given:
        mask = torch.from_numpy(sample.loss_mask)
        name = sample_id(task.record, sample.number, sample.of)
        kept = choose_rows(name, mask, len(mask), rule, last_hidden=True)
        tokens += len(mask)
        rows += len(kept.rows[FEATURES])
        last_rows += len(kept.rows[LAST])
    return tokens, rows, last_rows


def _dialogue_rows(task: Task, options: CaptureOptions, rule: WindowRule | None) -> tuple[int, int, int]:
    answers = task.turns * options.max_new_tokens
    tokens = task.prompt_tokens + answers
    if rule is None:
        return tokens, tokens, answers
    rows = min(tokens, rule.most_rows, task.turns * (rule.window - 1) + answers)
    reach = rule.neighbourhoods * (rule.neighbourhood_length + rule.label_reach - 1)
    return tokens, rows, min(answers, max(reach, rule.most_rows))
