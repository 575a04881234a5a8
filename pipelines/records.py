"""Input records: JSON lines, JSON, parquet, folders of these, or a `datasets` hub id.

A record is one object in one of these forms:

    {"messages": [{"role", "content", ...}, ...]}      a conversation (also `conversations` with from/value)
    {"prompt": text, "response": text?}                one turn
    {"turns": [text, ...]}                             user turns whose answers the target writes one by one
    {"question": text, "answer": text?}                as GSM8K
    {"text": text}                                     plain text, supervised throughout

A record that cannot be read becomes a `Rejection` with file, line and reason; reading goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_SUFFIXES = (".jsonl", ".json", ".parquet")

Message = dict[str, Any]


class DataSourceError(ValueError):
    """A data source as a whole cannot be read."""


class RecordError(ValueError):
    """One record cannot be used; the text says why."""


@dataclass(frozen=True)
class Rejection:
    """A record that gave no sample: where it stands and why."""

    source: str
    line: int
    reason: str


@dataclass(frozen=True)
class Record:
    """A parsed record: a conversation or a plain text.

    Attributes:
        id: content hash; equal records have equal ids wherever they stand.
        source: file name or hub id.
        line: 1-based line or row.
        messages: turns in order; empty for a plain text.
        text: the plain text, or None.
        tools: tool schemas for the chat template, or None.
    """

    id: str
    source: str
    line: int
    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}"


def read_records(sources: list[str], limit: int | None = None) -> Iterator[Record | Rejection]:
    """Records of all sources in order; the first `limit` usable ones if given.

    Raises:
        DataSourceError: a source is no file, no folder and no readable hub data set.
    """
    found = 0
    for source in sources:
        for name, line, raw in _raw(source):
            if limit is not None and found >= limit:
                return
            if isinstance(raw, Rejection):
                yield raw
                continue
            try:
                yield parse_record(raw, name, line)
                found += 1
            except RecordError as error:
                yield Rejection(name, line, str(error))


def parse_record(raw: Any, source: str = "", line: int = 0) -> Record:
    """One record from its decoded form.

    Raises:
        RecordError: none of the known forms, an unknown role, or a message without content.
    """
    if not isinstance(raw, dict):
        raise RecordError(f"expected an object, found {type(raw).__name__}")
    text = raw.get("text")
    tools = _tools(raw.get("tools"))
    messages = _messages(raw)
    if messages is None:
        if not isinstance(text, str) or not text:
            raise RecordError(
                "expected one of the keys messages, conversations, prompt, turns, question, text; found "
                f"{sorted(raw)}"
            )
        return Record(_hash({"text": text}), source, line, text=text)
    _check(messages)
    return Record(_hash({"messages": messages, "tools": tools}), source, line, tuple(messages), tools=tools)


def _messages(raw: dict[str, Any]) -> list[Message] | None:
    if raw.get("messages") is not None:
        return _list(raw["messages"], "messages")
    if raw.get("conversations") is not None:
        turns = _list(raw["conversations"], "conversations")
        return [_sharegpt(turn) if isinstance(turn, dict) and "from" in turn else turn for turn in turns]
    if raw.get("turns") is not None:
        return [{"role": "user", "content": turn} for turn in _list(raw["turns"], "turns")]
    for prompt, answer in (("prompt", "response"), ("question", "answer")):
        if raw.get(prompt) is None:
            continue
        given = raw[prompt]
        messages = list(given) if isinstance(given, list) else [{"role": "user", "content": given}]
        if raw.get(answer) is not None:
            messages.append({"role": "assistant", "content": raw[answer]})
        return messages
    return None


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RecordError(f"{key}: expected a list with at least one entry, found {value!r:.60}")
    return value


def _sharegpt(turn: dict[str, Any]) -> Message:
    role = _SHAREGPT.get(turn["from"])
    if role is None:
        raise RecordError(f"unknown role {turn['from']!r} in conversations; known: {sorted(_SHAREGPT)}")
    return {"role": role, "content": turn.get("value")}


def _check(messages: list[Message]) -> None:
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or "role" not in message:
            raise RecordError(
                f"message {number}: expected an object with role and content, found {message!r:.60}"
            )
        if message["role"] not in ROLES:
            raise RecordError(f"message {number}: unknown role {message['role']!r}; known: {sorted(ROLES)}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise RecordError(
                f"message {number} ({message['role']}): content must be text, found "
                f"{type(message.get('content')).__name__}"
            )
    if all(message["role"] != "user" for message in messages):
        raise RecordError("no message with role user")


def _tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    if not tools:
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise RecordError(f"tools is not valid JSON: {error}") from None
    return tuple(tools)


def _hash(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:24]


# -------------------------------------------------------------------- sources


def _raw(source: str) -> Iterator[tuple[str, int, Any]]:
    """(name, line, decoded value or Rejection) of everything in a source."""
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
        if not files:
            raise DataSourceError(f"{path} holds no {', '.join(_SUFFIXES)} file")
        for file in files:
            yield from _file(file)
    elif path.is_file():
        yield from _file(path)
    elif path.suffix in _SUFFIXES or source.startswith(("/", ".")):
        raise DataSourceError(f"data file {source} does not exist")
    else:
        yield from _hub(source)


def _file(path: Path) -> Iterator[tuple[str, int, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        try:
            batches = pq.ParquetFile(path).iter_batches(batch_size=256)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((str(path), line, _without_nulls(row)) for line, row in enumerate(rows, start=1))
        except (OSError, ValueError) as error:
            raise DataSourceError(f"{path} is not a readable parquet file: {error}") from None
        return
    if path.suffix == ".json":
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            whole = None  # JSON lines under the other name
        if isinstance(whole, list):
            yield from ((str(path), line, value) for line, value in enumerate(whole, start=1))
            return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                yield str(path), number, json.loads(line)
            except ValueError as error:  # broken JSON and broken UTF-8 alike
                yield str(path), number, Rejection(str(path), number, f"not valid JSON: {error}")


def _hub(source: str) -> Iterator[tuple[str, int, Any]]:
    """`name` or `name:split`, default split train."""
    from datasets import load_dataset

    name, _, split = source.partition(":")
    try:
        rows = load_dataset(name, split=split or "train")
    except Exception as error:  # noqa: BLE001 - the library raises its own and the network's errors of many kinds
        raise DataSourceError(
            f"data source {source!r} is no file, no folder and no data set that can be fetched "
            f"({type(error).__name__}: {error})"
        ) from None
    yield from ((source, line, _without_nulls(row)) for line, row in enumerate(rows, start=1))


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Arrow tables fill keys that a row lacks with None, inside messages too."""
    cleaned = {key: value for key, value in row.items() if value is not None}
    for key in ("messages", "conversations"):
        if isinstance(cleaned.get(key), list):
            cleaned[key] = [
                {k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else turn
                for turn in cleaned[key]
            ]
    return cleaned
