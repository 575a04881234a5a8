"""Several sequences in one loop, each at its own length: draft, verify, accept as far as each one goes.

The specification is the loop of one sequence in `eval.decode`: every sequence of a batch gets the tokens, the
steps and the drafts that it gets alone. Prompts are read one by one (there is nothing to gain from padding
them to one length); a step runs the drafter once, the target once and the output projection once for all
sequences, and waits for the device once. A sequence that has ended leaves the batch.

The seconds of a step are shared out evenly among the sequences that took part in it, so that sums over
sequences are seconds of the machine and a batch's figures divide like those of single sequences.

Shape legend: N sequences, K drafts of the longest proposal, R = K + 1 rows, V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from eval.batch_target import BatchSession
from eval.clock import Clock
from eval.decode import Decoded, Drafter, Limits, Step, cut
from eval.sampling import Drafts, Sampling, accept_all, pick
from eval.target import Target


class BatchDrafter(Protocol):
    """Whoever proposes tokens for several sequences, each in a slot until `select` says otherwise."""

    taps: tuple[int, ...]
    block: int

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        ...

    def prefill(self, slot: int, features_RF: Tensor) -> None:
        """See the next rows of a prompt."""
        ...

    def observe(self, emitted: Sequence[Sequence[int]], features_NRF: Tensor | None) -> None:
        """See each sequence's emitted tokens; as many rows of its features are in the target's cache now."""
        ...

    def draft(self, anchors_N: Tensor, counts: Sequence[int]) -> Drafts:
        """Propose at most `counts[i]` tokens after anchor i."""
        ...

    def select(self, slots: Sequence[int]) -> None:
        """Let only the sequences of these slots go on, in slots 0, 1, and so on; see `compacted`."""
        ...


class EachDrafter:
    """A single-sequence drafter for every slot: for those that have nothing to gain from a batch."""

    def __init__(
        self, make: Callable[[], Drafter], sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        self._make, self._sampling, self._generator = make, sampling, generator
        first = make()
        self.taps, self.block = first.taps, first.block
        self._slots: dict[int, Drafter] = {}

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        self._slots[slot] = self._make()
        self._slots[slot].start(prompt, self._sampling, self._generator)

    def prefill(self, slot: int, features_RF: Tensor) -> None:
        self._slots[slot].prefill(features_RF)

    def observe(self, emitted: Sequence[Sequence[int]], features_NRF: Tensor | None) -> None:
        for slot, tokens in enumerate(emitted):
            rows = None if features_NRF is None else features_NRF[slot, : len(tokens)]
            self._slots[slot].observe(tokens, rows)

    def draft(self, anchors_N: Tensor, counts: Sequence[int]) -> Drafts:
        parts = [self._slots[i].draft(anchors_N[i : i + 1], count) for i, count in enumerate(counts)]
        return Drafts.of(parts)

    def select(self, slots: Sequence[int]) -> None:
        self._slots = {place: self._slots[slot] for place, slot in enumerate(slots)}


class NoDrafter:
    """Plain decoding as a batch: nothing is drafted, so every step emits one token a sequence."""

    taps: tuple[int, ...] = ()
    block = 1

    def start(self, slot: int, prompt: Sequence[int]) -> None: ...

    def prefill(self, slot: int, features_RF: Tensor) -> None: ...

    def observe(self, emitted: Sequence[Sequence[int]], features_NRF: Tensor | None) -> None: ...

    def draft(self, anchors_N: Tensor, counts: Sequence[int]) -> Drafts:
        return Drafts(anchors_N.new_empty(len(counts), 0), [0] * len(counts))

    def select(self, slots: Sequence[int]) -> None: ...


@dataclass
class _Sequence:
    """One sequence while it is being decoded."""

    prompt: Sequence[int]
    prefill: float = 0.0
    ids: list[int] = field(default_factory=list)
    #: context, drafted, accepted, emitted and the number of the step, which gives its seconds
    counts: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def left(self, limits: Limits) -> int:
        """Tokens that may still come."""
        ended = bool(self.ids) and self.ids[-1] in limits.stop_ids
        return 0 if ended else limits.max_new_tokens - len(self.ids)


@torch.inference_mode()
def decode_batch(
    target: Target,
    drafter: BatchDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Limits,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[Decoded]:
    """Decode all prompts at once; results are in their order.

    Raises:
        EvalError: the target's cache cannot hold sequences of different lengths.
    """
    clock = Clock(target.device)
    session = BatchSession(target, drafter.taps, slots=len(prompts))
    everyone = [_Sequence(prompt) for prompt in prompts]
    clock.mark()
    first = []
    for slot, prompt in enumerate(prompts):
        drafter.start(slot, prompt)
        ids_T = torch.tensor(prompt, device=target.device)
        logits_V = session.admit(slot, ids_T, partial(drafter.prefill, slot))
        first.append(pick(logits_V, sampling, generator))
        clock.mark()
    tokens = [[token] for token in torch.cat(first).tolist()]
    for sequence, emitted in zip(everyone, tokens, strict=True):
        sequence.ids.extend(emitted)
    drafter.observe(tokens, None)
    running = _drop_ended(everyone, limits, session, drafter)
    clock.mark()
    active = []
    while running:
        active.append(len(running))
        left = [sequence.left(limits) for sequence in running]
        anchors_N = torch.tensor([sequence.ids[-1] for sequence in running], device=target.device)
        drafts = drafter.draft(anchors_N, [min(drafter.block - 1, count) for count in left])
        clock.mark()
        logits_NRV, features_NRF = session.forward(torch.cat([anchors_N[:, None], drafts.ids], dim=1))
        verdicts = accept_all(logits_NRV, drafts, sampling, generator)
        clock.mark()
        emitted_all = [
            cut(tokens[:count], limits.stop_ids) for (_, tokens), count in zip(verdicts, left, strict=True)
        ]
        session.keep([len(emitted) for emitted in emitted_all])
        drafter.observe(emitted_all, features_NRF)
        for sequence, emitted, (accepted, _), drafted in zip(
            running, emitted_all, verdicts, drafts.counts, strict=True
        ):
            context = len(sequence.prompt) + len(sequence.ids) - 1
            sequence.counts.append((context, drafted, accepted, len(emitted), len(active) - 1))
            sequence.ids.extend(emitted)
        running = _drop_ended(running, limits, session, drafter)
        clock.mark()
    return _decoded(everyone, clock.seconds(), active)


def _drop_ended(
    running: Sequence[_Sequence], limits: Limits, session: BatchSession, drafter: BatchDrafter
) -> list[_Sequence]:
    slots = compacted([sequence.left(limits) > 0 for sequence in running])
    if len(slots) < len(running):
        session.select(slots)
        drafter.select(slots)
    return [running[slot] for slot in slots]


def compacted(alive: Sequence[bool]) -> list[int]:
    """The slots that stay, in an order that moves few: gaps are filled from the end.

    A slot that moves comes from behind all that stay, so it can be copied without a second buffer.
    """
    count = sum(alive)
    tail = (slot for slot in range(count, len(alive)) if alive[slot])
    return [slot if alive[slot] else next(tail) for slot in range(count)]


def _decoded(everyone: Sequence[_Sequence], seconds: Sequence[float], active: Sequence[int]) -> list[Decoded]:
    """Responses with each step's seconds divided by the sequences that shared it."""
    prefills, rest = seconds[: len(everyone)], seconds[len(everyone) + 1 :]
    spans = list(zip(rest[::3], rest[1::3], rest[2::3], strict=True))
    shares = [tuple(span / count for span in three) for three, count in zip(spans, active, strict=True)]
    return [
        Decoded(
            sequence.ids, prefill, [Step(*counts, *shares[number]) for *counts, number in sequence.counts]
        )
        for sequence, prefill in zip(everyone, prefills, strict=True)
    ]
