"""Definitions on hand-made runs with known answers."""

import math

import pytest

from eval.contexts import bucket_of
from eval.decode import Step
from eval.metrics import (
    acceptance_at,
    acceptance_length,
    break_even,
    buckets_present,
    conditional_at,
    deepest_draft,
    in_bucket,
    mean_of_prompt_means,
)


def step(accepted, *, drafted=3, emitted=None, context=10, draft=0.0, verify=0.0, other=0.0):
    return Step(
        context, drafted, accepted, accepted + 1 if emitted is None else emitted, draft, verify, other
    )


def test_acceptance_length_pools_steps_whatever_their_grouping():
    # Runs of 3, 2, 1, 0 accepted drafts average 1.5, not the product of marginals nor a mean of group means.
    grouped = [[step(3), step(1)], [step(2), step(0)]]
    regrouped = [[step(3)], [step(2), step(1), step(0)]]
    assert acceptance_length(grouped).value == 2.5
    assert acceptance_length(regrouped).value == 2.5
    assert mean_of_prompt_means(grouped).value == 2.5
    assert mean_of_prompt_means(regrouped).value == (4 + 2) / 2


def test_short_response_does_not_weigh_like_a_long_one():
    prompts = [[step(3)], [step(0)] * 99]
    assert acceptance_length(prompts).value == pytest.approx(103 / 100)
    assert mean_of_prompt_means(prompts).value == pytest.approx(2.5)


def test_cut_step_counts_only_what_was_emitted():
    prompts = [[step(3), step(3, emitted=2)]]
    tau = acceptance_length(prompts)
    assert (tau.numerator.sum(), tau.denominator.sum(), tau.value) == (6, 2, 3.0)
    # The drafts were still accepted by the target.
    assert acceptance_at(prompts, 3).value == 1.0


def test_acceptance_by_position_divides_by_the_steps_that_drafted_so_far():
    prompts = [[step(3), step(2), step(1), step(0)], [step(1, drafted=1)]]
    assert [acceptance_at(prompts, j).value for j in (1, 2, 3)] == [4 / 5, 2 / 4, 1 / 4]
    assert [conditional_at(prompts, j).value for j in (1, 2, 3)] == [4 / 5, 2 / 3, 1 / 2]
    assert deepest_draft(prompts) == 3


def test_position_that_nobody_drafted_has_no_value():
    assert math.isnan(acceptance_at([[step(1, drafted=1)]], 2).value)


def test_break_even_is_step_time_over_plain_token_time():
    speculative = [[step(1, draft=0.2, verify=0.5, other=0.1)], [step(0, draft=0.2, verify=0.5, other=0.1)]]
    plain = [[step(0, drafted=0, verify=0.3, other=0.1)] * 3, [step(0, drafted=0, verify=0.3, other=0.1)]]
    assert break_even(speculative, plain).value == pytest.approx(0.7 / 0.4)


def test_bucket_edges():
    names = [bucket_of(c) for c in (0, 2047, 2048, 8191, 8192, 131_071, 131_072, 1_048_575, 2_000_000)]
    assert names == ["0-2K", "0-2K", "2-8K", "2-8K", "8-32K", "32-128K", "128-512K", "512K-1M", "over 1M"]


def test_buckets_partition_the_steps_and_keep_prompts_in_place():
    prompts = [[step(0, context=5), step(1, context=3000)], [step(2, context=3000)]]
    assert buckets_present(prompts) == ["0-2K", "2-8K"]
    assert [len(s) for s in in_bucket(prompts, "0-2K")] == [1, 0]
    assert acceptance_length(in_bucket(prompts, "0-2K")).prompts == 1
    assert acceptance_length(in_bucket(prompts, "2-8K")).value == 2.5
