"""Prompt lookup: the drafter that costs nothing. It copies what followed the same words the last time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eval.batch import EachDrafter
from eval.sampling import Draft, Sampling


class LookupDrafter:
    """Drafts the continuation of the most recent earlier occurrence of the last n tokens, longest n first."""

    taps: tuple[int, ...] = ()

    def __init__(self, block: int, *, longest: int = 4, shortest: int = 2, name: str = "lookup") -> None:
        self.name = name
        self.block = block
        self._lengths = tuple(range(longest, shortest - 1, -1))
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def start(self, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator | None) -> None:  # noqa: ARG002 a proposal without randomness
        """Index the prompt."""
        self._ids = []
        self._after = {}
        self._extend(prompt)

    def prefill(self, features_RF: Tensor) -> None:
        """Nothing to see: no taps."""

    def observe(self, emitted: Sequence[int], features_RF: Tensor | None) -> None:  # noqa: ARG002 no taps
        """Index the emitted tokens."""
        self._extend(emitted)

    def draft(self, anchor: Tensor, count: int) -> Draft:
        """Between 0 and `count` tokens, each proposed with certainty."""
        for length in self._lengths:
            start = self._after.get(tuple(self._ids[-length:]))
            if start is not None:
                return Draft(anchor.new_tensor(self._ids[start : start + count]))
        return Draft(anchor.new_empty(0))

    def batched(self, slots: int, sampling: Sampling, generator: torch.Generator | None) -> EachDrafter:  # noqa: ARG002 a lookup for every slot
        """A lookup of its own for every sequence."""
        longest, shortest = self._lengths[0], self._lengths[-1]

        def make() -> LookupDrafter:
            return LookupDrafter(self.block, longest=longest, shortest=shortest, name=self.name)

        return EachDrafter(make, sampling, generator)

    def _extend(self, tokens: Sequence[int]) -> None:
        # An n-gram is indexed when its next token arrives, so the last words of the text never find
        # themselves.
        for token in tokens:
            for length in self._lengths:
                if len(self._ids) >= length:
                    self._after[tuple(self._ids[-length:])] = len(self._ids)
            self._ids.append(token)
