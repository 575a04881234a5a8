"""Training and held-out prompts of the quality bench, as JSON lines for `longdraft capture --regenerate`.

    python benchmarks/quality/prompts.py --gsm8k-train gsm8k_train.jsonl --gsm8k-test gsm8k_test.jsonl \
        --spec-bench spec_bench.jsonl --target runs/quality/target --out runs/quality/prompts

Training, a file for every kind and temperature of the answers:

- math: GSM8K training questions;
- code: functions of this project and of the standard library, to be completed from their docstrings or talked
  about;
- chat: the demo's chat and editing prompts, documentation to sum up, sessions of several turns, and prompts
  that the target writes itself when it is given nothing but the start of a user's turn.

Held out: GSM8K test, HumanEval, Spec-Bench. Nothing of a held-out set is trained on.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.prompts import load_prompts
from pipelines.demo_prompts import demo_prompts
from pipelines.files import write_text_atomically

Prompt = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
COMPLETION = "Complete this Python function. Answer with the whole function.\n\n\n{head}\n"
CODE_REQUESTS = (
    "Explain what this function does, step by step.\n\n{code}",
    "Write unit tests for this function.\n\n{code}",
    "Rewrite this function with clearer names and a docstring.\n\n{code}",
    "What can go wrong in this function?\n\n{code}",
)
TEXT_REQUESTS = (
    "Summarize this text in two sentences.\n\n{text}",
    "What are the main points of this text?\n\n{text}",
    "Read this text and answer: what is it for, and who needs it?\n\n{text}",
    "Explain this text to a beginner.\n\n{text}",
)
FOLLOW_UPS = (
    "Now say the same in three short sentences.",
    "Give an example.",
    "Write your answer again as a numbered list.",
    "What did you leave out?",
)
FUNCTION_LINES = (4, 40)  # shorter ones say nothing, longer ones are cut by the context
TEXT_CHARACTERS = (300, 2400)
SAMPLED_SHARE = 0.2  # of the training prompts; their answers are drawn at SAMPLED_TEMPERATURE
SAMPLED_TEMPERATURE = 0.7
WRITTEN_TOKENS = 96
WRITTEN_CHARACTERS = (15, 400)


def sources(roots: Sequence[Path]) -> Iterator[ast.Module]:
    """Parsed Python files under folders; tests, installed packages and hidden folders are left out."""
    left_out = ("tests", "test", "idle_test", "benchmarks", "site-packages")
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root).parts
            if any(part.startswith(".") or part in left_out for part in inside):
                continue
            try:
                yield ast.parse(path.read_text(encoding="utf-8"))
            except (UnicodeDecodeError, SyntaxError, ValueError):
                continue


def functions(root: Path) -> Iterator[str]:
    """Source of the functions under a folder."""
    for tree in sources([root]):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                source = ast.unparse(node)
                if FUNCTION_LINES[0] <= source.count("\n") + 1 <= FUNCTION_LINES[1]:
                    yield source


def heads(root: Path) -> Iterator[str]:
    """Signature and docstring of the functions under a folder that have both, without self."""
    for tree in sources([root]):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.args.args:
                if node.args.args[0].arg in ("self", "cls") or len(node.body) < 2:
                    continue
                head = f"def {node.name}({ast.unparse(node.args)}):"
                lines = (ast.get_docstring(node) or "").splitlines()
                yield "\n    ".join([head, f'"""{lines[0]}', *lines[1:12]]) + '\n    """'


def texts(root: Path) -> Iterator[str]:
    """Docstrings under a folder that are long enough to be summed up."""
    for tree in sources([root]):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = (ast.get_docstring(node) or "").strip()
                if TEXT_CHARACTERS[0] <= len(text) <= TEXT_CHARACTERS[1]:
                    yield text


def code_prompts(roots: Sequence[Path], rng: random.Random, completions: int, talk: int) -> list[Prompt]:
    """Functions to complete, and requests about functions."""
    bodies = {body for root in roots for body in functions(root)}
    prompts = [
        COMPLETION.format(head=head)
        for head in some({h for root in roots for h in heads(root)}, completions, rng)
    ]
    prompts += [rng.choice(CODE_REQUESTS).format(code=body) for body in some(bodies, talk, rng)]
    return [{"prompt": prompt, "category": "code"} for prompt in prompts]


def some(items: set[str], count: int, rng: random.Random) -> list[str]:
    """At most `count` of the items."""
    return rng.sample(sorted(items), min(count, len(items)))


def text_prompts(roots: Sequence[Path], rng: random.Random, count: int) -> list[Prompt]:
    found = some({text for root in roots for text in texts(root)}, count, rng)
    return [{"prompt": rng.choice(TEXT_REQUESTS).format(text=text), "category": "chat"} for text in found]


def sessions(prompts: list[Prompt], rng: random.Random, count: int, turns: int) -> list[Prompt]:
    """Prompts with follow-ups, whose answers the target writes one by one."""
    chosen = rng.sample(prompts, min(count, len(prompts)))
    return [
        {"turns": [prompt["prompt"], *rng.sample(FOLLOW_UPS, turns - 1)], "category": "chat"}
        for prompt in chosen
    ]


def questions(path: Path, count: int, rng: random.Random) -> list[Prompt]:
    """GSM8K questions without their answers: the target writes its own."""
    rows = [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": question, "category": "math"} for question in rng.sample(rows, min(count, len(rows)))]


def written_by(target: Path, count: int, seed: int) -> list[Prompt]:
    """What the target writes at temperature 1 after the start of a user's turn of its chat template.

    Source: the idea is Magpie's (arXiv:2406.08464).
    """
    from vllm import LLM, SamplingParams

    engine = LLM(str(target), dtype="float32", max_model_len=1024, max_num_seqs=128, seed=seed)
    start, stop = user_turn(engine.get_tokenizer())
    sampling = SamplingParams(
        temperature=1.0, top_p=0.95, max_tokens=WRITTEN_TOKENS, stop=[stop], n=count, seed=seed
    )
    (request,) = engine.generate([start], sampling)
    found = {output.text.strip() for output in request.outputs if output.finish_reason == "stop"}
    shortest, longest = WRITTEN_CHARACTERS
    return [
        {"prompt": text, "category": "chat"} for text in sorted(found) if shortest <= len(text) <= longest
    ]


def user_turn(tokenizer: Any) -> tuple[str, str]:
    """What a chat template puts before and after the text of the first user's turn."""
    mark = "<<text>>"
    before, _, after = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False
    ).partition(mark)
    return before, after.strip().splitlines()[0]


def training_prompts(options: argparse.Namespace) -> Iterator[tuple[str, list[Prompt]]]:
    """(kind, prompts in a seeded order)."""
    roots = [*options.code, Path(sysconfig.get_path("stdlib"))]
    rng = random.Random(options.seed)
    yield "math", questions(options.gsm8k_train, options.math, rng)
    code = code_prompts(roots, rng, options.completions, options.functions)
    rng.shuffle(code)
    yield "code", code
    demo = [prompt for prompt in demo_prompts("train", options.seed) if prompt["category"] != "math"]
    chat = [*demo, *text_prompts(roots, rng, options.texts), *sessions(demo, rng, options.sessions, turns=3)]
    if options.target:
        chat += written_by(options.target, options.written, options.seed)
    rng.shuffle(chat)
    yield "chat", chat


def by_temperature(prompts: list[Prompt]) -> dict[float, list[Prompt]]:
    """Prompts whose answers are greedy, and those whose answers are drawn."""
    sampled = int(SAMPLED_SHARE * len(prompts))
    return {0.0: prompts[sampled:], SAMPLED_TEMPERATURE: prompts[:sampled]}


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
    parser.add_argument(
        "--code", type=Path, action="append", default=[ROOT], help="more Python files to ask about"
    )
    parser.add_argument("--target", type=Path, help="writes prompts itself; none without it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--math", type=int, default=3000, help="GSM8K training questions")
    parser.add_argument(
        "--completions", type=int, default=1200, help="functions completed from their docstrings"
    )
    parser.add_argument("--functions", type=int, default=800, help="functions talked about")
    parser.add_argument("--texts", type=int, default=400, help="docstrings to be summed up")
    parser.add_argument("--sessions", type=int, default=150, help="sessions of three turns")
    parser.add_argument("--written", type=int, default=2500, help="prompts written by the target")
    parser.add_argument("--held-out", type=int, default=40, help="prompts of each held-out set")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, prompts in held_out_prompts(options).items():
        write_jsonl(options.out / f"heldout-{name}.jsonl", prompts)
        print(f"held out, {name}: {len(prompts)}")
    for kind, prompts in training_prompts(options):
        for temperature, part in by_temperature(prompts).items():
            write_jsonl(options.out / f"train-{kind}-{temperature:g}.jsonl", part)
            print(f"train, {kind} at temperature {temperature:g}: {len(part)}", flush=True)


if __name__ == "__main__":
    main()
