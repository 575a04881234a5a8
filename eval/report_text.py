"""The report for people: `report.md` and the table of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

Report = dict[str, Any]


def figure(estimate: Report, digits: int = 2) -> str:
    """`value [low, high]`, or a dash where there is nothing."""
    if estimate["value"] is None:
        return "–"
    if estimate["low"] is None:
        return f"{estimate['value']:.{digits}f}"
    return f"{estimate['value']:.{digits}f} [{estimate['low']:.{digits}f}, {estimate['high']:.{digits}f}]"


def lossless_text(lossless: Report) -> str:
    """`equal/checked`, with what the rest is."""
    if not lossless["checked"]:
        return "sampled"
    text = f"{lossless['equal']}/{lossless['checked']} equal"
    if lossless["near_ties"]:
        text += f", {lossless['near_ties']} near ties"
    if lossless["failures"]:
        text += f", {lossless['failures']} DIFFER"
    return text


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


def markdown(report: Report, plots: Sequence[tuple[str, str]]) -> str:
    """The whole report as Markdown; `plots` are (title, file name)."""
    settings, run, prompts = report["settings"], report["run"], report["prompts"]
    plain = report["plain"]
    parts = [
        "# Evaluation",
        "",
        f"Target `{settings['target']['name']}`, {settings['dtype']}, temperature {settings['temperature']}, "
        f"up to {settings['max_new_tokens']} new tokens; {prompts['n']} prompts, {prompts['turns']} turns of "
        f"{prompts['tokens']['shortest']} to {prompts['tokens']['longest']} tokens; "
        f"{run['hardware']['name']}, {run['hardware']['threads']} threads.",
        "",
        "Figures are `value [95 % interval]`, resampled over prompts.",
        "",
    ]
    if report["warnings"]:
        parts += ["## Read this first", "", *(f"- {warning}" for warning in report["warnings"]), ""]
    parts += ["## Methods", "", *_methods(report), ""]
    milliseconds = {
        k: (None if v is None else v * 1e3) for k, v in plain["seconds_per_token"].items() if k in _VALUES
    }
    parts += [f"Plain decoding takes {figure(milliseconds, 1)} ms a token.", ""]
    if report["comparisons"]:
        parts += ["## Differences on the same prompts", "", *_comparisons(report), ""]
    parts += ["## By data set", "", *_groups(report, "data_sets"), ""]
    if any(len(m["categories"]) > 1 for m in report["methods"].values()):
        parts += ["## By category", "", *_groups(report, "categories"), ""]
    parts += ["## By context length of the step", "", *_contexts(report), ""]
    parts += ["## By draft position", "", *_positions(report), ""]
    parts += ["## Time of a step", "", *_time(report), ""]
    for title, name in plots:
        parts += [f"![{title}]({name})", ""]
    parts += ["## How it was run", "", *_run(report), ""]
    return "\n".join(parts)


_VALUES = ("value", "low", "high")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _methods(report: Report) -> list[str]:
    rows = []
    for name, method in report["methods"].items():
        overall = method["overall"]
        tau = overall["acceptance_length"]
        rows.append(
            [
                name,
                figure(tau),
                f"{tau['numerator']:.0f} / {tau['denominator']:.0f}",
                f"{overall['accepted_tokens']} of {overall['drafted_tokens']}",
                f"{overall['mean_of_prompt_means']:.2f}",
                figure(overall["speed_up"]),
                figure(overall["speed_up_end_to_end"]),
                lossless_text(method["lossless"]),
            ]
        )
    head = (
        "method", "acceptance length", "emitted tokens / verify steps", "drafts accepted",
        "mean of prompt means", "speed-up, decode", "speed-up, end to end", "greedy tokens",
    )  # fmt: skip
    return _table(head, rows)


def _comparisons(report: Report) -> list[str]:
    def difference(c: Report) -> str:
        if c["difference"] is None:
            return "–"
        p = "p < 0.001" if c["p_value"] < 0.001 else f"p = {c['p_value']:.3f}"
        return f"{c['difference']:+.2f} [{c['low']:+.2f}, {c['high']:+.2f}], {p}"

    rows = [
        [
            f"{c['first']} − {c['second']}",
            difference(c["acceptance_length"]),
            difference(c["speed_up"]),
            str(c["acceptance_length"]["n"]),
        ]
        for c in report["comparisons"]
    ]
    return _table(("pair", "acceptance length", "speed-up", "prompts"), rows)


def _groups(report: Report, level: str) -> list[str]:
    rows = [
        [
            group,
            name,
            figure(figures["acceptance_length"]),
            figure(figures["speed_up"]),
            str(figures["acceptance_length"]["n"]),
        ]
        for name, method in report["methods"].items()
        for group, figures in method[level].items()
    ]
    order = list(next(iter(report["methods"].values()))[level])
    rows.sort(key=lambda row: order.index(row[0]))
    return _table(("set", "method", "acceptance length", "speed-up", "prompts"), rows)


def _contexts(report: Report) -> list[str]:
    rows = [
        [
            bucket,
            name,
            figure(figures["acceptance_length"]),
            figure(figures["break_even"]),
            str(figures["acceptance_length"]["n"]),
        ]
        for name, method in report["methods"].items()
        for bucket, figures in method["contexts"].items()
    ]
    return _table(("context", "method", "acceptance length", "break-even", "prompts"), rows)


def _positions(report: Report) -> list[str]:
    rows = [
        [
            str(p["position"]),
            name,
            figure(p["acceptance"]),
            figure(p["conditional"]),
            f"{p['acceptance']['numerator']:.0f} / {p['acceptance']['denominator']:.0f}",
        ]
        for name, method in report["methods"].items()
        for p in method["positions"]
    ]
    head = ("position", "method", "all accepted so far", "accepted, given all before", "steps")
    return _table(head, rows)


def _time(report: Report) -> list[str]:
    rows = []
    for name, method in report["methods"].items():
        parts = [
            figure(
                {k: None if v is None else v * 1e3 for k, v in method["time"][part].items() if k in _VALUES},
                1,
            )
            for part in ("draft", "verify", "other")
        ]
        repeats = method["time"]["speed_up_by_repeat"]
        spread = f"{repeats['median']:.2f}, {repeats['iqr']:.2f} ({repeats['n']})"
        rows.append([name, *parts, spread])
    head = ("method", "draft, ms", "verify, ms", "other, ms", "speed-up over repeats: median, IQR (n)")
    return _table(head, rows)


def _run(report: Report) -> list[str]:
    settings, run, prompts = report["settings"], report["run"], report["prompts"]
    shown = (
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "repeats",
        "template_args",
        "stop",
        "attention",
        "prepack",
    )
    chosen = ", ".join(f"{key} {settings[key]}" for key in shown)
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    return [
        f"- command: `{' '.join(run['command'])}`",
        f"- settings {settings['hash']}: {chosen}",
        f"- rendered prompts: hash {prompts['rendered_hash']}",
        f"- weights: target {settings['target']['weights']}, "
        + (", ".join(f"{name} {digest}" for name, digest in settings["drafters"].items()) or "no drafter"),
        f"- versions: {versions}; device {run['hardware']['device']}, {run['hardware']['name']}",
        f"- took {run['seconds']:.0f} s",
    ]
