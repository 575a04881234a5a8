"""Prompts for the proof at length: the same questions behind short and behind long context.

Every item is a question with material before it. A prompt of n tokens keeps the end of the material, next to
the question, and drops what stands further back. So a short and a long prompt of one item ask the same thing,
and what differs between two lengths is the context.

    python benchmarks/long_context/prompts.py --target runs/demo/target --answers runs/demo/store \
        --heldout-prompts runs/demo/prompts/heldout.jsonl --spec-bench spec_bench.jsonl \
        --out runs/long/prompts

Writes `short.jsonl` and `mixed.jsonl` (training: the same items at two length distributions) and
`ctx-<tokens>.jsonl` (held out). Training and held-out items share no source file, text, question or answer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelines.store import FeatureStore
from pipelines.target import load_tokenizer

CONTINUE = "Continue this Python file from exactly where it stops.\n\n"
EDITS = {
    "train": (
        "Rewrite the last function of this file with a docstring.",
        "Repeat the last function of this file with type annotations.",
        "Write the last class or function of this file again, with comments.",
    ),
    "heldout": ("Improve the last function of this file and show its new code.",),
}
DOC_QUESTIONS = (
    "Summarize the last section of the text above.",
    "What are the main points of the text above? Answer in a few sentences.",
    "Explain the last part of the text above to a beginner.",
)
_LINE = 200  # characters; within them a cut text begins at a new line, else at a new word
_PROBE = "\u2042"
SHARES = {"continue": 0.3, "edit": 0.2, "text": 0.25, "session": 0.25}

Message = dict[str, str]


@dataclass(frozen=True)
class Item:
    """A question and what may stand before it.

    Attributes:
        id: stable name.
        kind: continue, edit, text or session.
        head, material, tail: user message; the front of `material` is cut to the wanted length.
        history: earlier turns of a session, oldest first; cut by pairs. Empty for the other kinds.
    """

    id: str
    kind: str
    head: str
    material: str
    tail: str
    history: tuple[Message, ...] = ()


class Cutter:
    """Renders items at a number of tokens with the target's own tokenizer and template."""

    def __init__(self, target: Path) -> None:
        self._tokenizer = load_tokenizer(target)

    def record(self, item: Item, tokens: int) -> dict[str, Any]:
        """The longest record of at most `tokens` rendered tokens, as `capture` and `eval` read it."""
        if item.history:
            question = [{"role": "user", "content": item.tail}]
            history: list[Message] = []
            room = tokens - self._rendered(question)
            for asked, answer in zip(item.history[-2::-2], item.history[-1::-2], strict=True):
                room -= self._rendered([asked, answer])
                if room < 0:
                    break
                history = [asked, answer, *history]
            return {"id": item.id, "category": item.kind, "prompt": self._as_one_turn([*history, *question])}
        room = tokens - self._rendered([{"role": "user", "content": item.head + item.tail}])
        return {
            "id": item.id,
            "category": item.kind,
            "prompt": item.head + self._cut(item.material, room) + item.tail,
        }

    def _as_one_turn(self, messages: list[Message]) -> str:
        """Content of one user turn that renders to the same text as all of `messages`.

        `capture --regenerate` would have the target answer every turn of a conversation anew; here only the
        last answer is wanted, behind a history of given length.
        """
        before, after = self._template([{"role": "user", "content": _PROBE}]).split(_PROBE)
        return self._template(messages).removeprefix(before).removesuffix(after)

    def _cut(self, text: str, tokens: int) -> str:
        """The end of `text`, from the first line that begins within its last `tokens` tokens."""
        recent = text[-8 * max(tokens, 1) :]
        ids = self._tokenizer(recent, add_special_tokens=False)["input_ids"]
        if len(ids) <= tokens and len(recent) == len(text):
            return text
        kept = str(self._tokenizer.decode(ids[-tokens:]))
        line = kept.find("\n", 0, _LINE) + 1
        return kept[line or kept.find(" ") + 1 :]

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _rendered(self, messages: list[Message]) -> int:
        return self._count(self._template(messages))

    def _template(self, messages: list[Message]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def heldout_name(name: str) -> bool:
    """Whether a source belongs to the held-out split: one in five, by its name."""
    return zlib.crc32(name.encode()) % 5 == 0


def source_files(split: str) -> list[Path]:
    """Standard-library files of at least 32,000 bytes that belong to a split."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [
        file
        for file in sorted(folder.glob("**/*.py"))
        if not {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"} & set(file.parts)
        and file.stat().st_size >= 32_000
        and heldout_name(str(file.relative_to(folder))) == (split == "heldout")
    ]


def code_items(split: str, rng: random.Random) -> Iterator[tuple[str, Item]]:
    """(kind, item) of source files, each cut at a random line of its second half."""
    files = source_files(split)
    while True:
        rng.shuffle(files)
        for file in files:
            lines = file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
            end = rng.randrange(len(lines) // 2, len(lines))
            text = "".join(lines[:end])
            name = f"{file.stem}-{end}"
            yield "continue", Item(f"continue-{name}", "continue", CONTINUE, text, "")
            question = rng.choice(EDITS[split])
            yield "edit", Item(f"edit-{name}", "edit", "", text, f"\n\n{question}")


def training_texts(rng: random.Random) -> Iterator[Item]:
    """Sections of the Python language reference that `pydoc` carries, ending at a random paragraph."""
    import pydoc_data.topics

    paragraphs = [
        f"{paragraph}\n\n"
        for _, text in sorted(pydoc_data.topics.topics.items())
        for paragraph in text.split("\n\n")
    ]
    while True:
        end = rng.randrange(len(paragraphs) // 10, len(paragraphs))
        yield Item(f"text-{end}", "text", "", "".join(paragraphs[:end]), f"\n{rng.choice(DOC_QUESTIONS)}")


def heldout_texts(spec_bench: Path, rng: random.Random) -> Iterator[Item]:
    """Spec-Bench summarization and retrieval prompts behind the texts of other such prompts."""
    rows = [json.loads(line) for line in spec_bench.read_text(encoding="utf-8").splitlines()]
    kinds = {kind: [row for row in rows if row["category"] == kind] for kind in ("summarization", "rag")}
    for chosen in kinds.values():
        rng.shuffle(chosen)
    for place in range(min(map(len, kinds.values()))):
        for kind, chosen in kinds.items():
            row, text = chosen[place], chosen[place]["turns"][0]
            others = [other["turns"][0] for other in chosen if other is not row]
            rng.shuffle(others)
            if kind == "summarization":
                body, question = text.removeprefix("Summarize: "), "Summarize the last article."
            else:
                body, _, question = text.rpartition("\n")
            material = "\n\n".join([*(o.removeprefix("Summarize: ") for o in others), body])
            yield Item(f"{kind}-{row['question_id']}", "text", "", material, f"\n\n{question}")


def session_items(
    split: str, store: Path, cutter_target: Path, questions: list[str], rng: random.Random
) -> Iterator[Item]:
    """Sessions of many turns: questions with the target's own answers, taken from a captured store."""
    tokenizer = load_tokenizer(cutter_target)
    pairs = []
    answers = FeatureStore.open(store)
    for sample in map(answers.sample, range(len(answers))):
        if heldout_name(sample.conversation) == (split == "heldout"):
            ids, mask = sample.token_ids, sample.loss_mask
            answer = tokenizer.decode(ids[mask].tolist(), skip_special_tokens=True).strip()
            asked = tokenizer.decode(ids[~mask].tolist()).rpartition("user\n")[2].partition("<|im_end|>")[0]
            pairs.append(({"role": "user", "content": asked}, {"role": "assistant", "content": answer}))
    if not questions:
        questions = [pair[0]["content"] for pair in pairs]
    number = 0
    while True:
        rng.shuffle(questions)
        for question in questions:
            chosen = [pair for pair in pairs if pair[0]["content"] != question]
            rng.shuffle(chosen)
            history = tuple(message for pair in chosen[:90] for message in pair)
            number += 1
            yield Item(f"session-{number}", "session", "", "", question, history)


def take(sources: dict[str, Iterator[Item]], count: int) -> list[Item]:
    """`count` items, kinds in the shares of `SHARES`, interleaved."""
    items = [next(sources[kind]) for kind, share in SHARES.items() for _ in range(round(share * count))]
    random.Random(0).shuffle(items)
    return items


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def sources(split: str, options: argparse.Namespace) -> dict[str, Iterator[Item]]:
    """One endless stream of items per kind."""

    def rng(name: str) -> random.Random:
        return random.Random(f"{options.seed} {split} {name}")

    def code(kind: str) -> Iterator[Item]:
        return (item for found, item in code_items(split, rng(kind)) if found == kind)

    questions: list[str] = []
    if split == "heldout":
        lines = options.heldout_prompts.read_text().splitlines()
        questions = [json.loads(line)["prompt"] for line in lines]
    return {
        "continue": code("continue"),
        "edit": code("edit"),
        "text": training_texts(rng("text"))
        if split == "train"
        else heldout_texts(options.spec_bench, rng("text")),
        "session": session_items(
            split, options.answers, options.answers_target or options.target, questions, rng("session")
        ),
    }


def write(path: Path, records: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True, help="store of `make demo`")
    parser.add_argument("--answers-target", type=Path, help="tokenizer of that store, if another")
    parser.add_argument("--heldout-prompts", type=Path, required=True)
    parser.add_argument("--spec-bench", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=240, help="items of the training sets")
    parser.add_argument("--heldout", type=int, default=16, help="items of each held-out length")
    parser.add_argument("--answer", type=int, default=160, help="tokens kept free for the answer")
    parser.add_argument("--short", type=int, nargs=2, default=(256, 1024), help="tokens with the answer")
    parser.add_argument("--mixed", type=int, nargs=2, default=(256, 7936), help="tokens with the answer")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1536, 3072, 6144, 7936])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    cutter = Cutter(options.target)
    items = take(sources("train", options), options.train)
    for name in ("short", "mixed"):
        rng = random.Random(f"{options.seed} {name}")
        low, high = getattr(options, name)
        lengths = [log_uniform(rng, low, high) - options.answer for _ in items]
        records = (cutter.record(item, length) for item, length in zip(items, lengths, strict=True))
        write(options.out / f"{name}.jsonl", records)
    heldout = take(sources("heldout", options), options.heldout)
    for length in options.lengths:
        write(options.out / f"ctx-{length:05d}.jsonl", (cutter.record(item, length) for item in heldout))
    print(f"{len(items)} training and {len(heldout)} held-out items in {options.out}")


if __name__ == "__main__":
    main()
