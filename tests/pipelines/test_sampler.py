"""Which samples a step takes: by number, by tokens or by slots, whatever the ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipelines.corpus import DataError, SampleRef
from pipelines.sampler import BatchConfig, Sampler, pack


def refs(sizes: list[int]) -> list[SampleRef]:
    return [SampleRef(0, i, f"s{i}", size) for i, size in enumerate(sizes)]


def sampler(given: list[SampleRef], seed: int = 0, **batch) -> Sampler:
    return Sampler(given, BatchConfig.model_validate(batch), lambda ref: ref.tokens, seed)


MIXED = refs([8000, 6000, 9000] + [1000 + 10 * i for i in range(30)] + [100 + i for i in range(120)])


def sums(steps) -> list[int]:
    return [sum(ref.tokens for ref, _ in step) for step in steps]


def test_steps_of_an_epoch_take_every_sample_once_and_are_about_equal():
    s = sampler(MIXED, tokens=10_000)
    count = int(s.steps_per_epoch)
    steps = [s.step(number) for number in range(count)]
    assert sorted(ref.index for step in steps for ref, _ in step) == list(range(len(MIXED)))
    # the smallest samples fill what the others leave, so steps differ by about one of them
    assert max(sums(steps)) - min(sums(steps)) < 300
    assert abs(max(sums(steps)) - 10_000) < 1500
    mixed = [step for step in steps if max(ref.tokens for ref, _ in step) >= 6000]
    assert all(min(ref.tokens for ref, _ in step) < 1500 for step in mixed)


def test_packing_depends_on_seed_and_epoch_alone_and_mixes_anew():
    one, other = sampler(MIXED, tokens=10_000), sampler(list(reversed(MIXED)), tokens=10_000)
    count = int(one.steps_per_epoch)
    for number in (0, 3, count, 2 * count + 1):
        assert [ref.index for ref, _ in one.step(number)] == [ref.index for ref, _ in other.step(number)]
        assert {epoch for _, epoch in one.step(number)} == {number // count}

    def partners(s: Sampler, epoch: int) -> frozenset[int]:
        steps = [s.step(epoch * count + i) for i in range(count)]
        return next(
            frozenset(r.index for r, _ in step) for step in steps if any(r.index == 0 for r, _ in step)
        )

    companions = {partners(one, epoch) for epoch in range(4)}
    assert len(companions) == 4  # the same long sample meets others every time
    assert partners(sampler(MIXED, seed=1, tokens=10_000), 0) not in companions


def test_long_samples_come_at_any_time_of_an_epoch():
    s = sampler(MIXED, tokens=10_000)
    count = int(s.steps_per_epoch)
    places = {n % count for n in range(8 * count) if any(ref.tokens > 5000 for ref, _ in s.step(n))}
    assert len(places) > count // 2


def test_a_sample_above_the_budget_is_a_step_of_its_own():
    s = sampler(refs([50_000, *[1000] * 20]), tokens=5000)
    steps = [s.step(n) for n in range(int(s.steps_per_epoch))]
    assert sorted(sums(steps)) == [5000, 5000, 5000, 5000, 50_000]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 2000))
def test_pack_loses_nothing_and_its_number_of_steps_is_that_of_the_sizes(sizes, budget):
    steps = pack(sizes, budget)
    assert sorted(i for step in steps for i in step) == list(range(len(sizes)))
    assert len(pack(sizes[::-1], budget)) == len(steps)
    shared = [sum(sizes[i] for i in step) for step in steps if all(sizes[i] < budget for i in step)]
    if len(shared) > 1:  # no step is heavier than the lightest by more than what it took last
        assert max(shared) - min(shared) <= max(size for size in sizes if size < budget)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [None, 1000, 2500, 100_000])
def test_replicas_share_a_step_in_equal_rounds_and_parts(replicas, micro):
    s = sampler(MIXED, tokens=10_000, micro=micro)
    for number in range(int(s.steps_per_epoch)):
        picked = s.step(number)
        dealt = [s.deal(picked, replica, replicas) for replica in range(replicas)]
        assert len({len(rounds) for rounds in dealt}) == 1
        assert sorted(r.index for rounds in dealt for m in rounds for r, _ in m) == sorted(
            r.index for r, _ in picked
        )
        for rounds in dealt:
            for batch in rounds:
                assert micro is None or len(batch) <= 1 or sums([batch])[0] <= micro
        loads = [sum(sums(rounds)) for rounds in dealt]
        longest = max(ref.tokens for ref, _ in picked)
        assert max(loads) - min(loads) <= max(longest, micro or 0)
        if longest < 1500 and replicas <= 3:  # nothing stands in the way of equal parts
            assert max(loads) - min(loads) < 0.2 * sum(loads)


def test_samples_before_a_step_are_counted():
    for s in (sampler(MIXED, tokens=10_000), sampler(MIXED, samples=4)):
        for number in (0, 1, 7, 40, 61):
            assert s.samples_before(number) == sum(len(s.step(n)) for n in range(number))
    assert sampler(MIXED, samples=4).steps_per_epoch == len(MIXED) / 4


def test_groups_keep_the_order_and_the_limit():
    held_out = refs([400, 700, 5000, 100, 100])
    s = sampler(MIXED, tokens=10_000, micro=1200)
    assert [[r.index for r in group] for group in s.groups(held_out, 2)] == [[0, 1], [2], [3, 4]]
    assert [len(group) for group in sampler(MIXED, samples=4, micro=2).groups(held_out, 2)] == [2, 2, 1]


def test_a_batch_has_one_size():
    default = BatchConfig.model_validate({})
    assert (default.unit, default.size, default.limit(2)) == ("samples", 4, 4)
    tokens = BatchConfig.model_validate({"tokens": 100})
    assert (tokens.unit, tokens.size, tokens.micro, tokens.limit(3)) == ("tokens", 100, None, 34)
    assert BatchConfig.model_validate(tokens.model_dump()) == tokens
    with pytest.raises(ValidationError, match="one of samples, tokens and slots; found samples, slots"):
        BatchConfig.model_validate({"samples": 4, "slots": 100})
    with pytest.raises(DataError, match=r"multiple of batch.micro x replicas = 3 x 1"):
        BatchConfig(samples=4, micro=3).accumulation(1)
