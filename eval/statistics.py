"""How sure a figure is: bootstrap over prompts, paired differences, paired permutation tests.

Prompts are the unit: the steps of one response depend on each other. All resamples of a figure are one matrix
product, counts [resamples, n] x sums [n, columns].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.metrics import Quotient, Ratio

Array = NDArray[np.float64]

RESAMPLES = 10_000
FEW_PROMPTS = 5
#: From here on a 95 % interval holds the truth about 92 times in 100 (tests/eval/test_statistics.py).
ENOUGH_PROMPTS = 20
_EXACT_UP_TO = 13  # 2**13 label swaps are fewer than the resamples
_CHUNK_VALUES = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; `n` counts prompts, `warning` says when they are too few."""

    value: float
    low: float
    high: float
    n: int
    formula: str
    numerator: float
    denominator: float
    warning: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers become None."""
        return finite(asdict(self))


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with None in place of numbers that JSON has no word for."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def few_prompts_warning(n: int) -> str | None:
    """What to say about a figure that rests on too few prompts."""
    if n < FEW_PROMPTS:
        return f"only {n} prompts: one prompt can move this figure by half"
    if n < ENOUGH_PROMPTS:
        return f"{n} prompts, fewer than {ENOUGH_PROMPTS}: the interval is narrower than the doubt"
    return None


def resampled_sums(values_NM: Array, *, seed: int, resamples: int = RESAMPLES) -> Array:
    """Sums [resamples, M] of N rows drawn with replacement, the same draws for all columns."""
    n = len(values_NM)
    chunk = max(1, _CHUNK_VALUES // n)
    parts = [
        _draw_counts(n, seed + done, min(chunk, resamples - done)) @ values_NM
        for done in range(0, resamples, chunk)
    ]
    return np.concatenate(parts)


@lru_cache(maxsize=2)
def _draw_counts(n: int, seed: int, resamples: int) -> Array:
    """How often each of n prompts is drawn in each resample; figures of the same prompts share them."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(n, np.full(n, 1.0 / n), size=resamples).astype(np.float64)


def interval(samples: Array) -> tuple[float, float]:
    """2.5 and 97.5 percentiles of the finite samples (NaN, NaN when there are none)."""
    finite = samples[np.isfinite(samples)]
    if finite.size == 0:
        return float("nan"), float("nan")
    low, high = np.percentile(finite, [2.5, 97.5])
    return float(low), float(high)


def _interval_of_prompts(samples: Array, n: int) -> tuple[float, float]:
    """The interval; one prompt has none, its resamples are all the same."""
    return interval(samples) if n > 1 else (float("nan"), float("nan"))


def _quotient(numerator: Array, denominator: Array) -> Array:
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


def estimate(figure: Ratio, *, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """A pooled ratio with its bootstrap interval over prompts."""
    kept = figure.denominator > 0
    values = np.stack([figure.numerator[kept], figure.denominator[kept]], axis=1)
    low = high = float("nan")
    if len(values):
        sums = resampled_sums(values, seed=seed, resamples=resamples)
        low, high = _interval_of_prompts(_quotient(sums[:, 0], sums[:, 1]), len(values))
    return Estimate(
        figure.value,
        low,
        high,
        figure.prompts,
        figure.formula,
        float(figure.numerator.sum()),
        float(figure.denominator.sum()),
        few_prompts_warning(figure.prompts),
    )


def estimate_quotient(figure: Quotient, *, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """A quotient of two pooled ratios with its interval: both are resampled by the same prompts."""
    first, second = figure.first, figure.second
    columns = np.stack([first.numerator, first.denominator, second.numerator, second.denominator], axis=1)
    kept = columns[(first.denominator > 0) | (second.denominator > 0)]
    low = high = float("nan")
    if len(kept):
        sums = resampled_sums(kept, seed=seed, resamples=resamples)
        samples = _quotient(_quotient(sums[:, 0], sums[:, 1]), _quotient(sums[:, 2], sums[:, 3]))
        low, high = _interval_of_prompts(samples, len(kept))
    n = min(first.prompts, second.prompts)
    return Estimate(
        figure.value, low, high, n, figure.formula, first.value, second.value, few_prompts_warning(n)
    )


def predicted_speed_up(tau: float, even: Estimate) -> Estimate:
    """Speed-up at another acceptance length: τ / break-even, with the interval of break-even."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value, low, high = (float(np.float64(tau) / edge) for edge in (even.value, even.high, even.low))
    return Estimate(value, low, high, even.n, "acceptance length / break-even", tau, even.value, even.warning)


@dataclass(frozen=True)
class Claim:
    """Whether the prompts show an effect.

    Attributes:
        shown: n is at least `ENOUGH_PROMPTS` and the interval leaves out "no effect".
        text: what can be said.
        prompts_needed: about how many prompts would show an effect of the observed size; None where it is
            shown or where there is no effect to show.
    """

    shown: bool
    text: str
    prompts_needed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def claim(
    value: float, low: float, high: float, n: int, *, no_effect: float, words: tuple[str, str]
) -> Claim:
    """What an interval supports.

    An interval narrows with the square root of n, so an effect d with an interval of half-width h needs about
    n (h / d)^2 prompts, and never fewer than `ENOUGH_PROMPTS`.

    Args:
        value: the figure.
        low: lower end of its 95 % interval.
        high: upper end.
        n: prompts that it rests on.
        no_effect: what it would be without an effect: 1 for a speed-up, 0 for a difference.
        words: what a figure below and one above `no_effect` mean.
    """
    if not math.isfinite(value):
        return Claim(shown=False, text="not measured")
    if not math.isfinite(low):
        return Claim(shown=False, text="not shown", prompts_needed=ENOUGH_PROMPTS)
    if low > no_effect or high < no_effect:
        word = words[value > no_effect]
        if n >= ENOUGH_PROMPTS:
            return Claim(shown=True, text=word)
        return Claim(shown=False, text=f"{word}?", prompts_needed=ENOUGH_PROMPTS)
    effect, half = abs(value - no_effect), (high - low) / 2
    needed = max(ENOUGH_PROMPTS, math.ceil(n * (half / effect) ** 2)) if effect > half * 1e-3 else None
    return Claim(shown=False, text="not shown", prompts_needed=needed)


@dataclass(frozen=True)
class Comparison:
    """First figure minus second on the same prompts.

    Attributes:
        difference: of the two pooled ratios.
        low: lower end of its 95 % interval.
        high: upper end.
        p_value: of a two-sided paired permutation test.
        n: prompts that both figures have.
        first_higher: prompts on which the first figure is higher; on `second_higher` the second; equal on the
            rest.
        warning: what the number of prompts does not allow.
    """

    difference: float
    low: float
    high: float
    p_value: float
    n: int
    first_higher: int = 0
    second_higher: int = 0
    warning: str | None = None

    @property
    def claim(self) -> Claim:
        """Whether the prompts show that one is higher."""
        words = ("lower", "higher")
        return claim(self.difference, self.low, self.high, self.n, no_effect=0.0, words=words)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers become None."""
        return finite(asdict(self))


def compare(first: Ratio, second: Ratio, *, seed: int, resamples: int = RESAMPLES) -> Comparison:
    """Difference of two pooled ratios of the same prompts in the same order.

    The interval resamples prompts with both their figures. The p-value swaps the two labels prompt by prompt:
    all 2^n swaps while there are at most 2^13 of them, else `resamples` random ones.
    """
    kept = (first.denominator > 0) & (second.denominator > 0)
    columns = np.stack([first.numerator, first.denominator, second.numerator, second.denominator], axis=1)[
        kept
    ]
    n = len(columns)
    if n == 0:
        nan = float("nan")
        return Comparison(nan, nan, nan, nan, 0, warning=few_prompts_warning(0))

    def difference(sums: Array) -> Array:
        return _quotient(sums[:, 0], sums[:, 1]) - _quotient(sums[:, 2], sums[:, 3])

    observed = float(difference(columns.sum(axis=0, keepdims=True))[0])
    samples = difference(resampled_sums(columns, seed=seed, resamples=resamples))
    low, high = _interval_of_prompts(samples, n)
    exact = n <= _EXACT_UP_TO
    if exact:
        swaps = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    else:
        swaps = np.random.default_rng(seed + 1).integers(0, 2, size=(resamples, n))
    exchanged = columns[:, [2, 3, 0, 1]]
    permuted = difference(columns.sum(axis=0) + swaps @ (exchanged - columns))
    # Equal up to rounding counts as equal: the unswapped labels must always be counted.
    as_far = int((np.abs(permuted) >= abs(observed) - 1e-9 * (1.0 + abs(observed))).sum())
    p_value = as_far / len(permuted) if exact else (as_far + 1) / (len(permuted) + 1)
    gaps = _quotient(columns[:, 0], columns[:, 1]) - _quotient(columns[:, 2], columns[:, 3])
    return Comparison(
        observed,
        low,
        high,
        p_value,
        n,
        int((gaps > 0).sum()),
        int((gaps < 0).sum()),
        few_prompts_warning(n),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Holm's step-down method): a family of true nulls gives one below 0.05
    at most five times in a hundred.

    NaN stays NaN and does not count.
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [float("nan")] * len(p_values)
    highest = 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        adjusted[i] = highest
    return adjusted


def median_and_quartiles(values: Sequence[float]) -> dict[str, float | int]:
    """Median, quartiles and count of repeated measurements."""
    low, median, high = np.percentile(np.asarray(values, dtype=np.float64), [25, 50, 75])
    return {
        "median": float(median),
        "q1": float(low),
        "q3": float(high),
        "iqr": float(high - low),
        "n": len(values),
    }
