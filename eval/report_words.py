"""How a report writes its figures, and what a section of it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Report = dict[str, Any]

_VALUES = ("value", "low", "high")


@dataclass(frozen=True)
class Section:
    """A heading, what to know before reading the table, and the table.

    Attributes:
        key: name that pictures refer to.
        title: the heading.
        notes: paragraphs before the table.
        head: column titles; empty where there is no table.
        rows: cells, as text.
        points: items of a list after the table.
    """

    key: str
    title: str
    notes: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    rows: list[list[str]] = field(default_factory=list)
    points: tuple[str, ...] = ()


def figure(estimate: Report, digits: int = 2) -> str:
    """`value [low, high]`, or a dash where there is nothing."""
    if estimate["value"] is None:
        return "–"
    if estimate["low"] is None:
        return f"{estimate['value']:.{digits}f}"
    return f"{estimate['value']:.{digits}f} [{estimate['low']:.{digits}f}, {estimate['high']:.{digits}f}]"


def milliseconds(estimate: Report) -> str:
    """A figure in seconds, shown in milliseconds."""
    scaled = {k: None if estimate[k] is None else estimate[k] * 1e3 for k in _VALUES}
    return figure(scaled, 1)


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


def claim_text(claim: Report) -> str:
    """What the prompts show, and about how many would show an effect of this size."""
    if claim["prompts_needed"] is None:
        return str(claim["text"])
    return f"{claim['text']}, needs about {claim['prompts_needed']} prompts"


def p_value(p: float) -> str:
    """Three digits, and no claim beyond the resamples."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def signed(comparison: Report) -> str:
    """A difference with its sign."""
    if comparison["low"] is None:
        return f"{comparison['difference']:+.2f}"
    return f"{comparison['difference']:+.2f} [{comparison['low']:+.2f}, {comparison['high']:+.2f}]"
