"""Token ids and loss masks of given conversations, from the target's own chat template.

Where an answer begins is found by rendering, never by searching the text for markers: the template is
rendered up to the answer with its generation prompt, and through the answer; what the second adds to the
first is the answer. Templates may put more in front of it than the generation prompt (an empty think block,
for instance). Rendering the turn with two other answers shows how far that goes: the renderings agree exactly
up to the answer's begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.records import Message, Record, RecordError

_PROBES = ("\u2042probe", "\u2043other")  # differ in their first character, which no template adds or strips


@dataclass
class MaskedTokens:
    """A sequence and which of its tokens are answers."""

    token_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class _Turn:
    """One assistant turn: the text up to its answer, and the text through it."""

    before: str
    through: str


@dataclass
class ChatRenderer:
    """Renders records with a tokenizer's chat template.

    Args:
        tokenizer: the target's own tokenizer.
        eos_ids: ids that end an answer; text that a template puts after them is not supervised.
        template_args: extra variables for the template.
    """

    tokenizer: Any
    eos_ids: frozenset[int]
    template_args: dict[str, Any] = field(default_factory=dict)

    def given(self, record: Record) -> list[MaskedTokens]:
        """The samples of a record that brings its own answers.

        One sample if every rendering is a prefix of the next one. A template that renders earlier turns
        differently once they are history (dropping their reasoning, say) starts a new sample at such a turn.

        Raises:
            RecordError: no answer, no supervised token, no template, or a prefix that does not match.
        """
        if record.text is not None:
            ids = self.tokenizer(record.text)["input_ids"]
            if len(ids) < 2:
                raise RecordError("text of fewer than 2 tokens")
            return [MaskedTokens(ids, [True] * len(ids))]
        messages = [split_reasoning(message) for message in record.messages]
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise RecordError("no assistant message; use --regenerate to let the target answer")
        samples: list[MaskedTokens] = []
        previous = ""
        for at in answers:
            turn = self._turn(messages, at, record.tools)
            ids, start, stop = self._answer_span(turn)
            mask = [start <= position < stop for position in range(len(ids))]
            earlier = samples[-1] if samples else None
            if earlier and turn.before.startswith(previous) and _begins(ids, earlier.token_ids):
                kept = earlier.loss_mask
                samples[-1] = MaskedTokens(ids, kept + mask[len(kept) :])
            else:
                samples.append(MaskedTokens(ids, mask))
            previous = turn.through
        if not any(any(sample.loss_mask) for sample in samples):
            raise RecordError("0 supervised tokens: the template renders the answers to nothing")
        return samples

    def prompt_text(self, messages: Sequence[Message], tools: Any = None) -> str:
        """The conversation so far with the generation prompt, as a serving engine would render it.

        Raises:
            RecordError: the target has no chat template, or the template refuses.
        """
        return self._render(messages, tools, generation_prompt=True)

    def encode(self, rendered: str) -> list[int]:
        """Ids of rendered text; the template has put in every special token already."""
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _turn(self, messages: list[Message], at: int, tools: Any) -> _Turn:
        thinking = bool(messages[at].get("reasoning_content"))
        prompt = self._render(messages[:at], tools, generation_prompt=True, thinking=thinking)
        through = self._render(messages[: at + 1], tools, generation_prompt=False, thinking=thinking)
        before = prompt
        if (
            not thinking
        ):  # a thinking target writes its own opening mark; otherwise the template may add marks
            one, other = (
                self._render([*messages[:at], {**messages[at], "content": probe}], tools, thinking=False)
                for probe in _PROBES
            )
            before = max(prompt, _common(one, other), key=len)
        if not through.startswith(prompt) or not through.startswith(before):
            raise RecordError(
                f"message {at + 1}: the rendered answer does not continue the rendered prompt, so its first "
                "token is not known"
            )
        return _Turn(before, through)

    def _answer_span(self, turn: _Turn) -> tuple[list[int], int, int]:
        """(ids through the answer, first answer token, end of the answer)."""
        before, ids = self.encode(turn.before), self.encode(turn.through)
        if not _begins(ids, before):
            raise RecordError(
                "the answer's first characters join the prompt's last token: serving would cut it differently"
            )
        start = len(before)
        ends = [position + 1 for position in range(start, len(ids)) if ids[position] in self.eos_ids]
        return ids, start, ends[-1] if ends else len(ids)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Any,
        *,
        generation_prompt: bool = False,
        thinking: bool | None = None,
    ) -> str:
        if not self.tokenizer.chat_template:
            raise RecordError(
                "the target has no chat template; only prompts of one turn and `text` can be used"
            )
        extra = dict(self.template_args)
        if thinking is not None:
            extra["enable_thinking"] = thinking  # templates without the switch ignore it
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **extra,
            )
        except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
            raise RecordError(f"the chat template refuses it: {type(error).__name__}: {error}") from None
        return str(rendered)


def split_reasoning(message: Message) -> Message:
    """An answer with its reasoning inside `content` (before `</think>`) brought into `reasoning_content`."""
    content = message.get("content")
    if message["role"] != "assistant" or message.get("reasoning_content") or not isinstance(content, str):
        return message
    reasoning, mark, answer = content.partition("</think>")
    if not mark:
        return message
    reasoning = reasoning.strip().removeprefix("<think>").strip("\n")
    return {**message, "reasoning_content": reasoning, "content": answer.lstrip("\n")}


def _common(one: str, other: str) -> str:
    """The longest common beginning."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[: min(len(one), len(other)) if length is None else length]


def _begins(ids: list[int], prefix: list[int]) -> bool:
    return ids[: len(prefix)] == prefix
