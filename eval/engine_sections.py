"""Sections of a report that only an evaluation inside an engine has (shapes: `eval.concurrency`)."""

from __future__ import annotations

from eval.report_words import Report, Section, figure


def concurrency_section(report: Report) -> Section:
    """What engines gave with several requests in flight (`eval.concurrency`)."""
    rows = [
        [
            str(level["concurrency"]),
            name,
            figure(figures["tokens_per_second"], 1),
            *(
                figure(figures[what]) if what in figures else "–"
                for what in ("speed_up", "speed_up_end_to_end", "acceptance_length")
            ),
            str(figures["tokens_per_second"]["n"]),
        ]
        for level in report["concurrency"]
        for name, figures in level["methods"].items()
    ]
    head = (
        "requests at once", "method", "tokens a second", "speed-up, decode", "speed-up, end to end",
        "acceptance length", "prompts",
    )  # fmt: skip
    note = "All other sections are of the fewest requests at once."
    return Section("concurrency", "By requests at once", (note,), head, rows)


def engine_section(report: Report) -> Section:
    """The engine's own counters beside this project's figure."""
    engine = report["engine"]
    rows = []
    for name, counters in engine["counters"].items():
        own = report["methods"][name]["overall"]["acceptance_length"]
        theirs = counters["acceptance_length"]
        rows.append(
            [
                name,
                *(str(counters[key]) for key in ("drafts", "draft_tokens", "accepted_tokens")),
                "–" if theirs is None else f"{theirs:.2f}",
                figure(own),
            ]
        )
    head = (
        "method", "drafts", "draft tokens", "accepted tokens", "1 + accepted / drafts", "acceptance length",
    )  # fmt: skip
    notes = (
        "The counters leave out steps without a draft, and count what a last step accepted beyond the limit.",
        ", ".join(f"{key} {value}" for key, value in engine["facts"].items()) + ".",
    )
    return Section("engine", "The engine's own counters", notes, head, rows)
