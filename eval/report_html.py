"""`report.html`: one file without outside resources, for a desk and for a phone, light and dark."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from eval.plots import COLOURS, INK, Plot
from eval.report_sections import heading, sections
from eval.report_words import Section, claim_text, figure, lossless_text

Report = dict[str, Any]

_LONG_TABLE = 20  # rows beyond which a table is folded

# Shades of the plots' colours: darker on white, lighter on black, so that both keep a contrast of 3 to 1.
_LIGHT = ("#0068a3", "#c45500", "#00805d", "#b3568c", "#a87400", "#2b83b8")
_DARK = ("#4aa8e0", "#f0813a", "#2fc497", "#e39ac4", "#f0b83d", "#8accf2")

_STYLE = """
:root { color-scheme: light dark; --ink: #1b2330; --soft: #5b6573; --page: #f6f7f9; --card: #fff;
  --line: #dfe3e8; --mark: #b45309; LIGHT
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b3; --page: #11151b;
  --card: #1a2029; --line: #2d3541; --mark: #f0b060; DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1200px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 26px; margin: 8px 0 4px; }
h2 { font-size: 19px; margin: 0 0 8px; }
p { margin: 0 0 10px; max-width: 78ch; }
.lead, .note { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 270px), 1fr)); gap: 12px;
  margin: 18px 0; }
.card, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 12px 14px; border-top: 4px solid var(--c); }
.card h3 { margin: 0 0 6px; font-size: 16px; overflow-wrap: anywhere; }
.card dl { display: grid; grid-template-columns: auto auto; gap: 2px 10px; margin: 0; }
.card dt { color: var(--soft); }
.card dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
section { padding: 16px; margin: 14px 0; }
section.warnings { border-left: 4px solid var(--mark); }
figure { margin: 4px auto 14px; max-width: 500px; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; min-width: 5.5em; }
i { font-style: normal; color: var(--soft); }
summary { cursor: pointer; color: var(--soft); }
ul { margin: 0; padding-left: 20px; }
li { margin: 3px 0; overflow-wrap: anywhere; }
@media (max-width: 500px) { main { padding: 12px 8px 40px; } section { padding: 12px; } }
code { font: 13px ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
"""


def page(report: Report, plots: Sequence[Plot]) -> str:
    """The whole report as one HTML document."""
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_title(report)}</title><style>{_style()}</style></head><body><main>",
        f'<h1>Evaluation</h1><p class="lead">{_text(heading(report))}</p>',
        _cards(report),
        *(_section(section, plots) for section in sections(report)),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _title(report: Report) -> str:
    return html.escape("Evaluation: " + ", ".join(report["methods"]))


def _style() -> str:
    light, dark = (
        " ".join(f"--c{i}: {shade};" for i, shade in enumerate(shades)) for shades in (_LIGHT, _DARK)
    )
    return _STYLE.replace("LIGHT", light).replace("DARK", dark)


def _text(text: str) -> str:
    """Escaped, with `code` marked and intervals dimmed."""
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"(\[[^\[\]<>]*\d[^\[\]<>]*\])", r"<i>\1</i>", marked)


def _cards(report: Report) -> str:
    cards = []
    for i, (name, method) in enumerate(report["methods"].items()):
        overall = method["overall"]
        facts = (
            ("acceptance length", figure(overall["acceptance_length"])),
            *((f"break-even, {b}", figure(c["break_even"])) for b, c in method["contexts"].items()),
            ("speed-up", figure(overall["speed_up"])),
            ("shown", claim_text(overall["claim"])),
            ("greedy tokens", lossless_text(method["lossless"])),
        )
        lines = "".join(f"<dt>{label}</dt><dd>{_text(value)}</dd>" for label, value in facts)
        shade = f"var(--c{i % len(COLOURS)})"
        cards.append(
            f'<div class="card" style="--c: {shade}"><h3>{html.escape(name)}</h3><dl>{lines}</dl></div>'
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _section(section: Section, plots: Sequence[Plot]) -> str:
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in section.notes)
    figures = "".join(f"<figure>{_inline(plot)}</figure>" for plot in plots if plot.section == section.key)
    points = "".join(f"<li>{_text(point)}</li>" for point in section.points)
    return (
        f'<section class="{section.key}"><h2>{html.escape(section.title)}</h2>{notes}{figures}'
        f"{_table(section)}{f'<ul>{points}</ul>' if points else ''}</section>"
    )


def _table(section: Section) -> str:
    if not section.rows:
        return ""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in section.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in section.rows
    )
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    if len(section.rows) > _LONG_TABLE:
        return f"<details><summary>Table, {len(section.rows)} rows</summary>{table}</details>"
    return table


def _inline(plot: Plot) -> str:
    """The SVG element alone, its colours and font those of the page."""
    body = plot.svg[plot.svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]*)"', body)
    assert box is not None
    body = body[body.index(">") + 1 :]
    body = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", body)
    body = body.replace(INK, "currentColor")
    for i, colour in enumerate(COLOURS):
        body = body.replace(colour.lower(), f"var(--c{i})")
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{html.escape(plot.title)}">{body}'
