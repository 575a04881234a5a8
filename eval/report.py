"""From responses to a report: every figure with its formula, its counts, n and a 95 % interval."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.breakdowns import method_figures, per_prompt, prefill_seconds, speed_up
from eval.contexts import EDGES
from eval.metrics import Ratio, acceptance_length
from eval.prompt_table import prompt_rows
from eval.responses import PLAIN, Response, steps_of
from eval.statistics import (
    ENOUGH_PROMPTS,
    FEW_PROMPTS,
    compare,
    estimate,
    finite,
    holm,
    median_and_quartiles,
)

SCHEMA_VERSION = 2

Report = dict[str, Any]


def build_report(
    responses: Sequence[Response],
    failures: Sequence[Response],
    *,
    methods: Sequence[str],
    seed: int,
    greedy: bool,
    tie_bound: float,
    edges: Sequence[int] = EDGES,
) -> Report:
    """The report as JSON-ready data.

    Args:
        responses: finished prompts.
        failures: prompts that could not be decoded.
        methods: names in the order to show them; plain decoding first.
        seed: of the resampling.
        greedy: whether responses can be compared token by token.
        tie_bound: logit distance within which a greedy difference is rounding.
        edges: of the context buckets, in tokens.
    """
    speculative = [name for name in methods if name != PLAIN]
    report: Report = {
        "schema_version": SCHEMA_VERSION,
        "prompts": _prompts(responses, failures),
        "plain": _plain(responses, seed),
        "methods": {
            name: method_figures(responses, name, seed=seed, greedy=greedy, tie_bound=tie_bound, edges=edges)
            for name in speculative
        },
        "comparisons": _comparisons(responses, speculative, seed=seed, greedy=greedy),
        "by_prompt": prompt_rows(responses, methods),
    }
    report["warnings"] = _warnings(report)
    return report


def write_report(report: Report, out: Path) -> None:
    """Write plots, `report.md`, `report.html` and at last `report.json`: where that is, all of them are."""
    from eval.plots import write_plots
    from eval.report_html import page
    from eval.report_text import markdown

    plots = write_plots(report, out)
    (out / "report.md").write_text(markdown(report, plots), encoding="utf-8")
    (out / "report.html").write_text(page(report, plots), encoding="utf-8")
    partial = out / "report.json.partial"
    partial.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(out / "report.json")


def read_report(out: Path) -> Report | None:
    """The finished report in a folder; None where there is none of this schema version."""
    path = out / "report.json"
    if not path.is_file():
        return None
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report if report["schema_version"] == SCHEMA_VERSION else None


def _prompts(responses: Sequence[Response], failures: Sequence[Response]) -> Report:
    hashes = sorted(turn.prompt_hash for r in responses for turn in r.turns)
    lengths = [turn.prompt_tokens for r in responses for turn in r.turns]
    return {
        "n": len(responses),
        "turns": len(hashes),
        "data_sets": dict(Counter(r.dataset for r in responses)),
        "tokens": {"shortest": min(lengths), "longest": max(lengths)},
        "rendered_hash": hashlib.sha256("".join(hashes).encode()).hexdigest()[:16],
        "failures": [{"prompt": r.prompt, "error": r.error} for r in failures],
    }


def _plain(responses: Sequence[Response], seed: int) -> Report:
    repeats = len(responses[0].turns[0].runs[PLAIN])
    rates = []
    for repeat in range(repeats):
        steps = [step for r in responses for step in steps_of(r, PLAIN, repeat)]
        rates.append(sum(s.seconds for s in steps) / max(1, len(steps)))
    seconds = per_prompt(responses, PLAIN, lambda d: d.decode_seconds)
    tokens = np.array([len(steps_of(r, PLAIN, 0)) for r in responses], dtype=np.float64)
    per_token = Ratio(seconds, tokens, "plain decode seconds / plain tokens after the first")
    return {
        "seconds_per_token": estimate(per_token, seed=seed).to_dict(),
        "seconds_per_token_by_repeat": median_and_quartiles(rates),
        "prefill": estimate(prefill_seconds(responses, PLAIN), seed=seed).to_dict(),
    }


def _comparisons(
    responses: Sequence[Response], names: Sequence[str], *, seed: int, greedy: bool
) -> list[Report]:
    """All pairs of methods on the same prompts; p-values also adjusted for the number of pairs."""
    pairs = [(first, second) for i, second in enumerate(names) for first in names[i + 1 :]]
    by_set: dict[str, list[Response]] = {}
    for response in responses:
        by_set.setdefault(response.dataset, []).append(response)

    def compare_on(some: Sequence[Response], pair: tuple[str, str]) -> Report:
        lengths = (acceptance_length([steps_of(r, name, 0) for r in some]) for name in pair)
        speeds = (speed_up(some, name, greedy=greedy) for name in pair)
        return {
            "acceptance_length": compared(*lengths, seed=seed),
            "speed_up": compared(*speeds, seed=seed),
        }

    found = []
    for pair in pairs:
        data_sets = {name: compare_on(some, pair) for name, some in by_set.items()} if len(by_set) > 1 else {}
        found.append(
            {"first": pair[0], "second": pair[1], **compare_on(responses, pair), "data_sets": data_sets}
        )
    add_holm([pair["acceptance_length"] for pair in found])
    add_holm([pair["speed_up"] for pair in found])
    return found


def compared(first: Ratio, second: Ratio, *, seed: int) -> Report:
    """A paired comparison and what it shows, JSON-ready."""
    comparison = compare(first, second, seed=seed)
    return {**comparison.to_dict(), "claim": comparison.claim.to_dict()}


def add_holm(comparisons: Sequence[Report]) -> None:
    """Write each p-value, adjusted for their number, beside it."""
    given = [float("nan") if c["p_value"] is None else c["p_value"] for c in comparisons]
    for comparison, adjusted in zip(comparisons, holm(given), strict=True):
        comparison.update(finite({"p_value_adjusted": adjusted}))


def _warnings(report: Report) -> list[str]:
    """Worst first: what makes every figure worthless, then what the prompts cannot show, then losses."""
    found = [f"{f['prompt']} failed: {f['error']}" for f in report["prompts"]["failures"]]
    for name, method in report["methods"].items():
        lossless = method["lossless"]
        if lossless.get("failures"):
            found.append(
                f"{name}: {lossless['failures']} of {lossless['checked']} greedy responses differ from plain "
                "decoding by more than rounding"
            )
    n = report["prompts"]["n"]
    if n < ENOUGH_PROMPTS:
        found.append(
            f"n = {n} prompts: with fewer than {ENOUGH_PROMPTS} an interval is narrower than the doubt, so "
            "no effect counts as shown"
        )
    few = {
        bucket: figures["acceptance_length"]["n"]
        for method in report["methods"].values()
        for bucket, figures in method["contexts"].items()
        if figures["acceptance_length"]["n"] < FEW_PROMPTS
    }
    if few:
        counts = ", ".join(f"{bucket} (n = {n})" for bucket, n in few.items())
        found.append(f"contexts that rest on fewer than {FEW_PROMPTS} prompts: {counts}")
    for name, method in report["methods"].items():
        found += _speed_warnings(name, method)
    return found


def _speed_warnings(name: str, method: Report) -> Iterator[str]:
    shown, speed = method["overall"]["claim"], method["overall"]["speed_up"]
    if shown["text"] == "not shown" and speed["low"] is not None:
        needed = shown["prompts_needed"]
        more = f"; about {needed} prompts would show an effect of this size" if needed else ""
        yield (
            f"{name}: a speed-up of {speed['value']:.2f} is not shown, its interval from {speed['low']:.2f} "
            f"to {speed['high']:.2f} holds 1 (n = {speed['n']}{more})"
        )
    below = []
    for bucket, figures in method["contexts"].items():
        tau, even = figures["acceptance_length"]["value"], figures["break_even"]["value"]
        if None not in (tau, even) and tau < even:
            below.append(f"{bucket} ({tau:.2f} below {even:.2f})")
    if below:
        yield (
            f"{name}: slower than plain decoding where its acceptance length is below break-even, at context "
            + ", ".join(below)
        )
