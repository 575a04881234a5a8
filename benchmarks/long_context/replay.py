"""Acceptance of drafters on captured answers: greedy speculative decoding replayed from a feature store.

With greedy decoding the target's answer does not depend on the drafter, so a store of greedy answers
(`capture --regenerate`) holds everything that a verify step would say. Replaying it needs no target forward,
and many drafters cost little more than one. What it cannot give is time: break-even comes from
`longdraft eval`.

    python benchmarks/long_context/replay.py --target runs/demo/target --store runs/long/store-heldout \
        --prompts 'runs/long/prompts/ctx-*.jsonl' --drafter short=runs/long/short/export/last \
        --out runs/long/replay.jsonl
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from drafter.checkpoint import load_drafter
from eval.block_drafter import BlockDrafter
from eval.sampling import Sampling
from eval.target import Target
from pipelines.records import parse_record
from pipelines.store import FeatureStore


@torch.inference_mode()
def replay(
    drafter: BlockDrafter, ids: Sequence[int], first: int, rows_TF: torch.Tensor
) -> list[tuple[int, int]]:
    """(drafted, emitted) of every step of greedy speculative decoding whose answer is `ids[first:]`.

    Args:
        drafter: to replay.
        ids: prompt and answer.
        first: index of the answer's first token, which the prefill gives.
        rows_TF: features of ids[:-1].
    """
    drafter.start(ids[:first], Sampling(), None)
    drafter.prefill(rows_TF[:first])
    drafter.observe(ids[first : first + 1], None)
    steps = []
    at = first  # of the anchor
    while at < len(ids) - 1:
        left = len(ids) - 1 - at
        drafts = drafter.draft(torch.tensor([ids[at]]), min(drafter.block - 1, left)).ids.tolist()
        wanted = ids[at + 1 : at + 1 + len(drafts)]
        agreed = next((i for i, (a, b) in enumerate(zip(drafts, wanted, strict=True)) if a != b), len(drafts))
        emitted = min(agreed + 1, left)
        drafter.observe(ids[at + 1 : at + 1 + emitted], rows_TF[at : at + emitted])
        steps.append((len(drafts), emitted))
        at += emitted
    return steps


def categories(pattern: str) -> dict[str, tuple[str, str, str]]:
    """Record id -> (data set, item, category) of all prompt files."""
    found = {}
    for name in sorted(glob.glob(pattern)):  # noqa: PTH207 - the pattern may be absolute
        for line in Path(name).read_text(encoding="utf-8").splitlines():
            raw = json.loads(line)
            found[parse_record(raw).id] = (Path(name).stem, raw["id"], raw["category"])
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--prompts", required=True, help="glob of the prompt files")
    parser.add_argument("--drafter", action="append", required=True, help="NAME=FOLDER")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    head = Target.load(
        options.target, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa", prepack=False
    ).frozen_head
    drafters = []
    for given in options.drafter:
        name, _, folder = given.partition("=")
        drafters.append(BlockDrafter(load_drafter(Path(folder), torch.float32), head, name=name))
    known = categories(options.prompts)
    store = FeatureStore.open(options.store)
    lines: list[dict[str, Any]] = []
    for index in range(len(store)):
        sample = store.sample(index)
        if sample.conversation not in known:
            continue
        dataset, item, category = known[sample.conversation]
        ids = sample.token_ids.tolist()
        first = int(sample.loss_mask.nonzero()[0])
        rows_TF = store.rows(index, 0, len(ids) - 1).float()
        lines.append({
            "dataset": dataset, "item": item, "category": category, "context": first, "answer": ids[first:],
            "steps": {d.name: replay(d, ids, first, rows_TF) for d in drafters},
        })  # fmt: skip
        print(f"{index + 1}/{len(store)} {dataset} {item}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
