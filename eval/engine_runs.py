"""What engines have answered, job by job, in a file that survives a killed evaluation.

Engines are measured one after the other, so a prompt is complete only when the last of them has answered it.
`engine_runs.jsonl` therefore keeps every answer by itself, under the hash of the settings; `responses.jsonl`
and the figures are made of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eval.decode import Decoded, Step


class Place(NamedTuple):
    """Which answer: of how many requests at once, of which repeat, method, prompt and turn."""

    concurrency: int
    repeat: int
    method: str
    prompt: str
    turn: int


@dataclass(frozen=True)
class Job:
    """One run of an engine over a part of the prompts.

    Attributes:
        counters: what vLLM's counters rose by.
        seconds: from the first prompt to the last token.
        requests: prompts and turns.
        log: the engine's log file.
        facts: version of vLLM, platform and device.
    """

    concurrency: int
    repeat: int
    method: str
    counters: dict[str, Any]
    seconds: float
    requests: int
    log: str
    facts: dict[str, Any]


class RunFile:
    """Append-only JSONL of answers, jobs, and histories (responses that later turns follow)."""

    def __init__(self, path: Path, settings: str) -> None:
        self._path = path
        self._settings = settings

    def add(self, job: Job, answers: Iterable[tuple[Place, Decoded]]) -> None:
        """Write a job and all its answers at once."""
        lines = [{"kind": "job", **asdict(job)}]
        lines += [{"kind": "answer", "place": list(place), **_to_json(decoded)} for place, decoded in answers]
        self._write(lines)

    def add_history(self, prompt: str, turn: int, ids: list[int]) -> None:
        """Keep the response that the next turn follows."""
        self._write([{"kind": "history", "prompt": prompt, "turn": turn, "ids": ids}])

    def answers(self) -> dict[Place, Decoded]:
        return {Place(*record["place"]): _from_json(record) for record in self._records("answer")}

    def histories(self) -> dict[tuple[str, int], list[int]]:
        return {(record["prompt"], record["turn"]): record["ids"] for record in self._records("history")}

    def jobs(self) -> list[Job]:
        return [Job(**record) for record in self._records("job")]

    def _write(self, records: Iterable[dict[str, Any]]) -> None:
        text = "".join(json.dumps({"settings": self._settings, **record}) + "\n" for record in records)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)

    def _records(self, kind: str) -> Iterator[dict[str, Any]]:
        if not self._path.is_file():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the end of a killed evaluation, asked again by the next one
            if record.pop("settings") == self._settings and record.pop("kind") == kind:
                yield record


def _to_json(decoded: Decoded) -> dict[str, Any]:
    return {"ids": decoded.ids, "prefill_seconds": decoded.prefill_seconds, "steps": decoded.steps}


def _from_json(record: dict[str, Any]) -> Decoded:
    return Decoded(record["ids"], record["prefill_seconds"], [Step(*step) for step in record["steps"]])
