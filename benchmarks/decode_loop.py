"""This project's decode loop against z-lab's (PyPI dflash 0.1.0): same weights, same prompts, one run.

Both loops decode every prompt in turn, in an order that alternates (A B, B A, ...), after one untimed round.
Tokens are compared prompt by prompt. Decode seconds leave the prefill out. The ratio is the sum of theirs /
the sum of ours, with a 95 % bootstrap interval over prompts. `ours, plain kernels` is the same loop without
packed weights and with transformers' own attention, that is on the kernels that their loop runs on. With
--batches, our loop with several prompts at once follows, in tokens a second.

    OMP_NUM_THREADS=2 python benchmarks/decode_loop.py --target runs/demo/target \\
        --drafter runs/demo/run/export/best --json benchmarks/results/decode_loop.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path

import dflash.model as zlab
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter.checkpoint import load_drafter
from eval.batch import decode_batch
from eval.block_drafter import BlockDrafter
from eval.decode import Limits, decode_speculative
from eval.metrics import Ratio
from eval.prepack import prepack_linears
from eval.prompts import load_prompts, render
from eval.sampling import Sampling
from eval.statistics import estimate
from eval.target import Target

GREEDY = {"sampling": Sampling(), "generator": None}


def theirs(folder: str, drafter_dir: str, new: int, block: int):
    """z-lab's loop as a function of prompt ids: (tokens, decode seconds, steps)."""
    zlab._cuda_time = time.perf_counter  # it would wait for a GPU
    target = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    name = json.loads(Path(drafter_dir, "config.json").read_text())["architectures"][0]
    model = getattr(zlab, name).from_pretrained(drafter_dir, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()

    def run(ids):
        stats = zlab.dflash_generate(
            model, target, torch.tensor([ids]), new, None, block_size=block, return_stats=True
        )
        tokens = stats.output_ids[0, len(ids) :].tolist()
        return tokens, stats.time_per_output_token * stats.num_output_tokens, len(stats.acceptance_lengths)

    return run


def ours(folder: str, drafter_dir: str, new: int, block: int, *, packed: bool):
    """This project's loop, on its own kernels or on plain ones; and the pieces that a batch needs."""
    target = Target.load(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention="folded" if packed else "sdpa",
        prepack=packed,
    )
    model = load_drafter(drafter_dir, torch.float32)
    if packed:
        prepack_linears(model)
    drafter = BlockDrafter(model, target.frozen_head, name="ours", block=block)

    def run(ids):
        decoded = decode_speculative(target, drafter, ids, limits=Limits(new), **GREEDY)
        return decoded.ids, decoded.decode_seconds, len(decoded.steps)

    return run, target, drafter


def measure(loops: dict, prompts: list[list[int]], repeats: int) -> dict[str, dict]:
    for run in loops.values():
        run(prompts[0])
    seconds = {name: np.zeros((repeats, len(prompts))) for name in loops}
    tokens: dict[str, list] = {name: [] for name in loops}
    steps = dict.fromkeys(loops, 0)
    names = list(loops)
    for repeat in range(repeats):
        for place, ids in enumerate(prompts):
            turn = (place + repeat) % len(names)
            for name in [*names[turn:], *names[:turn]]:
                found, took, count = loops[name](ids)
                seconds[name][repeat, place] = took
                if repeat == 0:
                    tokens[name].append(found)
                    steps[name] += count
    return {
        name: {"seconds": np.median(seconds[name], axis=0), "tokens": tokens[name], "steps": steps[name]}
        for name in names
    }


def batches(target, drafter, prompts, sizes, new) -> list[dict]:
    found = []
    for size in sizes:
        groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        count, seconds, ids = 0, 0.0, []
        for group in groups:
            done = decode_batch(
                target, drafter.batched(len(group), **GREEDY), group, limits=Limits(new), **GREEDY
            )
            ids += [decoded.ids for decoded in done]
            count += sum(len(decoded.ids) - 1 for decoded in done)
            seconds += sum(decoded.decode_seconds for decoded in done)
        found.append({"batch_size": size, "tokens_per_second": count / seconds, "ids": ids})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--data", default="builtin")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    prompts = [
        render(tokenizer, [{"role": "user", "content": p.turns[0]}], {})
        for p in load_prompts(given.data, limit=given.prompts, seed=0)
    ]
    common = (given.target, given.drafter, given.tokens, given.block)
    fast, target, drafter = ours(*common, packed=True)
    plain, *_ = ours(*common, packed=False)
    results = measure(
        {"z-lab": theirs(*common), "ours": fast, "ours, plain kernels": plain}, prompts, given.repeats
    )
    base = results["z-lab"]
    rows = []
    for name, found in results.items():
        ratio = estimate(
            Ratio(base["seconds"], found["seconds"], "z-lab seconds / seconds"), seed=0
        ).to_dict()
        equal = sum(a == b for a, b in zip(base["tokens"], found["tokens"], strict=True))
        rows.append({
            "loop": name,
            "tokens_equal": equal,
            "steps": found["steps"],
            "seconds": float(found["seconds"].sum()),
            "ratio": ratio,
        })  # fmt: skip
    together = batches(target, drafter, prompts, given.batches, given.tokens)
    for row in together:
        row["tokens_equal"] = sum(
            a == b for a, b in zip(results["ours"]["tokens"], row.pop("ids"), strict=True)
        )
    report = {
        "prompts": len(prompts),
        "tokens": given.tokens,
        "block": given.block,
        "repeats": given.repeats,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "dflash")},
        },
        "loops": rows,
        "batches": together,
    }
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


def table(report: dict) -> str:
    """Two Markdown tables."""
    lines = ["| loop | tokens equal | verify steps | decode seconds | z-lab's seconds / these |"]
    lines.append("|---|---|---|---|---|")
    for row in report["loops"]:
        ratio = row["ratio"]
        lines.append(
            f"| {row['loop']} | {row['tokens_equal']}/{report['prompts']} | {row['steps']} | "
            f"{row['seconds']:.2f} | {ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] |"
        )
    lines += ["", "| prompts at once | tokens equal | tokens / s |", "|---|---|---|"]
    for row in report["batches"]:
        equal = f"{row['tokens_equal']}/{report['prompts']}"
        lines.append(f"| {row['batch_size']} | {equal} | {row['tokens_per_second']:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
