"""The two loops that are compared: plain decoding and draft-then-verify, batch 1 (arXiv 2602.06036 sec. 3).

Both run on the same session: the prompt once, afterwards only new rows, one output projection per forward,
one wait for the device per step. Times: a step is draft, verify (the target's forward and the acceptance
test) and other (cutting, cropping).

Shape legend: K drafts, R rows of a verify step, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from eval.clock import Clock
from eval.sampling import Draft, Sampling, accept, pick
from eval.target import Target

if TYPE_CHECKING:
    from eval.batch import BatchDrafter


@dataclass(frozen=True)
class Limits:
    """When a response ends: its length and the token ids that end it (kept in the response)."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()


class Step(NamedTuple):
    """One forward of the target after the prefill.

    `context` counts the tokens before the anchor; `accepted` is what the target agreed with, before a limit
    or a stop token cut the step to `emitted` tokens.
    """

    context: int
    drafted: int
    accepted: int
    emitted: int
    draft_seconds: float
    verify_seconds: float
    other_seconds: float

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.other_seconds


@dataclass(frozen=True)
class Decoded:
    """A response: its tokens (the first one comes from the prefill and belongs to no step) and its steps."""

    ids: list[int]
    prefill_seconds: float
    steps: list[Step]

    @property
    def decode_seconds(self) -> float:
        return sum(step.seconds for step in self.steps)


class Drafter(Protocol):
    """Whoever proposes tokens; one object serves one sequence after another."""

    name: str
    taps: tuple[int, ...]
    block: int

    def start(self, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator | None) -> None:
        """Forget the last sequence."""
        ...

    def prefill(self, features_RF: Tensor) -> None:
        """See the next rows of the prompt."""
        ...

    def observe(self, emitted: Sequence[int], features_RF: Tensor | None) -> None:
        """See the emitted tokens and the features of the rows that the step left in the target's cache."""
        ...

    def draft(self, anchor: Tensor, count: int) -> Draft:
        """Propose at most `count` tokens after `anchor`, int64 [1]."""
        ...

    def batched(self, slots: int, sampling: Sampling, generator: torch.Generator | None) -> BatchDrafter:
        """The same drafter for several sequences at once."""
        ...


@torch.inference_mode()
def decode_plain(
    target: Target,
    prompt: Sequence[int],
    *,
    limits: Limits,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Decoded:
    """One token per target forward."""
    clock = Clock(target.device)
    session = target.open()
    clock.mark()
    logits_V = session.prefill(torch.tensor(prompt, device=target.device))
    token = pick(logits_V, sampling, generator)
    ids = [int(token)]
    clock.mark()
    while len(ids) < limits.max_new_tokens and ids[-1] not in limits.stop_ids:
        logits_RV, _ = session.forward(token)
        token = pick(logits_RV[-1], sampling, generator)
        ids.append(int(token))
        clock.mark()
        session.drop(0)
        clock.mark()
    prefill, *rest = clock.seconds()
    steps = [
        Step(len(prompt) + i, 0, 0, 1, 0.0, verify, other)
        for i, (verify, other) in enumerate(zip(rest[::2], rest[1::2], strict=True))
    ]
    return Decoded(ids, prefill, steps)


@torch.inference_mode()
def decode_speculative(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    limits: Limits,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Decoded:
    """Draft up to `drafter.block - 1` tokens, verify them with the anchor in one target forward, repeat.

    The block shrinks to the tokens that may still come: rows = min(block, tokens left + the anchor).
    """
    clock = Clock(target.device)
    session = target.open(drafter.taps)
    clock.mark()
    drafter.start(prompt, sampling, generator)
    logits_V = session.prefill(torch.tensor(prompt, device=target.device), drafter.prefill)
    anchor = pick(logits_V, sampling, generator)
    ids = [int(anchor)]
    drafter.observe(ids, None)
    clock.mark()
    counts: list[tuple[int, int, int, int]] = []
    while len(ids) < limits.max_new_tokens and ids[-1] not in limits.stop_ids:
        left = limits.max_new_tokens - len(ids)
        draft = drafter.draft(anchor, min(drafter.block - 1, left))
        clock.mark()
        logits_RV, features_RF = session.forward(torch.cat([anchor, draft.ids]))
        accepted, tokens = accept(logits_RV, draft, sampling, generator)
        clock.mark()
        emitted = cut(tokens[:left], limits.stop_ids)
        session.drop(logits_RV.shape[0] - len(emitted))
        drafter.observe(emitted, None if features_RF is None else features_RF[: len(emitted)])
        counts.append((len(prompt) + len(ids) - 1, draft.ids.shape[0], accepted, len(emitted)))
        ids.extend(emitted)
        anchor = anchor.new_tensor(emitted[-1:])
        clock.mark()
    prefill, *rest = clock.seconds()
    spans = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
    return Decoded(ids, prefill, [Step(*count, *span) for count, span in zip(counts, spans, strict=True)])


def cut(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    kept: list[int] = []
    for token in tokens:
        kept.append(token)
        if token in stop_ids:
            break
    return kept
