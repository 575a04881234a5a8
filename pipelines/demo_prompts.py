"""Prompts for the demo, generated from the project's own templates: code, math and chat.

The held-out split shares no task, story template, person, thing or topic with the training split: acceptance
on it is acceptance on prompts of a familiar kind and unfamiliar content.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

Prompt = dict[str, Any]

WORDS = yaml.safe_load(resources.files("pipelines").joinpath("demo_prompts.yaml").read_text())


def _code(split: str) -> Iterator[str]:
    words = WORDS[split]["code"]
    return (style.format(task=task) for style in words["styles"] for task in words["tasks"])


def _math(split: str) -> Iterator[str]:
    words = WORDS[split]["math"]
    # Seeded by the split alone, so that the set of stories does not depend on the order asked for.
    rng = random.Random(f"stories-{split}")  # noqa: S311 - prompts, not secrets
    for _ in range(words["rounds"]):
        for story in words["stories"]:
            yield story.format(
                name=rng.choice(words["names"]),
                thing=rng.choice(words["things"]),
                a=rng.randrange(60, 400, 10),
                b=rng.randrange(11, 50),
                c=rng.randrange(2, 10),
            )


def _chat(split: str) -> Iterator[str]:
    words = WORDS[split]["chat"]
    return (request.format(topic=topic) for request in words["requests"] for topic in words["topics"])


KINDS: dict[str, Callable[[str], Iterator[str]]] = {"code": _code, "math": _math, "chat": _chat}


def demo_prompts(split: str, seed: int = 0) -> list[Prompt]:
    """Prompts of one split, kinds interleaved, order shuffled by `seed`.

    Args:
        split: "train" (about 550 prompts) or "heldout" (about 110).
        seed: of the order; the set does not depend on it.

    Returns:
        Records `{"prompt": text, "category": "code" | "math" | "chat"}`.
    """
    rng = random.Random(seed)  # noqa: S311 - an order, not a secret
    by_kind = {kind: sorted(set(make(split))) for kind, make in KINDS.items()}
    for prompts in by_kind.values():
        rng.shuffle(prompts)
    longest = max(len(prompts) for prompts in by_kind.values())
    return [
        {"prompt": prompts[i], "category": kind}
        for i in range(longest)
        for kind, prompts in by_kind.items()
        if i < len(prompts)
    ]


def write_demo_prompts(folder: Path, seed: int = 0) -> dict[str, int]:
    """Write `train.jsonl` and `heldout.jsonl`; files that already hold the same prompts are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in ("train", "heldout"):
        prompts = demo_prompts(split, seed)
        text = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
        path = folder / f"{split}.jsonl"
        if not path.exists() or path.read_text() != text:
            partial = path.with_suffix(".partial")
            partial.write_text(text)
            os.replace(partial, path)  # noqa: PTH105 - atomic on one file system
        counts[split] = len(prompts)
    return counts
