"""Tables and plot of the proof at length, from `longdraft replay` and, for times, from `longdraft eval`.

    python benchmarks/long_context/table.py --replay runs/long/replay.json --store runs/long/store-heldout \
        --prompts 'runs/long/prompts/ctx-*.jsonl' --eval runs/long/eval --pair mixed short \
        --out benchmarks/long_context/results/smollm2

Writes OUT.json, OUT.md and OUT.png. Prompts are the unit of every interval and test; two drafters, and two
lengths of one drafter, are compared item by item.
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from eval.decode import Step
from eval.metrics import Ratio, break_even, ratio
from eval.statistics import compare, estimate, estimate_quotient, interval, resampled_sums
from pipelines.records import parse_record
from pipelines.store import FeatureStore

LOOP = 0.5  # an answer with fewer distinct 4-grams than this share counts as a loop
SEED = 0

Line = dict[str, Any]


def load(replay: Path, store: Path, prompts: str) -> list[Line]:
    """A line a held-out prompt: length class, item, category, context, answer, sums of every drafter."""
    known = {}
    for name in sorted(glob.glob(prompts)):  # noqa: PTH207 - the pattern may be absolute
        for text in Path(name).read_text(encoding="utf-8").splitlines():
            raw = json.loads(text)
            known[parse_record(raw).id] = (Path(name).stem, raw["id"], raw["category"])
    drafters = json.loads(replay.read_text(encoding="utf-8"))["drafters"]
    captured = FeatureStore.open(store)
    lines = []
    for sample in map(captured.sample, range(len(captured))):
        sums = {name: found["samples"].get(sample.id) for name, found in drafters.items()}
        if sample.conversation in known and all(sums.values()):
            dataset, item, category = known[sample.conversation]
            first = int(sample.loss_mask.nonzero()[0])
            lines.append({
                "dataset": dataset, "item": item, "category": category, "context": first,
                "answer": sample.token_ids[first:].tolist(), "sums": sums,
            })  # fmt: skip
    return lines


def distinct_share(ids: list[int], n: int = 4) -> float:
    """Distinct n-grams / n-grams of an answer; 1 for one shorter than n."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def acceptance(lines: Iterable[Line], name: str) -> Ratio:
    """Emitted tokens / verify steps, a prompt an entry."""
    return ratio((line["sums"][name] for line in lines), "emitted tokens / verify steps")


def by_length(lines: list[Line]) -> dict[str, list[Line]]:
    """Lines of each held-out length, shortest first, in the order of their items."""
    names = sorted({line["dataset"] for line in lines})
    return {
        name: sorted((x for x in lines if x["dataset"] == name), key=lambda x: x["item"]) for name in names
    }


def shared(first: list[Line], second: list[Line]) -> tuple[list[Line], list[Line]]:
    """The lines of the items that both lists hold, in the same order."""
    items = {line["item"] for line in first} & {line["item"] for line in second}
    return tuple([x for x in lines if x["item"] in items] for lines in (first, second))  # type: ignore[return-value]


def change_of_difference(far: list[Line], near: list[Line], first: str, second: str) -> dict[str, float]:
    """first - second at the longest length minus the same at the shortest, with its bootstrap interval."""
    columns = np.array([
        [*f["sums"][first], *f["sums"][second], *n["sums"][first], *n["sums"][second]]
        for f, n in zip(far, near, strict=True)
    ])  # fmt: skip

    def change(sums_NC: Any) -> Any:
        taus = sums_NC[..., 0::2] / sums_NC[..., 1::2]
        return taus[..., 0] - taus[..., 1] - taus[..., 2] + taus[..., 3]

    low, high = interval(change(resampled_sums(columns.astype(float), seed=SEED)))
    return {"difference": float(change(columns.sum(0))), "low": low, "high": high}


def figures(lines: list[Line], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """All tables of one set of prompts."""
    names = list(lines[0]["sums"])
    lengths = by_length(lines)
    shortest, *_, longest = lengths.values()
    near, far = shared(shortest, longest)
    return {
        "lengths": {
            length: {
                "n": len(found),
                "context": [min(x["context"] for x in found), max(x["context"] for x in found)],
                "loops": sum(distinct_share(x["answer"]) < LOOP for x in found),
                "acceptance_length": {
                    name: estimate(acceptance(found, name), seed=SEED).to_dict() for name in names
                },
                "differences": {
                    f"{a} - {b}": compare(acceptance(found, a), acceptance(found, b), seed=SEED).to_dict()
                    for a, b in pairs
                },
            }
            for length, found in lengths.items()
        },
        "longest_minus_shortest": {
            name: compare(acceptance(far, name), acceptance(near, name), seed=SEED).to_dict()
            for name in names
        },
        "change_of_differences": {f"{a} - {b}": change_of_difference(far, near, a, b) for a, b in pairs},
        "categories": {
            kind: {
                length: {
                    name: acceptance([x for x in found if x["category"] == kind], name).value
                    for name in names
                }
                for length, found in lengths.items()
            }
            for kind in sorted({x["category"] for x in lines})
        },
    }


def timing(folder: Path) -> dict[str, Any]:
    """Break-even and acceptance per length from the responses of `longdraft eval`."""
    lines = [json.loads(x) for x in (folder / "responses.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {}
    for dataset in sorted({x["dataset"] for x in lines if x["error"] is None}):
        runs = [x["turns"][0]["runs"] for x in lines if x["dataset"] == dataset and x["error"] is None]
        steps = {name: [[Step(*s) for s in run[name][0]["steps"]] for run in runs] for name in runs[0]}
        found[dataset] = {
            name: {
                "n": len(runs),
                "acceptance_length": estimate(
                    ratio(((sum(s.emitted for s in p), len(p)) for p in prompts), "emitted / steps"),
                    seed=SEED,
                ).to_dict(),
                "break_even": estimate_quotient(break_even(prompts, steps["plain"]), seed=SEED).to_dict(),
            }
            for name, prompts in steps.items()
            if name != "plain"
        }
        plain = ratio(((sum(s.seconds for s in p), len(p)) for p in steps["plain"]), "seconds / token")
        found[dataset]["plain_seconds_per_token"] = estimate(plain, seed=SEED).to_dict()
    return found


def cell(figure: dict[str, Any], value: str = "value") -> str:
    if figure[value] is None:
        return ""
    if figure["low"] is None:
        return f"{figure[value]:.2f}"
    return f"{figure[value]:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        + ["| " + " | ".join(row) + " |" for row in rows]
    )


def markdown(result: dict[str, Any]) -> str:
    """The tables for reading."""
    parts = []
    for title, key in (("All prompts", "all"), ("Without looping answers", "without_loops")):
        found = result[key]
        names = list(found["longest_minus_shortest"])
        lengths = found["lengths"]
        parts.append(f"### {title}\n\nAcceptance length, [95 % interval over prompts]\n")
        rows = [
            [f"{v['context'][0]:,}-{v['context'][1]:,}", str(v["n"]), str(v["loops"])]
            + [cell(v["acceptance_length"][name]) for name in names]
            for v in lengths.values()
        ]
        change = found["longest_minus_shortest"]
        last = [f"{cell(change[n], 'difference')} p {change[n]['p_value']:.3f}" for n in names]
        n = str(next(iter(change.values()))["n"])
        parts.append(
            table(["context", "n", "loops", *names], [*rows, ["longest - shortest", n, "", *last]]) + "\n"
        )
        pairs = list(next(iter(lengths.values()))["differences"])
        parts.append("Paired differences of acceptance length\n")
        rows = [
            [f"{v['context'][0]:,}-{v['context'][1]:,}"]
            + [
                f"{cell(v['differences'][p], 'difference')} p {v['differences'][p]['p_value']:.3f}"
                for p in pairs
            ]
            for v in lengths.values()
        ]
        change = found["change_of_differences"]
        rows.append(["longest - shortest", *(cell(change[pair], "difference") for pair in pairs)])
        parts.append(table(["context", *pairs], rows) + "\n")
    if result.get("timing"):
        names = [n for n in next(iter(result["timing"].values())) if n != "plain_seconds_per_token"]
        parts.append(
            "### Break-even\n\nAcceptance length at which a step costs what it saves (`longdraft eval`)\n"
        )
        rows = [
            [length, str(v[names[0]]["n"]), f"{1000 * v['plain_seconds_per_token']['value']:.0f}"]
            + [
                f"{cell(v[name]['break_even'])}; τ {v[name]['acceptance_length']['value']:.2f}"
                for name in names
            ]
            for length, v in result["timing"].items()
        ]
        parts.append(table(["length", "n", "plain ms/token", *names], rows) + "\n")
    return "\n".join(parts)


def plot(result: dict[str, Any], path: Path) -> None:
    """Acceptance length against context, a line a drafter, bars are 95 % intervals; break-even dotted."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), dpi=90, sharey=True, layout="constrained")
    for axis, key, title in zip(
        axes, ("all", "without_loops"), ("all prompts", "without looping answers"), strict=True
    ):
        found = result[key]["lengths"].values()
        for shift, name in enumerate(result[key]["longest_minus_shortest"]):
            at = [sum(v["context"]) / 2 * 1.02**shift for v in found]
            taus = [v["acceptance_length"][name] for v in found]
            value = [t["value"] for t in taus]
            bars = [[t["value"] - t["low"] for t in taus], [t["high"] - t["value"] for t in taus]]
            axis.errorbar(
                at, value, yerr=bars, marker="o", markersize=3, capsize=2, linewidth=1.2, label=name
            )
        middles = [sum(v["context"]) / 2 for v in found]
        axis.set(xscale="log", xlabel="context, tokens", title=title)
        axis.set_xticks(middles, [f"{round(at / 1024, 1):g}K" for at in middles])
        axis.minorticks_off()
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("acceptance length")
    axes[1].legend(fontsize=7)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replay", type=Path, required=True, help="JSON of `longdraft replay`")
    parser.add_argument("--store", type=Path, required=True, help="the store that was replayed")
    parser.add_argument("--prompts", required=True, help="glob of its prompt files")
    parser.add_argument("--eval", type=Path, help="folder of `longdraft eval`, for break-even")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("FIRST", "SECOND"))
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    options = parser.parse_args(argv)
    lines = load(options.replay, options.store, options.prompts)
    sound = [line for line in lines if distinct_share(line["answer"]) >= LOOP]
    pairs = [tuple(pair) for pair in options.pair]
    result = {
        "all": figures(lines, pairs),
        "without_loops": figures(sound, pairs),
        "seed": SEED,
        "loop": LOOP,
    }
    if options.eval:
        result["timing"] = timing(options.eval)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    options.out.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    plot(result, options.out.with_suffix(".png"))
    print(markdown(result))


if __name__ == "__main__":
    main()
