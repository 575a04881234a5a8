"""Training and held-out prompts of the quality bench, as JSON lines for `longdraft capture --regenerate`.

    python benchmarks/quality/prompts.py --gsm8k-train gsm8k_train.jsonl --gsm8k-test gsm8k_test.jsonl \
        --spec-bench spec_bench.jsonl --code . --out runs/quality/prompts

Training: GSM8K training questions, requests about the functions of the Python files under --code, the demo's
chat and editing prompts, and sessions of several turns. Held out: GSM8K test, HumanEval, Spec-Bench. Nothing
of a held-out set is trained on.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.prompts import load_prompts
from pipelines.demo_prompts import demo_prompts
from pipelines.files import write_text_atomically

Prompt = dict[str, Any]

CODE_REQUESTS = (
    "Explain what this function does, step by step.\n\n{code}",
    "Write unit tests for this function.\n\n{code}",
    "Rewrite this function with clearer names and a docstring.\n\n{code}",
    "Complete this Python function.\n\n{head}",
    "What can go wrong in this function?\n\n{code}",
)
FOLLOW_UPS = (
    "Now say the same in three short sentences.",
    "Give an example.",
    "Write your answer again as a numbered list.",
    "What did you leave out?",
)
FUNCTION_LINES = (4, 40)  # shorter ones say nothing, longer ones are cut by the context


def functions(root: Path) -> Iterator[str]:
    """Source of the functions under a folder, tests and hidden folders left out."""
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        if any(part.startswith(".") or part in ("tests", "benchmarks") for part in inside):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                source = ast.get_source_segment(text, node) or ""
                if FUNCTION_LINES[0] <= source.count("\n") + 1 <= FUNCTION_LINES[1]:
                    yield source


def code_prompts(root: Path, rng: random.Random) -> list[Prompt]:
    """One request about every function."""
    found = []
    for source in functions(root):
        lines = source.splitlines()
        request = rng.choice(CODE_REQUESTS)
        text = request.format(code=source, head="\n".join(lines[: max(2, len(lines) // 3)]))
        found.append({"prompt": text, "category": "code"})
    return found


def sessions(prompts: list[Prompt], rng: random.Random, count: int, turns: int) -> list[Prompt]:
    """Prompts with follow-ups, whose answers the target writes one by one."""
    chosen = rng.sample(prompts, min(count, len(prompts)))
    return [
        {"turns": [prompt["prompt"], *rng.sample(FOLLOW_UPS, turns - 1)], "category": "session"}
        for prompt in chosen
    ]


def questions(path: Path, count: int, rng: random.Random) -> list[Prompt]:
    """GSM8K questions without their answers: the target writes its own."""
    rows = [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": question, "category": "math"} for question in rng.sample(rows, min(count, len(rows)))]


def training_prompts(options: argparse.Namespace) -> list[Prompt]:
    """All kinds in a seeded order."""
    rng = random.Random(options.seed)
    demo = [prompt for prompt in demo_prompts("train", options.seed) if prompt["category"] != "math"]
    prompts = [
        *questions(options.gsm8k_train, options.math, rng),
        *rng.sample(code := code_prompts(options.code, rng), min(options.functions, len(code))),
        *demo,
        *sessions(demo, rng, options.sessions, turns=3),
    ]
    rng.shuffle(prompts)
    return prompts


def held_out_prompts(options: argparse.Namespace) -> dict[str, list[Prompt]]:
    """The same prompts for every drafter: the first turns of each set, spread over its categories."""
    sources = {
        "gsm8k": f"gsm8k={options.gsm8k_test}",
        "humaneval": "humaneval",
        "spec_bench": f"spec_bench={options.spec_bench}",
    }
    return {
        name: [
            {"prompt": prompt.turns[0], "category": f"{name}/{prompt.category}"}
            for prompt in load_prompts(source, limit=options.held_out, seed=options.seed)
        ]
        for name, source in sources.items()
    }


def write_jsonl(path: Path, prompts: list[Prompt]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, "".join(json.dumps(prompt) + "\n" for prompt in prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gsm8k-train", type=Path, required=True)
    parser.add_argument("--gsm8k-test", type=Path, required=True)
    parser.add_argument("--spec-bench", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True, help="its Python functions are asked about")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--math", type=int, default=2500, help="GSM8K training questions")
    parser.add_argument("--functions", type=int, default=800, help="functions asked about")
    parser.add_argument("--sessions", type=int, default=150, help="sessions of three turns")
    parser.add_argument("--held-out", type=int, default=40, help="prompts of each held-out set")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    training = training_prompts(options)
    write_jsonl(options.out / "train.jsonl", training)
    print(f"train: {len(training)}")
    for name, prompts in held_out_prompts(options).items():
        write_jsonl(options.out / f"heldout-{name}.jsonl", prompts)
        print(f"held out, {name}: {len(prompts)}")


if __name__ == "__main__":
    main()
