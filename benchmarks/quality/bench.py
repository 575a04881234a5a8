"""Trains a list of recipes on one corpus and compares what their drafts accept, paired by prompt.

    python benchmarks/quality/bench.py --prompts runs/quality/prompts --out runs/quality

Stages, each a command of this project that resumes after a kill and does nothing when it is done:

1. `target`, `capture`: a store for every file of training prompts, its answers at the temperature that ends
   the file's name, and a store of greedy answers for every held-out set;
2. `train`: every recipe of recipes.yaml with every seed;
3. `replay`: acceptance length of all of them on the held-out stores;
4. a table: each recipe with its interval, and its difference to the baseline with interval and p-value.

The prompts come from `prompts.py` beside this file. `--only NAME` (repeatable) limits stages 2 to 4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.metrics import Ratio, ratio
from eval.statistics import compare, estimate
from pipelines.files import write_json_atomically, write_text_atomically

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Recipe:
    """One training run.

    Attributes:
        name: of the recipe.
        seed: of the run.
        run: the run file as nested data.
    """

    name: str
    seed: int
    run: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name}-s{self.seed}"


def load_recipes(path: Path, only: Sequence[str] = ()) -> tuple[str, list[Recipe]]:
    """(name of the baseline, runs).

    Raises:
        SystemExit: the baseline, or a name of `only`, is no recipe.
    """
    plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = list(plan["recipes"])
    if unknown := sorted({plan["baseline"], *only} - set(names)):
        raise SystemExit(f"{path}: no recipe named {', '.join(unknown)}; it has {', '.join(names)}")
    chosen = [name for name in names if not only or name in only or name == plan["baseline"]]
    runs = {name: changed(plan["base"], plan["recipes"][name]) for name in chosen}
    return plan["baseline"], [Recipe(name, seed, runs[name]) for name in chosen for seed in plan["seeds"]]


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested data with dotted keys set; a null takes the key away."""
    copy: dict[str, Any] = json.loads(json.dumps(base))
    for dotted, value in changes.items():
        *sections, last = dotted.split(".")
        node = copy
        for section in sections:
            node = node.setdefault(section, {})
        if value is None and last != "sliding_window":  # there null is a value: no window
            node.pop(last, None)
        else:
            node[last] = value
    return copy


def command(arguments: Sequence[str]) -> None:
    """Run a command of the project; its failure ends the bench, which resumes when called again."""
    print("longdraft", *arguments, flush=True)
    subprocess.run([sys.executable, str(ROOT / "cli.py"), *arguments], check=True)


def make_corpus(prompts: Path, out: Path, tokens: int, call: Call) -> list[Path]:
    """The target, the training stores and the held-out stores; returns the latter."""
    target = out / "target"
    if not (target / "config.json").exists():
        call(["target", str(target)])
    limits = ["--max-new-tokens", str(tokens)]
    for file in sorted(prompts.glob("train-*.jsonl")):
        data = ["--data", str(file), "--out", str(out / f"store-{file.stem}")]
        sampling = ["--regenerate", "--temperature", file.stem.rpartition("-")[2], "--last-hidden"]
        call(["capture", "--target", str(target), *data, *limits, *sampling])
    stores = []
    for file in sorted(prompts.glob("heldout-*.jsonl")):
        stores.append(out / f"store-{file.stem}")
        data = ["--data", str(file), "--out", str(stores[-1])]
        call(["capture", "--target", str(target), *data, *limits, "--regenerate"])
    return stores


def train(recipe: Recipe, out: Path, call: Call) -> Path:
    """Train one recipe; returns its export."""
    folder = out / "runs" / recipe.label
    run = {**recipe.run, "out": str(folder), "seed": recipe.seed}
    run["data"] = {**run.get("data", {}), "stores": [str(path) for path in sorted(out.glob("store-train-*"))]}
    file = out / "runs" / f"{recipe.label}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, yaml.safe_dump(run, sort_keys=False))
    call(["train", str(file), "--json", str(out / "runs" / f"{recipe.label}.json")])
    return folder / "export" / "best"


def replay(recipe: Recipe, export: Path, stores: Sequence[Path], out: Path, call: Call) -> Path:
    """Acceptance of one recipe on every held-out store."""
    file = out / "runs" / f"{recipe.label}.replay.json"
    if not file.exists():
        data = [part for store in stores for part in ("--store", str(store))]
        target = ["--target", str(out / "target")]
        call(["replay", *target, *data, "--drafter", f"{recipe.label}={export}", "--json", str(file)])
    return file


@dataclass(frozen=True)
class Row:
    """One recipe over all its seeds."""

    name: str
    acceptance: dict[str, Any]
    difference: dict[str, Any] | None
    by_seed: list[float]
    seconds: float
    slots_per_second: float
    train_recall: float | None
    heldout_recall: float | None


def table(recipes: Sequence[Recipe], baseline: str, out: Path) -> list[Row]:
    """A row a recipe; seeds are pooled prompt by prompt, so prompts stay the unit of every interval."""
    pooled = {name: pool([r for r in recipes if r.name == name], out) for name in names_of(recipes)}
    rows = []
    for name, (figure, seeds) in pooled.items():
        results = [
            json.loads((out / "runs" / f"{r.label}.json").read_text()) for r in recipes if r.name == name
        ]
        difference = None if name == baseline else compare(figure, pooled[baseline][0], seed=0).to_dict()
        recalls = [result["validation"].get("recall_by_slot", [None])[0] for result in results]
        rows.append(
            Row(
                name,
                estimate(figure, seed=0).to_dict(),
                difference,
                seeds,
                mean([result["seconds"] for result in results]),
                mean([result["slots_per_second"] for result in results]),
                mean([result["train"].get("recall") for result in results]),
                mean(recalls),
            )
        )
    return rows


def names_of(recipes: Sequence[Recipe]) -> list[str]:
    return list(dict.fromkeys(recipe.name for recipe in recipes))


def mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def pool(recipes: Sequence[Recipe], out: Path) -> tuple[Ratio, list[float]]:
    """Emitted tokens over verify steps of every prompt, all seeds together, and each seed's own figure."""
    sums: dict[str, list[int]] = {}
    seeds = []
    for recipe in recipes:
        report = json.loads((out / "runs" / f"{recipe.label}.replay.json").read_text())
        figures = report["drafters"][recipe.label]
        seeds.append(figures["acceptance_length"]["value"])
        for sample_id, (emitted, steps) in figures["samples"].items():
            total = sums.setdefault(sample_id, [0, 0])
            total[0], total[1] = total[0] + emitted, total[1] + steps
    return ratio([tuple(sums[key]) for key in sorted(sums)], "emitted tokens / verify steps"), seeds  # type: ignore[misc]


def markdown(rows: Sequence[Row], baseline: str) -> str:
    lines = [
        f"| recipe | acceptance length, 95 % interval | by seed | minus {baseline} | p | slots/s | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tau, delta = row.acceptance, row.difference
        change = (
            f"{delta['difference']:+.3f} [{delta['low']:+.3f}, {delta['high']:+.3f}] | {delta['p_value']:.3g}"
            if delta
            else " | "
        )
        seeds = " ".join(f"{value:.3f}" for value in row.by_seed)
        lines.append(
            f"| {row.name} | {tau['value']:.3f} [{tau['low']:.3f}, {tau['high']:.3f}] | {seeds} | {change} | "
            f"{row.slots_per_second:,.0f} | {row.seconds / 60:.1f} |"
        )
    n = rows[0].acceptance["n"] if rows else 0
    note = f"n = {n} held-out prompts, greedy answers, replayed; seeds pooled by prompt."
    return "\n".join([*lines, "", note])


def main(call: Call = command, arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipes", type=Path, default=Path(__file__).with_name("recipes.yaml"))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--max-new-tokens", type=int, default=112)
    options = parser.parse_args(arguments)
    baseline, recipes = load_recipes(options.recipes, options.only)
    stores = make_corpus(options.prompts, options.out, options.max_new_tokens, call)
    for recipe in recipes:
        replay(recipe, train(recipe, options.out, call), stores, options.out, call)
    rows = table(recipes, baseline, options.out)
    text = markdown(rows, baseline)
    write_text_atomically(options.out / "quality.md", text + "\n")
    write_json_atomically(options.out / "quality.json", [vars(row) for row in rows])
    print(text)


if __name__ == "__main__":
    main()
