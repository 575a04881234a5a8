"""One table of a whole job: what the drafter reached, and what every stage took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from eval.errors import EvalError
from eval.report_words import figure, lossless_text

STAGES = ("target", "capture", "train", "eval")
WHY_SLOW = (
    "The speed ratio is printed as measured. A 135M target on a CPU is close to the worst case: one of its "
    "steps costs little more than a drafter's, and verifying several rows costs more than decoding one."
)

Report = dict[str, Any]


def summarise(folder: Path) -> Report:
    """Gather `STAGE.json` of every stage and `report/report.json` of a job's folder.

    Raises:
        EvalError: a stage has not been run; the message names it and its command.
    """
    report = _read(folder / "report" / "report.json", "eval")
    seconds = {stage: _read(folder / f"{stage}.json", stage)["command_seconds"] for stage in STAGES}
    return {
        "folder": str(folder),
        "report": str(folder / "report"),
        "minutes": {stage: value / 60 for stage, value in seconds.items()},
        "prompts": report["prompts"]["n"],
        "methods": {
            name: {
                "acceptance_length": method["overall"]["acceptance_length"],
                "positions": [p["acceptance"]["value"] for p in method["positions"]],
                "speed_up": method["overall"]["speed_up"],
                "break_even": {bucket: c["break_even"] for bucket, c in method["contexts"].items()},
                "lossless": method["lossless"],
            }
            for name, method in report["methods"].items()
        },
    }


def render_summary(summary: Report) -> Group:
    """The table that a demo ends with: a column a method."""
    methods = summary["methods"]
    table = Table(title=f"{summary['prompts']} held-out prompts; [95 % interval over prompts]")
    table.add_column("")
    for name in methods:
        table.add_column(name)
    rows = {
        "acceptance length": lambda m: figure(m["acceptance_length"]),
        "accepted at draft position 1, 2, …": lambda m: _positions(m["positions"]),
        "decode speed-up over plain decoding": lambda m: figure(m["speed_up"]),
        "acceptance length to break even": lambda m: ", ".join(
            f"{figure(estimate)} at {bucket}" for bucket, estimate in m["break_even"].items()
        ),
        "lossless": lambda m: _verdict(m["lossless"]),
    }
    for title, text in rows.items():
        table.add_row(title, *(text(method) for method in methods.values()))
    minutes = ", ".join(f"{stage} {value:.1f}" for stage, value in summary["minutes"].items())
    total = sum(summary["minutes"].values())
    return Group(
        table,
        Text(f"Minutes: {minutes}; {total:.1f} in all."),
        Text(WHY_SLOW),
        Text(f"Report and plots: {summary['report']}"),
    )


def _verdict(lossless: Report) -> str:
    if not lossless["checked"]:
        return "sampled"
    return f"{'no' if lossless['failures'] else 'yes'} ({lossless_text(lossless)})"


def _positions(values: list[float | None]) -> str:
    return " ".join("–" if value is None else f"{value:.2f}" for value in values)


def _read(path: Path, stage: str) -> Report:
    if not path.is_file():
        raise EvalError(
            f"expected the figures of `{stage}` in {path}, found none; run `make demo`, or that stage"
        )
    content: Report = json.loads(path.read_text())
    return content
