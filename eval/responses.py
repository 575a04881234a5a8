"""What was measured, prompt by prompt, in a file that survives a killed evaluation.

One line of `responses.jsonl` holds everything about one prompt: each method's runs of each turn. A line is
written when its prompt is complete, under the hash of the settings it was measured with, so that a second run
with the same settings skips it and a run with other settings does not mix with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.decode import Decoded, Step
from eval.prompts import Prompt

PLAIN = "plain"

_TIME_DIGITS = 7


@dataclass(frozen=True)
class Turn:
    """One turn of one prompt.

    Attributes:
        prompt_tokens: length of the rendered conversation.
        prompt_hash: hash of its token ids.
        text: the plain response, which is the history of the next turn.
        runs: method -> one `Decoded` a repeat.
        differences: method -> where its greedy tokens leave plain decoding's; empty when none does.
    """

    prompt_tokens: int
    prompt_hash: str
    text: str
    runs: dict[str, list[Decoded]]
    differences: dict[str, Difference] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """First token at which a greedy response differs from plain decoding.

    Attributes:
        index: 0-based place in the response.
        logit_gap: the target's logit of plain decoding's token minus that of the other one, recomputed.
        top_two_gap: distance of the two highest logits there.
        near_tie: both gaps lie within the stated rounding bound.
    """

    index: int
    logit_gap: float
    top_two_gap: float
    near_tie: bool


@dataclass(frozen=True)
class Response:
    """All that was measured for one prompt; `error` instead of turns when it could not be decoded."""

    prompt: str
    key: str
    dataset: str
    category: str
    turns: list[Turn]
    error: str | None = None


def failed(prompt: Prompt, error: Exception) -> Response:
    """The record of a prompt that could not be decoded."""
    message = f"{type(error).__name__}: {error}"
    return Response(prompt.id, prompt.key, prompt.dataset, prompt.category, [], message)


class ResponseFile:
    """Append-only JSONL of responses."""

    def __init__(self, path: Path, settings: str) -> None:
        self.path = path
        self.settings = settings

    def read(self) -> dict[str, Response]:
        """Finished responses of these settings by prompt key; failed ones are left out, so they run again."""
        found = {}
        for record in self._records():
            if record["settings"] == self.settings and record["error"] is None:
                found[record["key"]] = _from_json(record)
        return found

    def append(self, response: Response) -> None:
        """Write one line and hand it to the operating system."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"settings": self.settings, **_to_json(response)}) + "\n")

    def mend(self) -> None:
        """Cut off the unfinished last line of a killed evaluation."""
        if not self.path.is_file():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)

    def _records(self) -> Iterator[dict[str, Any]]:
        if self.path.is_file():
            with self.path.open(encoding="utf-8") as file:
                yield from map(json.loads, file)


def _to_json(response: Response) -> dict[str, Any]:
    return {
        "prompt": response.prompt,
        "key": response.key,
        "dataset": response.dataset,
        "category": response.category,
        "error": response.error,
        "turns": [
            {
                "prompt_tokens": turn.prompt_tokens,
                "prompt_hash": turn.prompt_hash,
                "text": turn.text,
                "runs": {name: [_decoded_to_json(d) for d in runs] for name, runs in turn.runs.items()},
                "differences": {name: vars(d) for name, d in turn.differences.items()},
            }
            for turn in response.turns
        ],
    }


def _decoded_to_json(decoded: Decoded) -> dict[str, Any]:
    return {
        "ids": decoded.ids,
        "prefill_seconds": round(decoded.prefill_seconds, _TIME_DIGITS),
        "steps": [[*s[:4], *(round(t, _TIME_DIGITS) for t in s[4:])] for s in decoded.steps],
    }


def _from_json(record: dict[str, Any]) -> Response:
    turns = [
        Turn(
            turn["prompt_tokens"],
            turn["prompt_hash"],
            turn["text"],
            {name: [_decoded_from_json(d) for d in runs] for name, runs in turn["runs"].items()},
            {name: Difference(**d) for name, d in turn["differences"].items()},
        )
        for turn in record["turns"]
    ]
    return Response(record["prompt"], record["key"], record["dataset"], record["category"], turns)


def _decoded_from_json(record: dict[str, Any]) -> Decoded:
    return Decoded(record["ids"], record["prefill_seconds"], [Step(*s) for s in record["steps"]])


def steps_of(response: Response, method: str, repeat: int | None = None) -> list[Step]:
    """The steps of all turns; of one repeat, or of all of them."""
    runs: Sequence[Decoded]
    steps: list[Step] = []
    for turn in response.turns:
        runs = turn.runs[method] if repeat is None else turn.runs[method][repeat : repeat + 1]
        steps.extend(step for decoded in runs for step in decoded.steps)
    return steps
