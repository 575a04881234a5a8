"""Pictures of a report, drawn once: as PNG beside `report.md`, as SVG inside `report.html`.

They are small enough for a phone, where a wide picture's labels would shrink to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from eval.responses import PLAIN

Report = dict[str, Any]

#: Colour-blind safe (Okabe and Ito), one a method; the page gives each a darker and a lighter shade.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: Text and axes; the page puts its own text colour in its place.
INK = "#1b2330"
_MARKERS = "osD^vP"
_WIDTH = 4.4  # inches
_FEWEST_STEPS = 20  # a conditional share of fewer steps is noise
_GIVEN, _BREAK_EVEN, _MEASURED, _TOKEN = "given all before it", "break-even", "measured", "one plain token"
_EXPLAIN = (_GIVEN, _BREAK_EVEN, _MEASURED, _TOKEN)
_PARTS = (("draft", COLOURS[0]), ("verify", COLOURS[4]), ("other", "#8a929c"))


@dataclass(frozen=True)
class Plot:
    """One picture: its section of the report, its title, the PNG's file name and the SVG's text."""

    section: str
    title: str
    file: str
    svg: str


Draw = Callable[[Any, Report], None]


def write_plots(report: Report, out: Path) -> list[Plot]:
    """Draw every picture that the report has figures for; PNG files go into `out`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawn = []
    for section, title, file, draw, height in _chosen(report):
        # The salt keeps ids apart, because all pictures share one page.
        with plt.rc_context({**_STYLE, "svg.hashsalt": file}):
            figure, axes = plt.subplots(figsize=(_WIDTH, height), layout="constrained")
            draw(axes, report)
            _legend_below(figure, axes)
            figure.savefig(out / f"{file}.png", dpi=200, facecolor="white")
            text = StringIO()
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
            plt.close(figure)
        drawn.append(Plot(section, title, f"{file}.png", text.getvalue()))
    return drawn


_STYLE = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}


def _chosen(report: Report) -> Iterator[tuple[str, str, str, Draw, float]]:
    methods = list(report["methods"].values())
    sets = len(_speed_rows(report))
    tall = 1.4 + 0.22 * len(methods) * sets
    yield "positions", "Acceptance by draft position", "acceptance_by_position", _positions, 3.5
    yield "contexts", "Acceptance length and break-even by context", "acceptance_by_context", _contexts, 3.5
    yield "predictions", "Speed-up at other acceptance lengths", "predicted_speed_up", _predictions, 3.5
    yield "data_sets", "Speed-up by data set", "speed_up", _speed_up, tall
    yield "time", "Time of a step", "time_split", _time_split, 1.5 + 0.32 * len(methods)
    if len(report.get("concurrency", ())) > 1:
        yield "concurrency", "Tokens a second by requests at once", "concurrency", _concurrency, 3.5


def _legend_below(figure: Any, axes: Any) -> None:
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = sorted(entries, key=lambda label: label in _EXPLAIN)  # methods first, in their order
    columns = 2 if max(map(len, labels)) > 16 else 3
    handles = [entries[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)))


def _each(report: Report) -> Iterator[tuple[str, str, str, Report]]:
    """Name, colour, marker and figures of every method."""
    for i, (name, method) in enumerate(report["methods"].items()):
        yield name, COLOURS[i % len(COLOURS)], _MARKERS[i % len(_MARKERS)], method


def _value(estimate: Report) -> float:
    return float("nan") if estimate["value"] is None else float(estimate["value"])


def _bars(estimates: list[Report]) -> list[list[float]]:
    """Lengths of the error bars, [2][n]."""
    known = [e if e["low"] is not None else {"value": 0.0, "low": 0.0, "high": 0.0} for e in estimates]
    return [
        [max(0.0, e["value"] - e["low"]) for e in known],
        [max(0.0, e["high"] - e["value"]) for e in known],
    ]


def _points(axes: Any, places: list[float], estimates: list[Report], **style: Any) -> None:
    axes.errorbar(places, [_value(e) for e in estimates], yerr=_bars(estimates), capsize=2.5, **style)


def _positions(axes: Any, report: Report) -> None:
    for index, (name, colour, marker, method) in enumerate(_each(report)):
        aside = (index - (len(report["methods"]) - 1) / 2) * 0.07  # intervals beside each other
        points = [p for p in method["positions"] if p["acceptance"]["value"] is not None]
        places = [p["position"] + aside for p in points]
        _points(axes, places, [p["acceptance"] for p in points], color=colour, marker=marker, label=name)
        shown = [p for p in points if p["conditional"]["denominator"] >= _FEWEST_STEPS]
        given = [p["conditional"]["value"] for p in shown]
        axes.plot([p["position"] + aside for p in shown], given, color=colour, linestyle=":")
    axes.plot([], [], color=INK, linestyle=":", label=_GIVEN)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("draft position in the block")
    axes.set_ylabel("accepted so far")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _buckets(report: Report) -> list[str]:
    found: dict[str, float] = {}
    for method in report["methods"].values():
        found |= {bucket: figures["mean_context"] for bucket, figures in method["contexts"].items()}
    return sorted(found, key=lambda bucket: found[bucket])


def _contexts(axes: Any, report: Report) -> None:
    buckets = _buckets(report)
    width = 0.8 / len(report["methods"])
    for index, (name, colour, _, method) in enumerate(_each(report)):
        contexts = method["contexts"]
        places = [buckets.index(b) + (index + 0.5) * width - 0.4 for b in contexts]
        lengths = [c["acceptance_length"] for c in contexts.values()]
        axes.bar(places, [e["value"] or 0.0 for e in lengths], width * 0.85, color=colour, label=name)
        _points(axes, places, lengths, color=INK, linestyle="none", linewidth=1)
        for place, figures in zip(places, contexts.values(), strict=True):
            even = figures["break_even"]["value"]
            if even is not None:
                ends = [place - width * 0.48, place + width * 0.48]
                axes.plot(ends, [even, even], color=INK, linewidth=2.4)
    axes.plot([], [], color=INK, linewidth=2.4, label=_BREAK_EVEN)
    most = {
        bucket: max(
            m["contexts"][bucket]["acceptance_length"]["n"]
            for m in report["methods"].values()
            if bucket in m["contexts"]
        )
        for bucket in buckets
    }
    axes.set_xticks(range(len(buckets)), [f"{bucket}\nn = {n}" for bucket, n in most.items()])
    axes.set_xlim(-0.6, len(buckets) - 0.4)
    axes.set_xlabel("tokens before the step")
    axes.set_ylabel("acceptance length")
    axes.grid(visible=False, axis="x")


def _predictions(axes: Any, report: Report) -> None:
    buckets = _buckets(report)
    for name, colour, marker, method in _each(report):
        for bucket, figures in method["contexts"].items():
            points = [p for p in figures["predicted_speed_up"] if p["value"] is not None]
            if not points:
                continue
            style = _DASHES[buckets.index(bucket) % len(_DASHES)]
            label = name if len(buckets) == 1 else f"{name}, {bucket}"
            places = [p["acceptance_length"] for p in points]
            axes.plot(places, [p["value"] for p in points], color=colour, linestyle=style, label=label)
            low, high = [p["low"] for p in points], [p["high"] for p in points]
            if None not in (*low, *high):
                axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
            tau, measured = figures["acceptance_length"]["value"], figures["speed_up"]["value"]
            if None not in (tau, measured):
                axes.plot([tau], [measured], color=colour, marker=marker, linestyle="none", markersize=7)
    axes.axhline(1.0, color=INK, linewidth=1)
    axes.plot([], [], color=INK, marker="o", linestyle="none", label=_MEASURED)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("acceptance length")
    axes.set_ylabel("predicted speed-up")


_DASHES = ("-", "--", "-.", ":")


def _speed_rows(report: Report) -> list[str]:
    sets = list(next(iter(report["methods"].values()))["data_sets"])
    return ["all", *sets] if len(sets) > 1 else sets


def _speed_up(axes: Any, report: Report) -> None:
    rows = _speed_rows(report)
    height = 0.8 / len(report["methods"])
    for index, (name, colour, marker, method) in enumerate(_each(report)):
        figures = [method["overall"] if row == "all" else method["data_sets"][row] for row in rows]
        speeds = [f["speed_up"] for f in figures]
        places = [i + (index + 0.5) * height - 0.4 for i in range(len(rows))]
        values = [_value(e) for e in speeds]
        style = {"color": colour, "marker": marker, "linestyle": "none", "capsize": 2.5, "label": name}
        axes.errorbar(values, places, xerr=_bars(speeds), **style)
    axes.axvline(1.0, color=INK, linewidth=1)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("decode speed-up (1 = plain decoding)")
    axes.grid(visible=False, axis="y")


def _time_split(axes: Any, report: Report) -> None:
    names = list(report["methods"])
    left = [0.0] * len(names)
    for part, colour in _PARTS:
        values = [(report["methods"][name]["time"][part]["value"] or 0.0) * 1e3 for name in names]
        axes.barh(names, values, left=left, color=colour, label=part, height=0.6)
        left = [a + b for a, b in zip(left, values, strict=True)]
    plain = report["plain"]["seconds_per_token"]["value"] * 1e3
    axes.axvline(plain, color=INK, linestyle="--", label=_TOKEN)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    axes.grid(visible=False, axis="y")


def _concurrency(axes: Any, report: Report) -> None:
    levels = report["concurrency"]
    places = [level["concurrency"] for level in levels]
    rates = [level["methods"][PLAIN]["tokens_per_second"] for level in levels]
    _points(axes, places, rates, color=INK, marker="o", linestyle="--", label=PLAIN)
    for name, colour, marker, _ in _each(report):
        rates = [level["methods"][name]["tokens_per_second"] for level in levels]
        _points(axes, places, rates, color=colour, marker=marker, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens a second")
