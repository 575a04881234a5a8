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

from eval.contexts import EDGES, bucket_names, bucket_of
from eval.decode import Step

Array = NDArray[np.float64]


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


def mean_of_prompt_means(prompts: Sequence[Sequence[Step]]) -> Ratio:
    """The mean of each prompt's own τ, which weighs a short response like a long one."""
    return ratio(
        ((sum(s.emitted for s in steps) / len(steps), 1) if steps else (0, 0) for steps in prompts),
        "sum of each prompt's own acceptance length / prompts",
    )


def accepted_share(prompts: Sequence[Sequence[Step]]) -> Ratio:
    """Accepted draft tokens / drafted tokens, what engines call the draft acceptance rate."""
    return ratio(
        ((sum(s.accepted for s in steps), sum(s.drafted for s in steps)) for steps in prompts),
        "accepted draft tokens / drafted tokens",
    )


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


@dataclass(frozen=True)
class Quotient:
    """One pooled ratio divided by another of the same prompts in the same order."""

    first: Ratio
    second: Ratio

    @property
    def value(self) -> float:
        """The quotient; NaN when there is nothing to divide by."""
        divisor = self.second.value
        return self.first.value / divisor if divisor > 0 else float("nan")

    @property
    def formula(self) -> str:
        return f"({self.first.formula}) / ({self.second.formula})"


def seconds_per_token(prompts: Sequence[Sequence[Step]], what: str) -> Ratio:
    """Decode seconds / emitted tokens of the loop that `what` names."""
    return ratio(
        ((sum(s.seconds for s in steps), sum(s.emitted for s in steps)) for steps in prompts),
        f"{what} decode seconds / {what} tokens",
    )


def break_even(speculative: Sequence[Sequence[Step]], plain: Sequence[Sequence[Step]]) -> Quotient:
    """τ at which a drafter costs what it saves: draft + verify seconds per step / seconds per plain token.

    Both loops' steps are of the same prompts, in the same order.
    """
    step_seconds = ratio(
        ((sum(s.draft_seconds + s.verify_seconds for s in steps), len(steps)) for steps in speculative),
        "draft and verify seconds / verify steps",
    )
    return Quotient(step_seconds, seconds_per_token(plain, "plain"))


def speed_up_of_steps(speculative: Sequence[Sequence[Step]], plain: Sequence[Sequence[Step]]) -> Quotient:
    """Seconds per plain token / seconds per speculative token, for steps that are a part of responses."""
    return Quotient(seconds_per_token(plain, "plain"), seconds_per_token(speculative, "speculative"))


def in_bucket(
    prompts: Sequence[Sequence[Step]], bucket: str, edges: Sequence[int] = EDGES
) -> list[list[Step]]:
    """Each prompt's steps of one context bucket, prompts kept in place."""
    return [[s for s in steps if bucket_of(s.context, edges) == bucket] for steps in prompts]


def buckets_present(prompts: Sequence[Sequence[Step]], edges: Sequence[int] = EDGES) -> list[str]:
    """Names of the buckets that hold a step, shortest context first."""
    present = {bucket_of(s.context, edges) for steps in prompts for s in steps}
    return [name for name in bucket_names(edges) if name in present]
