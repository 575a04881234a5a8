"""How sure a figure is: bootstrap over prompts, paired differences, paired permutation tests.

Prompts are the unit: the steps of one response depend on each other. All resamples of a figure are one matrix
product, counts [resamples, n] x sums [n, columns].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eval.metrics import BreakEven, Ratio

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Array = NDArray[np.float64]

RESAMPLES = 10_000
FEW_PROMPTS = 5
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
        return _finite(self)


def _finite(figure: DataclassInstance) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in asdict(figure).items()}


def few_prompts_warning(n: int) -> str | None:
    """What to say about a figure that rests on too few prompts."""
    return f"only {n} prompts: one prompt can move this figure by half" if n < FEW_PROMPTS else None


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


def _quotient(numerator: Array, denominator: Array) -> Array:
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


def estimate(figure: Ratio, *, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """A pooled ratio with its bootstrap interval over prompts."""
    kept = figure.denominator > 0
    values = np.stack([figure.numerator[kept], figure.denominator[kept]], axis=1)
    low = high = float("nan")
    if len(values):
        sums = resampled_sums(values, seed=seed, resamples=resamples)
        low, high = interval(_quotient(sums[:, 0], sums[:, 1]))
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


def estimate_break_even(figure: BreakEven, *, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """Break-even τ with its interval: both loops' times are resampled by the same prompts."""
    step, plain = figure.step_seconds, figure.plain_seconds
    columns = np.stack([step.numerator, step.denominator, plain.numerator, plain.denominator], axis=1)
    kept = columns[(step.denominator > 0) | (plain.denominator > 0)]
    low = high = float("nan")
    if len(kept):
        sums = resampled_sums(kept, seed=seed, resamples=resamples)
        low, high = interval(_quotient(_quotient(sums[:, 0], sums[:, 1]), _quotient(sums[:, 2], sums[:, 3])))
    n = min(step.prompts, plain.prompts)
    return Estimate(
        figure.value,
        low,
        high,
        n,
        f"({step.formula}) / ({plain.formula})",
        step.value,
        plain.value,
        few_prompts_warning(n),
    )


@dataclass(frozen=True)
class Comparison:
    """First figure minus second on the same prompts; `p_value` is of a two-sided paired permutation test."""

    difference: float
    low: float
    high: float
    p_value: float
    n: int
    warning: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers become None."""
        return _finite(self)


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
        return Comparison(nan, nan, nan, nan, 0, few_prompts_warning(0))

    def difference(sums: Array) -> Array:
        return _quotient(sums[:, 0], sums[:, 1]) - _quotient(sums[:, 2], sums[:, 3])

    observed = float(difference(columns.sum(axis=0, keepdims=True))[0])
    low, high = interval(difference(resampled_sums(columns, seed=seed, resamples=resamples)))
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
    return Comparison(observed, low, high, p_value, n, few_prompts_warning(n))


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
