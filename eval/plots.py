"""Pictures of a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]

# Colour-blind safe (Okabe and Ito), one a method.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_FEWEST_STEPS = 20  # a conditional share of fewer steps is noise
_PARTS = (("draft", "#0072B2"), ("verify", "#E69F00"), ("other", "#999999"))


def write_plots(report: Report, out: Path) -> list[tuple[str, str]]:
    """Write the PNG files into `out`; returns (title, file name) of each."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "legend.frameon": False,
        "figure.dpi": 120,
    }
    drawn = []
    plots: tuple[tuple[str, str, Callable[[Any, Report], None]], ...] = (
        ("Acceptance by draft position", "acceptance_by_position.png", _positions),
        ("Acceptance length and break-even by context", "acceptance_by_context.png", _contexts),
        ("Speed-up by data set", "speed_up.png", _speed_up),
        ("Time of a step", "time_split.png", _time_split),
    )
    with plt.rc_context(style):
        for title, name, draw in plots:
            figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
            draw(axes, report)
            axes.set_title(title, loc="left", fontweight="bold")
            figure.savefig(out / name)
            plt.close(figure)
            drawn.append((title, name))
    return drawn


def _colours(report: Report) -> dict[str, str]:
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(report["methods"])}


def _error(estimate: Report) -> tuple[float, float]:
    if estimate["low"] is None:
        return 0.0, 0.0
    return max(0.0, estimate["value"] - estimate["low"]), max(0.0, estimate["high"] - estimate["value"])


def _bars(estimates: list[Report]) -> list[list[float]]:
    errors = [_error(e) for e in estimates]
    return [[low for low, _ in errors], [high for _, high in errors]]


def _positions(axes: Any, report: Report) -> None:
    for name, colour in _colours(report).items():
        points = [p for p in report["methods"][name]["positions"] if p["acceptance"]["value"] is not None]
        so_far = [p["acceptance"] for p in points]
        places, heights = [p["position"] for p in points], [e["value"] for e in so_far]
        axes.errorbar(places, heights, yerr=_bars(so_far), color=colour, marker="o", capsize=3, label=name)
        shown = [p for p in points if p["conditional"]["denominator"] >= _FEWEST_STEPS]
        given = [p["conditional"]["value"] for p in shown]
        axes.plot([p["position"] for p in shown], given, color=colour, linestyle=":", linewidth=1.8)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("draft position in the block")
    axes.set_ylabel("share of steps")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.plot([], [], color="#555555", marker="o", label="all accepted so far")
    axes.plot([], [], color="#555555", linestyle=":", linewidth=1.8, label="accepted, given\nall before it")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _contexts(axes: Any, report: Report) -> None:
    colours = _colours(report)
    buckets = list(dict.fromkeys(b for m in report["methods"].values() for b in m["contexts"]))
    width = 0.8 / max(1, len(colours))
    for index, (name, colour) in enumerate(colours.items()):
        contexts = report["methods"][name]["contexts"]
        places = [buckets.index(b) + (index - (len(colours) - 1) / 2) * width for b in contexts]
        lengths = [c["acceptance_length"] for c in contexts.values()]
        axes.bar(
            places,
            [e["value"] or 0 for e in lengths],
            width * 0.9,
            yerr=_bars(lengths),
            color=colour,
            alpha=0.75,
            capsize=3,
            label=name,
        )
        for place, figures in zip(places, contexts.values(), strict=True):
            if figures["break_even"]["value"] is not None:
                axes.plot(
                    [place - width * 0.45, place + width * 0.45],
                    [figures["break_even"]["value"]] * 2,
                    color="black",
                    linewidth=2.5,
                )
    axes.plot([], [], color="black", linewidth=2.5, label="break-even")
    labels = []
    for bucket in buckets:
        n = max(
            m["contexts"][bucket]["acceptance_length"]["n"]
            for m in report["methods"].values()
            if bucket in m["contexts"]
        )
        labels.append(f"{bucket}\n({n} prompts)")
    axes.set_xticks(range(len(buckets)), labels)
    axes.set_xlabel("tokens before the step")
    axes.set_ylabel("acceptance length")
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _speed_up(axes: Any, report: Report) -> None:
    colours = _colours(report)
    sets = list(next(iter(report["methods"].values()))["data_sets"])
    rows = ["all", *sets] if len(sets) > 1 else sets
    height = 0.8 / max(1, len(colours))
    for index, (name, colour) in enumerate(colours.items()):
        method = report["methods"][name]
        figures = [method["overall"] if row == "all" else method["data_sets"][row] for row in rows]
        speeds = [f["speed_up"] for f in figures]
        places = [i + (index - (len(colours) - 1) / 2) * height for i in range(len(rows))]
        axes.errorbar(
            [e["value"] for e in speeds],
            places,
            xerr=_bars(speeds),
            color=colour,
            marker="o",
            linestyle="none",
            capsize=3,
            label=name,
        )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("decode speed-up over plain decoding (1 = no gain)")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _time_split(axes: Any, report: Report) -> None:
    names = list(report["methods"])
    plain = report["plain"]["seconds_per_token"]["value"] * 1e3
    left = [0.0] * len(names)
    for part, colour in _PARTS:
        values = [(report["methods"][name]["time"][part]["value"] or 0.0) * 1e3 for name in names]
        axes.barh(names, values, left=left, color=colour, label=part, height=0.6)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.axvline(plain, color="black", linewidth=1.5, linestyle="--", label="one plain token")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
