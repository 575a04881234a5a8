"""The kinds of long prompts, and how each gets its length.

A prompt is rendered with the target's chat template while it is built, and its text is cut until the rendered
ids have the length that was asked for. The same data, seed and tokenizer give the same prompts.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eval.contexts import length_name
from eval.errors import EvalError
from eval.long_sources import Document, Shelf, Stretch, token_ends
from eval.prompts import Message, render

TOLERANCE = 4  # tokens by which a prompt may miss its length
_TRIES = 12
_PASSAGE_CHARACTERS = 700  # of a copied passage, before it is completed to whole lines
_SPARE_TOKENS = 64
_KEPT = 0.8  # share of a text that surely stays when it is cut to its length

_CONTINUE = "Continue this text from exactly where it stops.\n\n"
_FUNCTION = (
    "\n\nWrite the function `{name}` from the text above again, with a comment above each of its statements. "
    "Change nothing else."
)
_PARAGRAPH = "\n\nWrite the paragraph that begins with “{name}” from the text above again, in simpler words."
_LAST_PARAGRAPH = "\n\nWrite the last paragraph of the text above again, in simpler words."
_NEEDLE = "The access code of the {thing} is {code}."
_ASK = "\n\nWhat is the access code of the {thing}? Answer with the whole sentence from the text above."
_COPY = "\n\nRepeat what stands between [passage {code}] and [end of passage {code}] word for word."
_COLOURS = ("amber", "black", "copper", "green", "grey", "ivory", "red", "silver", "violet", "white")
_THINGS = (
    "archive",
    "boathouse",
    "cellar",
    "garage",
    "greenhouse",
    "harbour",
    "library",
    "mill",
    "studio",
    "tower",
)
_DEFINITION = re.compile(r"^[ \t]*(?:async def|def|function|func|fn) (\w+)[^\n]*\n", re.MULTILINE)
_FIRST_WORDS = re.compile(r"(?:^|\n\n)((?:\w[\w,'’-]*[ \n]){6})")
Kind = Literal["continue", "edit", "needle", "copy", "session"]


@dataclass(frozen=True)
class Made:
    """One prompt: its messages, what it is made of, and what a perfect answer holds."""

    messages: list[Message]
    tokens: int
    sources: list[dict[str, Any]]
    reused: bool
    depth: float | None = None
    expected: str | None = None


class Maker:
    """Builds prompts one after the other from one shelf of text."""

    def __init__(
        self,
        tokenizer: Any,
        documents: list[Document],
        sessions: list[tuple[str, list[Message]]],
        seed: int,
        template_args: Mapping[str, Any],
    ) -> None:
        self._tokenizer, self._seed, self._template_args = tokenizer, seed, template_args
        self._shelf = Shelf(documents, tokenizer)
        self._sessions = sessions
        self._told: set[int] = set()
        self._told_all = False

    def records(
        self, kinds: Sequence[Kind], lengths: Sequence[int], per_context: int
    ) -> list[dict[str, Any]]:
        """All prompts, JSON-ready, shortest first.

        The longest are built first, while whole documents are there for them.

        Raises:
            EvalError: a length that the text or the template does not allow.
        """
        makers: dict[str, Callable[[int, float, random.Random], Made]] = {
            "continue": self._continue, "edit": self._edit, "needle": self._needle, "copy": self._copy,
            "session": self._session,
        }  # fmt: skip
        found = []
        for length in sorted(lengths, reverse=True):
            for number in range(per_context):
                for kind in kinds:
                    rng = random.Random(f"{self._seed} {kind} {length} {number}")  # noqa: S311 no secret
                    made = makers[kind](length, (number + 0.5) / per_context, rng)
                    found.append(
                        {
                            "id": f"{kind}-{length_name(length)}-{number + 1}",
                            "category": kind,
                            "messages": made.messages,
                            "context": length,
                            "tokens": made.tokens,
                            "depth": made.depth,
                            "expected": made.expected,
                            "sources": made.sources,
                            "reused": made.reused,
                        }
                    )
        return sorted(found, key=lambda record: record["context"])

    def _continue(self, length: int, _depth: float, _rng: random.Random) -> Made:
        return self._fit(length, self._shelf.take(length), lambda text: _CONTINUE + text)

    def _edit(self, length: int, _depth: float, rng: random.Random) -> Made:
        stretch = self._shelf.take(length)
        request = edit_request(stretch.text[: int(len(stretch.text) * _KEPT)], rng)
        return self._fit(length, stretch, lambda text: text + request)

    def _needle(self, length: int, depth: float, rng: random.Random) -> Made:
        thing = f"{rng.choice(_COLOURS)} {rng.choice(_THINGS)}"
        sentence = _NEEDLE.format(thing=thing, code=rng.randrange(1_000_000, 10_000_000))

        def build(text: str) -> str:
            place = _line_start(text, int(len(text) * depth))
            return f"{text[:place]}{sentence}\n{text[place:]}" + _ASK.format(thing=thing)

        return self._fit(length, self._shelf.take(length), build, depth=depth, expected=sentence)

    def _copy(self, length: int, depth: float, rng: random.Random) -> Made:
        stretch = self._shelf.take(length)
        code = rng.randrange(1_000, 10_000)
        start = _line_start(stretch.text, int(len(stretch.text) * _KEPT * depth))
        end = _line_start(stretch.text, start + min(_PASSAGE_CHARACTERS, len(stretch.text) // 8))
        passage = stretch.text[start:end]

        def build(text: str) -> str:
            marked = f"[passage {code}]\n{passage}[end of passage {code}]\n"
            return f"{text[:start]}{marked}{text[end:]}" + _COPY.format(code=code)

        return self._fit(length, stretch, build, depth=depth, expected=passage)

    def _session(self, length: int, _depth: float, _rng: random.Random) -> Made:
        """The next conversation that is long enough, up to one of its user messages."""
        for _ in range(2):
            for place, (name, messages) in enumerate(self._sessions):
                if place in self._told:
                    continue
                made = self._cut_session(length, name, messages)
                if made is not None:
                    self._told.add(place)
                    return made
            self._told_all = bool(self._told)
            self._told.clear()
        raise EvalError(
            f"expected a conversation of at least {length} tokens for --kind session, found none among "
            f"{len(self._sessions)}; add --data or ask for shorter --contexts"
        )

    def _cut_session(self, length: int, name: str, messages: list[Message]) -> Made | None:
        """The conversation up to the user message at which it has the length.

        Its longest message is cut from the front to fit.
        """
        users = [place for place, message in enumerate(messages) if message["role"] == "user"]
        reached = bisect_left(users, length, key=lambda place: self._length(messages[: place + 1]))
        if reached == len(users):
            return None
        part = messages[: users[reached] + 1]
        longest = max(range(len(part)), key=lambda place: len(str(part[place]["content"])))
        text = str(part[longest]["content"])
        ends = [0, *token_ends(self._tokenizer, text)]

        def cut(tokens: int) -> list[Message]:
            shorter = part[longest] | {"content": text[ends[len(ends) - 1 - tokens] :]}
            return [*part[:longest], shorter, *part[longest + 1 :]]

        try:
            tokens, rendered = self._search(length, len(ends) - 1, cut)
        except EvalError:
            return None  # another conversation may fit
        sources = [{"name": name, "start": 0, "end": users[reached] + 1}]
        return Made(cut(tokens), rendered, sources, self._told_all)

    def _fit(
        self,
        length: int,
        stretch: Stretch,
        build: Callable[[str], str],
        *,
        depth: float | None = None,
        expected: str | None = None,
    ) -> Made:
        """Cut the text so that the rendered prompt has `length` tokens."""
        ends = token_ends(self._tokenizer, stretch.text)

        def messages(tokens: int) -> list[Message]:
            return [{"role": "user", "content": build(stretch.text[: ends[tokens - 1]])}]

        tokens, rendered = self._search(length, len(ends), messages)
        sources = stretch.sources(ends[tokens - 1])
        return Made(messages(tokens), rendered, sources, stretch.reused, depth, expected)

    def _length(self, messages: Sequence[Message]) -> int:
        return len(render(self._tokenizer, messages, self._template_args))

    def _search(self, length: int, most: int, messages: Callable[[int], list[Message]]) -> tuple[int, int]:
        """(tokens of text, tokens of the rendered prompt) nearest to `length`.

        Tokens merge differently at a cut, so the distance is corrected until it is gone.
        """
        tokens = max(1, min(most, length) - _SPARE_TOKENS)
        tried: dict[int, int] = {}
        for _ in range(_TRIES):
            tried[tokens] = self._length(messages(tokens))
            wanted = min(most, max(1, tokens + length - tried[tokens]))
            if wanted in tried:
                break
            tokens = wanted
        best = min(tried, key=lambda t: abs(tried[t] - length))
        if abs(tried[best] - length) > TOLERANCE:
            raise EvalError(
                f"a prompt of {length} tokens came out with {tried[best]}: its request and template alone "
                f"take about {tried[best] - best}; ask for longer --contexts"
            )
        return best, tried[best]


def edit_request(text: str, rng: random.Random) -> str:
    """A request to change a function of the text, or a paragraph where there is no function."""
    names = _DEFINITION.findall(text)
    once = [name for name in names if names.count(name) == 1]
    if once:
        return _FUNCTION.format(name=rng.choice(once))
    starts = [" ".join(words.split()) for words in _FIRST_WORDS.findall(text)]
    return _PARAGRAPH.format(name=rng.choice(starts)) if starts else _LAST_PARAGRAPH


def _line_start(text: str, place: int) -> int:
    """The first line start after a character; the character itself in the last line."""
    end = text.find("\n", place)
    return place if end < 0 else end + 1
