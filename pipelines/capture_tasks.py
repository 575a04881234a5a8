"""From records to the work that is left: which sequences still have to go through the target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from pipelines.capture_options import CaptureOptions
from pipelines.chat import ChatRenderer, MaskedTokens
from pipelines.dialogue import Dialogue
from pipelines.records import Record, RecordError, Rejection
from pipelines.store import TokenSample


@dataclass(frozen=True)
class GivenSample:
    """A complete sequence, kept compact: a data set may hold billions of tokens."""

    number: int
    of: int
    token_ids: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]

    def tokens(self) -> MaskedTokens:
        return MaskedTokens(self.token_ids.tolist(), self.loss_mask.tolist())


@dataclass(frozen=True)
class Task:
    """One record that still needs work: given sequences, or a dialogue to be regenerated."""

    record: Record
    given: tuple[GivenSample, ...] = ()
    turns: int = 0  # answers to be written
    prompt_tokens: int = 0  # of all prompts of the dialogue together


@dataclass
class Plan:
    """All of it.

    Attributes:
        tasks: records that still need work.
        finished: records whose samples are all in the store.
        repeated: records equal to an earlier one.
        rejections: records that give no sample.
    """

    tasks: list[Task] = field(default_factory=list)
    finished: int = 0
    repeated: int = 0
    rejections: list[Rejection] = field(default_factory=list)


def make_plan(
    records: Iterable[Record | Rejection],
    renderer: ChatRenderer,
    done: set[str],
    options: CaptureOptions,
    limit: int,
) -> Plan:
    """Tokenize what is left to do.

    Args:
        records: from `read_records`.
        renderer: of the target.
        done: sample ids in the store.
        options: of the capture.
        limit: longest sample in tokens.
    """
    plan = Plan()
    complete = complete_records(done)
    seen: set[str] = set()
    for record in records:
        if isinstance(record, Rejection):
            plan.rejections.append(record)
            continue
        if record.id in seen:
            plan.repeated += 1
            continue
        seen.add(record.id)
        if record.id in complete:
            plan.finished += 1
            continue
        try:
            if options.regenerate:
                plan.tasks.append(_dialogue_task(record, renderer, limit))
            else:
                plan.tasks.append(_given_task(record, renderer, done, limit))
        except RecordError as error:
            plan.rejections.append(Rejection(record.source, record.line, str(error)))
    return plan


def _given_task(record: Record, renderer: ChatRenderer, done: set[str], limit: int) -> Task:
    samples = renderer.given(record)
    for sample in samples:
        if len(sample.token_ids) > limit:
            raise RecordError(f"{len(sample.token_ids)} tokens, more than max_length {limit} (--max-length)")
    given = tuple(
        GivenSample(
            number,
            len(samples),
            np.asarray(sample.token_ids, dtype=np.int32),
            np.asarray(sample.loss_mask, dtype=np.bool_),
        )
        for number, sample in enumerate(samples)
        if sample_id(record, number, len(samples)) not in done
    )
    return Task(record, given)


def _dialogue_task(record: Record, renderer: ChatRenderer, limit: int) -> Task:
    dialogue = Dialogue(record, renderer)
    prompt = dialogue.next_prompt() or []
    if not prompt:
        raise RecordError("the conversation has no turn to answer")
    if len(prompt) + 1 > limit:
        raise RecordError(f"the prompt has {len(prompt)} tokens, too many for max_length {limit}")
    turns = sum(message["role"] == "user" for message in record.messages)
    return Task(record, turns=turns, prompt_tokens=_prompt_tokens(record, renderer, len(prompt)))


def _prompt_tokens(record: Record, renderer: ChatRenderer, first: int) -> int:
    """Tokens of the last prompt without its answers, as if every message came with the first one's frame."""
    contents = [
        str(message.get("content") or "") for message in record.messages if message["role"] != "assistant"
    ]
    if len(contents) < 2:
        return first
    own = [len(renderer.encode(content)) for content in contents]
    return first + sum(own[1:]) + (len(own) - 1) * max(0, first - own[0])


def sample_id(record: Record, number: int, of: int) -> str:
    """Id of the `number`-th of `of` samples of a record: content, never position."""
    return f"{record.id}-{number}of{of}"


def complete_records(done: set[str]) -> set[str]:
    """Ids of records all of whose samples are in the store."""
    found: dict[str, int] = {}
    for name in done:
        record, _, place = name.rpartition("-")
        number_of = int(place.partition("of")[2])
        found[record] = found.get(record, 0) + 1
        if found[record] == number_of:
            found[record] = -1
    return {record for record, count in found.items() if count == -1}


def token_sample(record: Record, tokens: MaskedTokens, number: int, of: int) -> TokenSample:
    """What the store keeps of a finished sequence besides its rows."""
    return TokenSample(
        id=sample_id(record, number, of),
        token_ids=torch.tensor(tokens.token_ids, dtype=torch.int64),
        loss_mask=torch.tensor(tokens.loss_mask, dtype=torch.bool),
        conversation=record.id,
        source=record.place,
    )


def job_seed(record: Record, turn: int, seed: int) -> int:
    """Seed of one answer: from the run's seed and the content, so order and resumes do not change it."""
    digest = hashlib.sha256(f"{seed}:{record.id}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
