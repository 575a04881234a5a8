"""Regeneration of a conversation turn by turn: the history is always the target's own.

Ids that the target produced are never tokenized again. The text that the template puts between an answer and
the next prompt is found by rendering the history with the decoded answer and taking what follows it; only
that text is tokenized. Where the template renders an answered turn differently as history, serving would send
other ids too: then the next turn starts a sample of its own from the rendered history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipelines.chat import ChatRenderer, MaskedTokens
from pipelines.records import Message, Record, RecordError


@dataclass
class Dialogue:
    """One record on its way through the target.

    `next_prompt` gives ids to send; `answered` takes what came back; when `next_prompt` is None the finished
    samples are in `samples`.
    """

    record: Record
    renderer: ChatRenderer
    samples: list[MaskedTokens] = field(default_factory=list)
    _history: list[Message] = field(default_factory=list)
    _left: list[Message] = field(default_factory=list)
    _text: str = ""  # rendering of everything sent and received so far
    _ids: list[int] = field(default_factory=list)
    _mask: list[bool] = field(default_factory=list)
    _answered: int = 0  # length of `_ids` after the last answer

    def __post_init__(self) -> None:
        messages = self.record.messages
        if not messages:
            raise RecordError("plain text has nothing to regenerate; capture it without --regenerate")
        # Answers that call tools stay, with the results they got; the target's own answers replace the
        # others.
        self._left = [m for m in messages if m["role"] != "assistant" or m.get("tool_calls")]
        while self._left and self._left[-1]["role"] in ("assistant", "system"):
            self._left.pop()
        if len(self._left) > 1 and not self.renderer.tokenizer.chat_template:
            raise RecordError(
                f"the target has no chat template, so a conversation of {len(self._left)} messages has no "
                "rendering; give the whole text as one `prompt`"
            )

    def next_prompt(self) -> list[int] | None:
        """Ids of the next request, or None when the conversation is complete.

        Raises:
            RecordError: the template refuses the turn.
        """
        if not self._left:
            self._close()
            return None
        self._take_turn()
        if not self.renderer.tokenizer.chat_template:
            self._start(self._history[-1]["content"], plain=True)
            return self._ids
        prompt = self.renderer.prompt_text(self._history, self.record.tools)
        if self._ids and prompt.startswith(self._text):
            added = self.renderer.encode(prompt[len(self._text) :])
            self._ids = self._ids + added
            self._mask = self._mask + [False] * len(added)
            self._text = prompt
        else:
            self._close()
            self._start(prompt)
        return self._ids

    @property
    def loss_mask(self) -> list[bool]:
        """Of the last `next_prompt`: which of its tokens are earlier answers."""
        return self._mask

    def answered(self, output_ids: list[int]) -> None:
        """Append the target's answer to the last `next_prompt`."""
        tokenizer = self.renderer.tokenizer
        self._ids = self._ids + output_ids
        self._mask = self._mask + [True] * len(output_ids)
        self._answered = len(self._ids)
        self._text += tokenizer.decode(output_ids, skip_special_tokens=False)
        text = output_ids[:-1] if output_ids and output_ids[-1] in self.renderer.eos_ids else output_ids
        self._history.append({"role": "assistant", "content": tokenizer.decode(text)})

    def stop(self) -> None:
        """End here: the prompt given out last will not be answered."""
        self._ids, self._mask = self._ids[: self._answered], self._mask[: self._answered]
        self._left = []
        self._close()

    def _take_turn(self) -> None:
        """Move messages into the history up to where the target has to answer."""
        while self._left:
            message = self._left.pop(0)
            self._history.append(message)
            answer_due = message["role"] in ("user", "tool")
            more_input = self._left and (self._left[0]["role"] == "tool" or self._left[0].get("tool_calls"))
            if answer_due and not more_input:
                return

    def _start(self, prompt: str, *, plain: bool = False) -> None:
        self._ids = (
            list(self.renderer.tokenizer(prompt)["input_ids"]) if plain else self.renderer.encode(prompt)
        )
        self._mask = [False] * len(self._ids)
        self._text = prompt
        self._answered = 0

    def _close(self) -> None:
        if any(self._mask):
            self.samples.append(MaskedTokens(self._ids, self._mask))
        self._ids, self._mask, self._text, self._answered = [], [], "", 0


def eos_ids(tokenizer: Any, generation_config: dict[str, Any]) -> frozenset[int]:
    """Every id that ends an answer: the tokenizer's and the generation config's."""
    declared = generation_config.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)
