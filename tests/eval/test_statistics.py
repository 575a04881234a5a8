"""Intervals and tests against scipy and against known truths."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.metrics import Quotient, Ratio, ratio
from eval.statistics import (
    RESAMPLES,
    claim,
    compare,
    estimate,
    estimate_quotient,
    holm,
    median_and_quartiles,
    predicted_speed_up,
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


def test_few_prompts_carry_a_warning_and_twenty_do_not():
    assert "only 4 prompts" in estimate(draws(0, 4, 2.0), seed=0).warning
    assert "fewer than 20" in estimate(draws(0, 19, 2.0), seed=0).warning
    assert estimate(draws(0, 20, 2.0), seed=0).warning is None


def test_one_prompt_has_no_interval():
    alone = estimate(draws(0, 1, 2.0), seed=0)
    assert np.isfinite(alone.value)
    assert np.isnan(alone.low)
    assert np.isnan(compare(draws(0, 1, 2.0), draws(1, 1, 2.0), seed=0).low)
    assert claim(1.2, alone.low, alone.high, 1, no_effect=1.0, words=("slower", "faster")).text == (
        "not shown"
    )


def test_intervals_of_few_prompts_hold_the_truth_too_seldom_and_of_twenty_nearly_often_enough():
    def covered(n):
        trials = 400
        held = 0
        for trial in range(trials):
            generator = np.random.default_rng(trial)
            steps = generator.integers(5, 60, n).astype(float)
            means = np.maximum(generator.normal(2.0, 0.5, n), 0.1)  # prompts differ, as real ones do
            figure = Ratio(generator.poisson(steps * means).astype(float), steps, "")
            e = estimate(figure, seed=trial, resamples=500)
            held += e.low <= 2.0 <= e.high
        return held / trials

    # 1,500 trials gave 0.83 at n = 5, 0.91 at 20 and 0.93 at 50; 400 trials are sure to about 0.03.
    assert 0.76 < covered(5) < 0.89
    assert 0.88 < covered(20) < 0.96


WORDS = {"no_effect": 1.0, "words": ("slower", "faster")}


def test_claim_needs_an_interval_without_the_null_and_enough_prompts():
    assert claim(1.3, 1.1, 1.5, 40, **WORDS).to_dict() == {
        "shown": True,
        "text": "faster",
        "prompts_needed": None,
    }
    assert claim(0.8, 0.7, 0.9, 40, **WORDS).text == "slower"
    few = claim(1.3, 1.1, 1.5, 19, **WORDS)
    assert (few.shown, few.text, few.prompts_needed) == (False, "faster?", 20)


def test_prompts_needed_grow_with_the_square_of_the_width_over_the_effect():
    # Half-width 0.4 against an effect of 0.1: sixteen times the prompts.
    unsure = claim(1.1, 0.7, 1.5, 25, **WORDS)
    assert (unsure.shown, unsure.text, unsure.prompts_needed) == (False, "not shown", 400)
    assert claim(1.0, 0.7, 1.3, 25, **WORDS).prompts_needed is None
    assert claim(1.29, 0.99, 1.59, 6, **WORDS).prompts_needed == 20


def test_the_prompts_said_to_be_needed_do_show_the_effect():
    def speed(n, seed):
        generator = np.random.default_rng(seed)
        seconds = generator.uniform(1, 3, n)
        return Ratio(seconds * generator.normal(1.05, 0.25, n), seconds, "")

    small = estimate(speed(40, 5), seed=0, resamples=500)
    needed = claim(small.value, small.low, small.high, 40, **WORDS).prompts_needed
    assert 40 < needed < 400
    # Twice as many, because the small set's effect and spread are themselves uncertain.
    large = estimate(speed(2 * needed, 15), seed=0, resamples=500)
    assert claim(large.value, large.low, large.high, large.n, **WORDS).shown


def test_comparison_counts_the_prompts_on_each_side():
    first, second = ratio([(4, 2), (6, 2), (2, 2)], ""), ratio([(2, 2), (6, 2), (3, 2)], "")
    both = compare(first, second, seed=0)
    assert (both.first_higher, both.second_higher, both.n) == (1, 1, 3)


def test_holm_adjusts_for_the_number_of_comparisons():
    # By hand: 0.01 x 3, 0.02 x 2, 0.04 x 1, never below an earlier one.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    with_gap = holm([0.01, float("nan")])
    assert with_gap[0] == 0.01
    assert np.isnan(with_gap[1])


def test_holm_keeps_a_family_of_true_nulls_quiet():
    generator = np.random.default_rng(0)
    false_alarms = sum(min(holm(list(generator.uniform(size=6)))) < 0.05 for _ in range(2000))
    assert 0.03 < false_alarms / 2000 < 0.065  # without adjustment it would be 1 - 0.95**6 = 0.26


def test_no_prompts_give_no_number():
    e = estimate(ratio([], "x / y"), seed=0)
    assert e.n == 0
    assert e.to_dict()["value"] is None


def test_break_even_interval_holds_its_value():
    e = estimate_quotient(Quotient(draws(0, 30, 0.08), draws(1, 30, 0.05)), seed=0)
    assert e.low < e.value < e.high
    assert e.value == pytest.approx(1.6, rel=0.1)


def test_predicted_speed_up_is_tau_over_break_even_with_the_interval_turned_round():
    even = estimate_quotient(Quotient(draws(0, 30, 0.08), draws(1, 30, 0.05)), seed=0)
    at_even, twice = predicted_speed_up(even.value, even), predicted_speed_up(2 * even.value, even)
    assert at_even.value == pytest.approx(1.0)
    assert twice.value == pytest.approx(2.0)
    assert twice.low == pytest.approx(2 * even.value / even.high)
    assert twice.high == pytest.approx(2 * even.value / even.low)


def test_median_and_quartiles():
    assert median_and_quartiles([1, 2, 3, 4, 5]) == {"median": 3, "q1": 2, "q3": 4, "iqr": 2, "n": 5}
