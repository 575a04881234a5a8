"""`eval --compare`: two reports, what differs between them, and then their figures, paired by prompt.

Prompts are the same when their rendered token ids are. Settings that change figures have to be equal, or be
named by whoever compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from eval.metrics import Ratio
from eval.options import EvalOptions
from eval.prompt_table import (
    Row,
    acceptance_length_of,
    seconds_per_plain_token_of,
    speed_up_of,
)
from eval.report import SCHEMA_VERSION, add_holm, compared
from eval.report_words import claim_text, figure, milliseconds, p_value, signed
from eval.statistics import estimate

Report = dict[str, Any]

#: What may differ without changing a figure; it is shown all the same.
NOTED = frozenset({"target.name", "versions.code", "hardware.system", "baseline"})
ALL = "all"


class ComparisonError(ValueError):
    """Two reports that cannot be compared as asked."""


def run_compare(options: EvalOptions) -> Report:
    """`compare_reports` as the command line asks for it."""
    assert options.compare is not None
    return compare_reports(*options.compare, allowed=options.allow_differences, seed=options.seed)


def compare_reports(first: Path, second: Path, *, allowed: Sequence[str], seed: int) -> Report:
    """What differs between two evaluations, and the differences of their figures on the prompts of both.

    Methods of one name are compared; those that only one report has, each with each such method of the other.

    Args:
        first: report.json or its folder.
        second: the same; figures are second minus first.
        allowed: keys that may differ, whole (`drafters.a`) or by their first part (`drafters`), or `all`.
        seed: of the resampling.

    Raises:
        ComparisonError: a report that is not there, settings that differ and are not allowed to, or no common
            prompt.
    """
    reports = _read(first), _read(second)
    differences = settings_differences(*reports)
    refused = [
        d for d in differences if not d["noted"] and not any(_allows(name, d["key"]) for name in allowed)
    ]
    if refused:
        raise ComparisonError(_refusal(first, second, refused))
    rows, prompts = _paired(*reports)
    if not rows[0]:
        raise ComparisonError(
            f"{first} and {second} have no prompt in common ({prompts['first_only']} and "
            f"{prompts['second_only']} prompts, of which {prompts['rendered_differently']} are the same text "
            "rendered to other token ids); evaluate both on the same data with the same template arguments"
        )
    plain = [estimate(seconds_per_plain_token_of(each), seed=seed).to_dict() for each in rows]
    figures = [
        _figures(rows, pair, seed) for pair in _method_pairs(reports[0]["methods"], reports[1]["methods"])
    ]
    for what in ("acceptance_length", "speed_up"):
        add_holm([pair[what]["difference"] for pair in figures])
    return {
        "first": str(first),
        "second": str(second),
        "settings_differences": differences,
        "prompts": prompts,
        "plain_seconds_per_token": {"first": plain[0], "second": plain[1]},
        "methods": figures,
    }


def settings_differences(first: Report, second: Report) -> list[Report]:
    """Every setting, version and piece of hardware that is not equal: `key`, `first`, `second`, `noted`."""
    both = [dict(_flat(_compared_part(report))) for report in (first, second)]
    shared = set(first["methods"]) & set(second["methods"])
    found = []
    for key in dict.fromkeys([*both[0], *both[1]]):
        kind, _, name = key.partition(".")
        if kind in ("methods", "drafters") and name.partition(".")[0] not in shared:
            continue  # a method of one report alone is compared as another method
        values = [each.get(key) for each in both]
        if values[0] != values[1]:
            found.append({"key": key, "first": values[0], "second": values[1], "noted": key in NOTED})
    return found


def _compared_part(report: Report) -> Report:
    settings = {key: value for key, value in report["settings"].items() if key != "hash"}
    return settings | {part: report["run"][part] for part in ("versions", "hardware")}


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _allows(name: str, key: str) -> bool:
    return name in (ALL, key) or key.startswith(f"{name}.")


def _refusal(first: Path, second: Path, refused: Sequence[Report]) -> str:
    lines = [f"  {d['key']}: {d['first']} against {d['second']}" for d in refused]
    flags = " ".join(
        f"--allow-differences {name}" for name in dict.fromkeys(_part(d["key"]) for d in refused)
    )
    return "\n".join(
        [
            f"{first} and {second} differ in what changes figures:",
            *lines,
            f"evaluate again with equal settings, or say that you mean to compare these: {flags}",
        ]
    )


def _part(key: str) -> str:
    return key.partition(".")[0]


def _read(path: Path) -> Report:
    file = path / "report.json" if path.is_dir() else path
    if not file.is_file():
        raise ComparisonError(f"expected a report.json at {path}, found none; `longdraft eval` writes it")
    report: Report = json.loads(file.read_text(encoding="utf-8"))
    if report.get("schema_version") != SCHEMA_VERSION:
        raise ComparisonError(
            f"{file} has schema version {report.get('schema_version')}, expected {SCHEMA_VERSION}; run its "
            "evaluation again, which keeps the responses and writes a new report"
        )
    return report


def _paired(first: Report, second: Report) -> tuple[tuple[list[Row], list[Row]], Report]:
    """Rows of the prompts that both have, in the same order, and how many the others are."""
    by_hash = [{row["hash"]: row for row in report["by_prompt"]} for report in (first, second)]
    both = [key for key in by_hash[0] if key in by_hash[1]]
    alone = [[row for key, row in each.items() if key not in both] for each in by_hash]
    texts = [{row["key"] for row in rows} for rows in alone]
    counts = {
        "both": len(both),
        "first_only": len(alone[0]),
        "second_only": len(alone[1]),
        "rendered_differently": len(texts[0] & texts[1]),
    }
    return ([by_hash[0][key] for key in both], [by_hash[1][key] for key in both]), counts


def _method_pairs(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    same = [(name, name) for name in first if name in second]
    others = [(a, b) for a in first if a not in second for b in second if b not in first]
    return [*same, *others]


def _figures(rows: tuple[list[Row], list[Row]], pair: tuple[str, str], seed: int) -> Report:
    def both(of: Any) -> Report:
        values: list[Ratio] = [of(each, name) for each, name in zip(rows, pair, strict=True)]
        return {
            "first": estimate(values[0], seed=seed).to_dict(),
            "second": estimate(values[1], seed=seed).to_dict(),
            "difference": compared(values[1], values[0], seed=seed),
        }

    return {
        "first": pair[0],
        "second": pair[1],
        "acceptance_length": both(acceptance_length_of),
        "speed_up": both(speed_up_of),
    }


def render_comparison(comparison: Report) -> Group:
    """First what differs, then the figures."""
    return Group(
        *_settings_text(comparison), _prompts_text(comparison), _figures_table(comparison), _end(comparison)
    )


def _settings_text(comparison: Report) -> list[Any]:
    differences = comparison["settings_differences"]
    if not differences:
        return [Text("The two evaluations had equal settings, versions and hardware.")]
    table = Table(title="What differs")
    for name in ("setting", "first", "second", ""):
        table.add_column(name, overflow="fold")
    for d in differences:
        note = "changes no figure" if d["noted"] else "may change figures"
        table.add_row(d["key"], str(d["first"]), str(d["second"]), note)
    return [table]


def _prompts_text(comparison: Report) -> Text:
    prompts = comparison["prompts"]
    text = (
        f"{prompts['both']} prompts in both, {prompts['first_only']} only in the first, "
        f"{prompts['second_only']} only in the second"
    )
    if prompts["rendered_differently"]:
        text += f"; {prompts['rendered_differently']} of these are the same text with other token ids"
    return Text(text + ".")


def _figures_table(comparison: Report) -> Table:
    table = Table(title="Figures on the prompts of both, [95 % interval over prompts]")
    for name in ("method", "figure", "first", "second", "second − first", "p", "shown"):
        table.add_column(name)
    for pair in comparison["methods"]:
        name = pair["first"] if pair["first"] == pair["second"] else f"{pair['first']} / {pair['second']}"
        for what, title in (("acceptance_length", "τ"), ("speed_up", "speed-up")):
            figures = pair[what]
            values = (figure(figures["first"]), figure(figures["second"]))
            table.add_row(name, title, *values, *_difference_cells(figures["difference"]))
    return table


def _difference_cells(difference: Report) -> tuple[str, str, str]:
    if difference["difference"] is None:
        return "–", "–", "–"
    p = p_value(difference["p_value_adjusted"]).removeprefix("p = ")
    return signed(difference), p, claim_text(difference["claim"])


def _end(comparison: Report) -> Text:
    plain = comparison["plain_seconds_per_token"]
    return Text(
        f"Plain decoding took {milliseconds(plain['first'])} and {milliseconds(plain['second'])} ms a token. "
        "Each speed-up is against plain decoding of its own run: a machine that was busier in one of them "
        "does not count, as long as it was equally busy throughout. p is adjusted (Holm)."
    )
