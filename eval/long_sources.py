"""Real texts for long prompts: files, folders, records, dealt out so that no two prompts share a passage."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from pipelines.records import Message, Record, read_records

_RECORD_SUFFIXES = frozenset({".jsonl", ".json", ".parquet"})
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "test", "tests", "idlelib"})
_SNIFFED_BYTES = 4_096
_FEWEST_CHARACTERS_A_TOKEN = 2  # a text with fewer for every token asked is not worth tokenising
_MOST_CHARACTERS_A_TOKEN = 12  # as much of a long text is tokenised at first


@dataclass
class Document:
    """One text.

    Attributes:
        cursor: first character that no prompt has used.
        left: tokens from there on, if they are known.
    """

    name: str
    text: str
    cursor: int = 0
    left: int | None = None

    def move(self, cursor: int) -> None:
        """Go on from another character."""
        self.cursor, self.left = cursor, None


@dataclass(frozen=True)
class Piece:
    """Characters `start` to `end` of a document."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Stretch:
    """Text of at least the tokens asked for, and where it comes from.

    Attributes:
        text: of all pieces, each after a line that names it where there are several.
        pieces: in order, with the place of each one's first character in `text`.
        reused: an earlier prompt shows some of it, because the data do not hold enough.
    """

    text: str
    pieces: tuple[tuple[int, Piece], ...]
    reused: bool

    def sources(self, end: int) -> list[dict[str, Any]]:
        """What the first `end` characters of `text` are made of, JSON-ready."""
        return [
            {"name": p.name, "start": p.start, "end": min(p.end, p.start + end - place)}
            for place, p in self.pieces
            if place < end
        ]


@dataclass
class Shelf:
    """Documents in an order that a seed decides."""

    documents: list[Document]
    tokenizer: Any
    _reused: bool = field(default=False, init=False)

    def take(self, tokens: int) -> Stretch:
        """The next unused text of at least `tokens` tokens, of one document if one has enough.

        When the rest is too short, all documents are dealt out again.

        Raises:
            EvalError: even all documents together are too short.
        """
        stretch = self._from_one(tokens) or self._from_several(tokens)
        if stretch is None and any(document.cursor for document in self.documents):
            for document in self.documents:
                document.move(0)
            self._reused = True
            stretch = self._from_one(tokens) or self._from_several(tokens)
        if stretch is None:
            raise EvalError(
                f"expected text for a prompt of {tokens} tokens, found "
                f"{sum(len(d.text) for d in self.documents):,} characters in {len(self.documents)} texts: "
                "fewer tokens; add --data or ask for shorter --contexts"
            )
        return stretch

    def _from_one(self, tokens: int) -> Stretch | None:
        for document in self.documents:
            if len(document.text) - document.cursor < tokens * _FEWEST_CHARACTERS_A_TOKEN:
                continue
            if document.left is not None and document.left < tokens:
                continue
            ends = self._ends(document, tokens)
            if len(ends) >= tokens:
                piece = self._use(document, ends[tokens - 1])
                return Stretch(document.text[piece.start : piece.end], ((0, piece),), self._reused)
        return None

    def _from_several(self, tokens: int) -> Stretch | None:
        text, left = "", tokens
        parts: list[tuple[int, Document, int]] = []
        for document in self.documents:
            ends = self._ends(document, left)
            if not ends:
                continue
            used = ends[min(left, len(ends)) - 1]
            text += f"\n# {document.name}\n"
            parts.append((len(text), document, used))
            text += document.text[document.cursor : document.cursor + used]
            left -= len(ends)
            if left <= 0:
                pieces = tuple((place, self._use(each, length)) for place, each, length in parts)
                return Stretch(text, pieces, self._reused)
        return None

    def _ends(self, document: Document, tokens: int) -> list[int]:
        """Where tokens of a document's rest end: of all of them, or of at least `tokens`."""
        part = document.text[document.cursor : document.cursor + tokens * _MOST_CHARACTERS_A_TOKEN]
        ends = token_ends(self.tokenizer, part)
        if len(ends) < tokens:
            if document.cursor + len(part) < len(document.text):
                ends = token_ends(self.tokenizer, document.text[document.cursor :])
            document.left = len(ends)
        return ends

    def _use(self, document: Document, length: int) -> Piece:
        """Hand out `length` characters; what follows starts at the next line."""
        start = document.cursor
        end = start + length
        line = document.text.find("\n", end)
        document.move(len(document.text) if line < 0 else line + 1)
        return Piece(document.name, start, end)


def token_ends(tokenizer: Any, text: str) -> list[int]:
    """Where each token of a text ends, in characters.

    Raises:
        EvalError: a tokenizer that does not say.
    """
    if not tokenizer.is_fast:
        raise EvalError(
            f"long prompts need a tokenizer with a tokenizer.json, found {type(tokenizer).__name__}"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [end for _, end in encoded["offset_mapping"]]


def read_sources(data: Sequence[str], seed: int) -> tuple[list[Document], list[tuple[str, list[Message]]]]:
    """Documents and conversations of all sources, each list in an order that the seed decides.

    Args:
        data: `stdlib` (the running Python's), text files, folders of them, or files of records. A record's
            `text` is a document; a conversation is both a conversation and, written out, a document.
        seed: of the order.

    Raises:
        EvalError: a source that is not there, or nothing to read in all of them.
        DataSourceError: a file of records that cannot be read.
    """
    documents: list[Document] = []
    sessions: list[tuple[str, list[Message]]] = []
    for source in data:
        for name, path in _files(source):
            if path.suffix in _RECORD_SUFFIXES:
                for record in read_records([str(path)]):
                    if isinstance(record, Record):
                        label = f"{name}:{record.line}"
                        if record.messages:
                            sessions.append((label, list(record.messages)))
                        documents.append(Document(label, record.text or _written_out(record.messages)))
            elif (text := _text(path)) is not None:
                documents.append(Document(name, text))
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise EvalError(f"expected text in {', '.join(data)}, found none")
    random.Random(f"{seed} documents").shuffle(documents)  # noqa: S311 an order, not a secret
    random.Random(f"{seed} sessions").shuffle(sessions)  # noqa: S311 an order, not a secret
    return documents, sessions


def _files(source: str) -> Iterator[tuple[str, Path]]:
    """Name and path of every file, in the order of names."""
    root = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source)
    if root.is_file():
        yield root.name, root
        return
    if not root.is_dir():
        raise EvalError(f"--data {source}: expected `stdlib`, a file or a folder; there is none")
    suffixes = {".py"} if source == "stdlib" else None
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        hidden = any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in inside.parts)
        if not hidden and path.is_file() and (suffixes is None or path.suffix in suffixes):
            yield f"{root.resolve().name}/{inside.as_posix()}", path


def _text(path: Path) -> str | None:
    """A file's text; None for one that is no text."""
    content = path.read_bytes()
    if b"\0" in content[:_SNIFFED_BYTES]:
        return None
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def _written_out(messages: Sequence[Message]) -> str:
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in messages if isinstance(m.get("content"), str))
