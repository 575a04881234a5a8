"""What is counted: acceptance length, acceptance by position, break-even, from the steps of a set of
responses.

Every figure is a ratio of two sums, so that it can be pooled and resampled without a mean of means. A
`Ratio` keeps the sums of each prompt; its value is the quotient of their totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.decode import Step

Array = NDArray[np.float64]

#: Upper ends (exclusive, in tokens) and names of the context buckets.
BUCKETS: tuple[tuple[int, str], ...] = (
    (2_048, "0-2K"),
    (8_192, "2-8K"),
    (32_768, "8-32K"),
    (131_072, "32-128K"),
    (524_288, "128-512K"),
    (1_048_577, "512K-1M"),
)


def bucket_of(context: int) -> str:
    """The name of the bucket that holds a context length."""
    for end, name in BUCKETS:
        if context < end:
            return name
    return "over 1M"


@dataclass(frozen=True)
class Ratio:
    """Sum over prompts of `numerator` / sum over prompts of `denominator`, with the sums of each prompt.

    Attributes:
        numerator: float64 [n], one sum a prompt.
        denominator: float64 [n].
        formula: what is divided by what, in words.
    """

    numerator: Array
    denominator: Array
    formula: str

    @property
    def prompts(self) -> int:
        """Prompts that take part (a zero denominator does not)."""
        return int((self.denominator > 0).sum())

    @property
    def value(self) -> float:
        """The pooled quotient; NaN when there is nothing to divide by."""
        total = self.denominator.sum()
        return float(self.numerator.sum() / total) if total > 0 else float("nan")


def ratio(parts: Iterable[tuple[float, float]], formula: str) -> Ratio:
    """A `Ratio` of one (numerator, denominator) pair per prompt."""
    table = np.array(list(parts), dtype=np.float64).reshape(-1, 2)
    return Ratio(table[:, 0], table[:, 1], formula)


def acceptance_length(prompts: Sequence[Sequence[Step]]) -> Ratio:
    """τ: emitted tokens / verify steps over all steps.

    The first token, which the prefill gives, belongs to no step; a step that a limit or a stop token cut
    counts what was emitted.
    """
    return ratio(
        ((sum(s.emitted for s in steps), len(steps)) for steps in prompts), "emitted tokens / verify steps"
    )


def mean_of_prompt_means(prompts: Sequence[Sequence[Step]]) -> float:
    """The mean of each prompt's own τ, which weighs a short response like a long one."""
    means = [sum(s.emitted for s in steps) / len(steps) for steps in prompts if steps]
    return float(np.mean(means)) if means else float("nan")


def acceptance_at(prompts: Sequence[Sequence[Step]], position: int) -> Ratio:
    """Steps whose first `position` drafts were all accepted / steps that drafted at least as many."""
    return ratio(
        (
            (sum(s.accepted >= position for s in steps), sum(s.drafted >= position for s in steps))
            for steps in prompts
        ),
        f"steps whose first {position} drafts were all accepted / steps that drafted at least {position}",
    )


def conditional_at(prompts: Sequence[Sequence[Step]], position: int) -> Ratio:
    """Steps that accepted draft `position` / steps that drafted it and accepted all before it."""
    return ratio(
        (
            (
                sum(s.accepted >= position for s in steps),
                sum(s.drafted >= position and s.accepted >= position - 1 for s in steps),
            )
            for steps in prompts
        ),
        f"steps that accepted draft {position} / steps that drafted it and accepted all before it",
    )


def deepest_draft(prompts: Sequence[Sequence[Step]]) -> int:
    """The longest draft of any step."""
    return max((s.drafted for steps in prompts for s in steps), default=0)


def seconds_per_token(prompts: Sequence[Sequence[Step]]) -> Ratio:
    """Decode seconds / emitted tokens."""
    return ratio(
        ((sum(s.seconds for s in steps), sum(s.emitted for s in steps)) for steps in prompts),
        "decode seconds / emitted tokens",
    )


@dataclass(frozen=True)
class BreakEven:
    """τ at which a drafter costs what it saves, at one context bucket.

    Attributes:
        step_seconds: draft and verify seconds / verify steps.
        plain_seconds: plain decode seconds / plain tokens.
    """

    step_seconds: Ratio
    plain_seconds: Ratio

    @property
    def value(self) -> float:
        """(draft + verify seconds per step) / (seconds per plain token)."""
        return self.step_seconds.value / self.plain_seconds.value


def break_even(speculative: Sequence[Sequence[Step]], plain: Sequence[Sequence[Step]]) -> BreakEven:
    """Break-even τ from the steps of both loops on the same prompts, in the same order."""
    return BreakEven(
        ratio(
            ((sum(s.draft_seconds + s.verify_seconds for s in steps), len(steps)) for steps in speculative),
            "draft and verify seconds / verify steps",
        ),
        ratio(
            ((sum(s.seconds for s in steps), sum(s.emitted for s in steps)) for steps in plain),
            "plain decode seconds / plain tokens",
        ),
    )


def in_bucket(prompts: Sequence[Sequence[Step]], bucket: str) -> list[list[Step]]:
    """Each prompt's steps of one context bucket, prompts kept in place."""
    return [[s for s in steps if bucket_of(s.context) == bucket] for steps in prompts]


def buckets_present(prompts: Sequence[Sequence[Step]]) -> list[str]:
    """Names of the buckets that hold a step, shortest context first."""
    present = {bucket_of(s.context) for steps in prompts for s in steps}
    return [name for name in [*(name for _, name in BUCKETS), "over 1M"] if name in present]
