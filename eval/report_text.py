"""The report for people: `report.md` and the table of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from eval.plots import Plot
from eval.report_sections import heading, sections
from eval.report_words import Section, figure, lossless_text

Report = dict[str, Any]


def render_report(report: Report) -> Group:
    """The terminal's table, one row a method, and where the rest is."""
    table = Table(title=f"{report['prompts']['n']} prompts, {report['prompts']['turns']} turns")
    for name, justify in (
        ("method", "left"),
        ("acceptance length", "right"),
        ("speed-up", "right"),
        ("end to end", "right"),
        ("break-even", "right"),
        ("lossless", "left"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for name, method in report["methods"].items():
        overall = method["overall"]
        contexts = list(method["contexts"].values())
        table.add_row(
            name,
            figure(overall["acceptance_length"]),
            figure(overall["speed_up"]),
            figure(overall["speed_up_end_to_end"]),
            " / ".join(figure(c["break_even"]).partition(" ")[0] for c in contexts),
            lossless_text(method["lossless"]),
        )
    lines = [Text(f"! {warning}", style="yellow") for warning in report["warnings"]]
    lines.append(Text(f"report and plots: {report['run']['out']}"))
    return Group(table, *lines)


def markdown(report: Report, plots: Sequence[Plot]) -> str:
    """The whole report as Markdown, each picture in its section."""
    parts = ["# Evaluation", "", heading(report), ""]
    for section in sections(report):
        parts += [f"## {section.title}", ""]
        for note in section.notes:
            parts += [note, ""]
        for plot in plots:
            if plot.section == section.key:
                parts += [f"![{plot.title}]({plot.file})", ""]
        if section.rows:
            parts += [*_table(section), ""]
        if section.points:
            parts += [*(f"- {point}" for point in section.points), ""]
    return "\n".join(parts)


def _table(section: Section) -> list[str]:
    lines = ["| " + " | ".join(section.head) + " |", "|" + "---|" * len(section.head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in section.rows)]
