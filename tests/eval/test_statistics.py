"""Intervals and tests against scipy and against known truths."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.metrics import BreakEven, Ratio, ratio
from eval.statistics import (
    RESAMPLES,
    compare,
    estimate,
    estimate_break_even,
    median_and_quartiles,
    resampled_sums,
)


def draws(seed, n, mean):
    generator = np.random.default_rng(seed)
    steps = generator.integers(5, 60, n).astype(float)
    return Ratio(generator.poisson(steps * mean).astype(float), steps, "x / y")


def pooled(numerator, denominator, axis=-1):
    return numerator.sum(axis=axis) / denominator.sum(axis=axis)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(12, 60), mean=st.floats(0.5, 4.0))
def test_interval_of_a_ratio_of_sums_agrees_with_scipy(seed, n, mean):
    figure = draws(seed, n, mean)
    ours = estimate(figure, seed=0)
    theirs = scipy.stats.bootstrap(
        (figure.numerator, figure.denominator),
        pooled,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=RESAMPLES,
        random_state=1,
    ).confidence_interval
    # Two independent sets of 10,000 resamples: the percentiles differ by a few hundredths of the width.
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.06 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.06 * width)
    assert ours.low <= ours.value <= ours.high


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(3, 9))
def test_exact_permutation_p_value_equals_scipys(seed, n):
    first, second = draws(seed, n, 2.0), draws(seed + 1, n, 2.3)
    second = Ratio(second.numerator, first.denominator, "x / y")

    # With equal denominators the pooled difference is a mean of paired differences, which scipy can permute.
    def statistic(x, y, axis=-1):
        return (x - y).sum(axis=axis) / first.denominator.sum()

    theirs = scipy.stats.permutation_test(
        (first.numerator, second.numerator), statistic, permutation_type="samples", vectorized=True
    ).pvalue
    assert compare(first, second, seed=0).p_value == pytest.approx(theirs)


def test_random_permutation_p_value_is_near_the_paired_t_test():
    generator = np.random.default_rng(3)
    steps = np.full(60, 20.0)
    base = generator.poisson(40, 60).astype(float)
    first = Ratio(base + generator.normal(1.5, 5, 60), steps, "")
    second = Ratio(base, steps, "")
    expected = scipy.stats.ttest_rel(first.numerator, second.numerator).pvalue
    assert compare(first, second, seed=0).p_value == pytest.approx(expected, abs=0.02)


def test_pairing_sees_a_small_difference_that_prompts_would_hide():
    generator = np.random.default_rng(0)
    steps = np.full(40, 50.0)
    base = generator.uniform(60, 250, 40)  # prompts differ far more than drafters
    better = compare(Ratio(base + generator.normal(4, 2, 40), steps, ""), Ratio(base, steps, ""), seed=0)
    assert better.low > 0
    assert better.p_value < 0.001
    assert better.difference == pytest.approx(0.08, abs=0.02)


def test_identical_drafters_differ_by_nothing():
    figure = draws(5, 30, 2.0)
    same = compare(figure, figure, seed=0)
    assert (same.difference, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_interval_covers_the_truth_about_nineteen_times_in_twenty():
    covered = 0
    for trial in range(200):
        e = estimate(draws(trial, 40, 2.0), seed=trial, resamples=1000)
        covered += e.low <= 2.0 <= e.high
    # Binomial(200, 0.95) is below 180 once in a thousand; percentile intervals at n = 40 cover slightly less.
    assert 175 <= covered <= 200


def test_same_seed_gives_the_same_interval_and_columns_share_their_draws():
    figure = draws(1, 20, 2.0)
    assert estimate(figure, seed=4) == estimate(figure, seed=4)
    sums = resampled_sums(np.stack([figure.numerator, 2 * figure.numerator], axis=1), seed=0, resamples=50)
    np.testing.assert_allclose(sums[:, 1], 2 * sums[:, 0])


def test_resamples_in_chunks_when_prompts_are_many():
    sums = resampled_sums(np.ones((5000, 1)), seed=0, resamples=2000)
    assert sums.shape == (2000, 1)
    np.testing.assert_allclose(sums, 5000)


def test_prompts_without_a_denominator_do_not_take_part():
    e = estimate(ratio([(4, 2), (0, 0), (6, 2)], "x / y"), seed=0)
    assert (e.n, e.value, e.numerator, e.denominator) == (2, 2.5, 10, 4)


def test_few_prompts_carry_a_warning_and_five_do_not():
    assert "only 4 prompts" in estimate(draws(0, 4, 2.0), seed=0).warning
    assert estimate(draws(0, 5, 2.0), seed=0).warning is None


def test_no_prompts_give_no_number():
    e = estimate(ratio([], "x / y"), seed=0)
    assert e.n == 0
    assert e.to_dict()["value"] is None


def test_break_even_interval_holds_its_value():
    e = estimate_break_even(BreakEven(draws(0, 30, 0.08), draws(1, 30, 0.05)), seed=0)
    assert e.low < e.value < e.high
    assert e.value == pytest.approx(1.6, rel=0.1)


def test_median_and_quartiles():
    assert median_and_quartiles([1, 2, 3, 4, 5]) == {"median": 3, "q1": 2, "q3": 4, "iqr": 2, "n": 5}
