"""The planner: who holds what, what fits, what is chosen and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest
import torch

from csbp.cost import DrafterShape, Workload, union_rows
from csbp.device import PRESETS
from csbp.footprint import BUCKETS_IN_FLIGHT, REDUCTION_BUCKET, StepSettings, moments
from csbp.plan import plan_step
from csbp.planner import GIB, PlanError, Question, candidates, choose_context_ranks, make_plan, step_cost
from csbp.share import draw_layout, replica_share
from csbp.topology import Grid
from drafter.attention import LayerMask

FULL, SLIDING = LayerMask(None, causal=False), LayerMask(256, causal=False)
DEVICE = PRESETS["h100-80gb"]


def shape(*masks, **changes):
    sizes = DrafterShape(
        hidden=512,
        intermediate=1536,
        heads=8,
        kv_heads=2,
        head_size=64,
        vocabulary=32000,
        feature_width=2560,
        block_size=8,
        masks=masks,
        conv_kernel=2,
        selector_rank=64,
        selector_top_k=16,
    )
    return dataclasses.replace(sizes, **changes)


def question(*masks, context=65536, anchors=256, world=8, memory=80 * GIB, rule="uniform", **settings):
    return Question(
        shape(*masks),
        Workload(context, anchors, anchor_rule=rule),
        StepSettings(**settings),
        world,
        DEVICE.with_memory(memory),
    )


def share_of(masks, work, ranks, retain=None):
    sizes = shape(*masks)
    return replica_share(sizes, work, ranks, step_cost(sizes, DEVICE, 2), wire_bytes=2, retain=retain)


@pytest.mark.parametrize("masks", [(SLIDING,) * 2, (FULL,) * 2, (SLIDING, FULL)])
@pytest.mark.parametrize("rule", ["uniform", "locality"])
def test_shares_are_those_of_the_planned_step(masks, rule):
    """Same anchors, same cost: a run and its plan have the same rows, blocks and transports."""
    work = Workload(4096, 64, anchor_rule=rule)
    layout = draw_layout(work, 8)
    for ranks in (1, 2, 3):
        share = share_of(masks, work, ranks)
        for rank in range(ranks):
            plan = plan_step(
                layout, masks, Grid(ranks, rank, ranks), cost=step_cost(shape(*masks), DEVICE, 2)
            )
            assert share.placement == plan.placement
            assert share.transports == plan.transports
            assert share.ranks[rank].blocks == plan.own.numel()
            assert share.ranks[rank].feature_rows == sum(stop - start for start, stop in plan.rows)


@pytest.mark.parametrize("rule", ["uniform", "locality"])
def test_rows_of_a_draw_are_the_expected_union(rule):
    work = Workload(16384, 40, anchor_rule=rule)
    drawn = share_of((SLIDING,), work, 1).ranks[0].feature_rows
    assert drawn == pytest.approx(union_rows(work, 256, 8), rel=0.05)  # one draw of 40 anchors


def test_drawn_anchors_are_legal_and_in_order():
    for work in (
        Workload(1000, 999),
        Workload(1000, 10, sequences=3),
        Workload(1000, 999, anchor_rule="locality"),
        Workload(1000, 50, sequences=2, anchor_rule="locality"),
    ):
        layout = draw_layout(work, 8)
        assert layout.anchors.numel() == work.blocks
        assert (layout.anchors.diff() > 0).all()
        assert (layout.positions >= 1).all()
        assert (layout.positions < work.context).all()


def test_sliding_drafter_sends_at_most_a_halo_whatever_the_context():
    """Bytes do not grow with L: at most the W - 1 rows before the first anchor, out and in, per layer."""
    per_row = 2 * 2 * 64
    for context in (16384, 65536, 262144):
        for rank in share_of((SLIDING,) * 2, Workload(context, 512), 4).ranks:
            assert rank.sent_bytes <= 2 * 255 * per_row * (2 + 4)


def test_ring_bytes_are_the_closed_form():
    """(P - 1) / P L rows of 2 G E elements: keys and values forward, their gradients backward."""
    work = Workload(8192, 4096)
    for ranks in (2, 4):
        share = share_of((FULL,), work, ranks)
        assert share.transports == ("ring",)
        rows = 8192 * (ranks - 1) / ranks
        for rank in share.ranks:
            assert rank.layers[0].forward_bytes == pytest.approx(rows * 256 * 2, rel=0.01)
            assert rank.layers[0].backward_bytes == pytest.approx(rows * 256 * 4, rel=0.01)


def test_ring_that_sends_again_keeps_one_shard_and_sends_more():
    work = Workload(8192, 4096)
    keeps, again = share_of((FULL,), work, 4).ranks[0], share_of((FULL,), work, 4, retain=1).ranks[0]
    assert keeps.layers[0].kept_bytes == pytest.approx(3 * again.layers[0].kept_bytes, rel=0.01)
    assert again.sent_bytes > keeps.sent_bytes


def test_few_blocks_over_a_long_context_send_queries():
    share = share_of((FULL,), Workload(262144, 16), 4)
    assert share.transports == ("query-ring",)
    rows = 16 * 8 * 3 / 4
    assert share.ranks[0].layers[0].forward_bytes == rows * (512 * 2 + (512 + 2 * 8) * 4)


@pytest.mark.parametrize(
    ("setting", "smaller"),
    [("recompute_context", "context keys and values"), ("recompute_blocks", "block activations")],
)
def test_making_rows_again_trades_time_for_memory(setting, smaller):
    """A long full layer holds context rows; many blocks hold activations."""
    sizes = {"context": 262_144, "anchors": 4096, "world": 2, "memory": 500 * GIB}
    kept = make_plan(question(FULL, FULL, **sizes)).candidates[0]
    again = make_plan(question(FULL, FULL, **sizes, **{setting: True})).candidates[0]
    assert again.peak_bytes < 0.95 * kept.peak_bytes
    assert again.peak.get(smaller, 0) < kept.peak[smaller]
    part = "context rows" if setting == "recompute_context" else "block layers"
    assert again.time[part] > 1.2 * kept.time[part]
    assert again.time["head"] == kept.time["head"]


def test_memory_of_context_rows_is_linear_in_context_over_ranks():
    """Full attention: parts that hold context rows depend on L / P alone if the ring keeps one shard."""
    settings = StepSettings(retain=1)
    parts = ("features", "feature copy", "fused rows", "context keys and values", "received rows")

    def context_bytes(context, ranks):
        share = share_of((FULL,) * 2, Workload(context, 2048), ranks, retain=1)
        assert set(share.transports) == {"ring"}
        step = moments(shape(FULL, FULL), share.ranks[0], settings, 8)["loss"]
        return sum(step[part] for part in parts)

    base = context_bytes(16384, 2)
    assert context_bytes(32768, 4) == pytest.approx(base, rel=0.02)
    assert context_bytes(32768, 2) == pytest.approx(2 * base, rel=0.02)
    assert context_bytes(16384, 4) == pytest.approx(base / 2, rel=0.02)


@pytest.mark.parametrize("masks", [(SLIDING,) * 2, (FULL,) * 2, (SLIDING, FULL)])
def test_more_ranks_never_need_more_memory(masks):
    peaks = [candidate.peak_bytes for candidate in candidates(question(*masks, retain=1))]
    assert all(after <= before * 1.001 for before, after in itertools.pairwise(peaks))


def test_memory_grows_with_what_it_holds():
    base = question(SLIDING, FULL)
    peak = candidates(base)[0].peak_bytes
    for change in (
        {"work": Workload(131072, 256)},
        {"work": Workload(65536, 1024)},
        {"shape": shape(SLIDING, FULL, FULL)},
        {"settings": StepSettings(accumulate=True)},
        {"settings": StepSettings(prefetch=2)},
        {"settings": StepSettings(compute_bytes=4, feature_bytes=4)},
    ):
        assert candidates(dataclasses.replace(base, **change))[0].peak_bytes > peak


def test_zero_shards_optimizer_state_and_gradients():
    """The figures that `PeakTracker` showed around `pipelines.optimization.Engine` on two ranks."""
    count = shape(SLIDING).parameter_count
    bucket = min(REDUCTION_BUCKET, count)
    flight = min(BUCKETS_IN_FLIGHT * REDUCTION_BUCKET, count)
    rank = share_of((SLIDING,), Workload(4096, 64), 1).ranks[0]
    steps = [moments(shape(SLIDING), rank, StepSettings(zero_stage=stage), 2) for stage in (0, 1, 2)]

    def parts(moment, name):
        return [step[moment][name] for step in steps]

    assert parts("update", "optimizer state") == [8 * count, 6 * count, 6 * count]
    assert parts("backward end", "gradients") == [4 * count, 4 * count, 2 * count + 4 * bucket]
    assert parts("backward end", "reduction buckets") == [4 * flight, 4 * (flight + bucket), 8 * bucket]
    assert parts("update", "gradients") == [4 * count, 6 * count, 4 * count]
    assert parts("update", "reduction buckets") == [0, 0, 0]


def test_smallest_fitting_p_is_chosen_and_the_others_say_why():
    """Windows of one neighbourhood are a sliver of a million rows, so every rank is its own replica."""
    plan = make_plan(question(SLIDING, SLIDING, context=1 << 20, rule="locality"))
    assert plan.chosen.context_ranks == 1
    assert plan.chosen.replicas == 8
    assert plan.chosen.fleet_rate == max(candidate.fleet_rate for candidate in plan.candidates)
    assert [c.context_ranks for c in plan.candidates] == [1, 2, 4, 8]
    assert plan.verdicts[0] == "chosen"
    assert all("replicas" in verdict for verdict in plan.verdicts[1:])


def test_context_ranks_rise_with_the_context():
    """A drafter with a full layer holds the whole context, so P follows L at a fixed memory."""
    chosen = [
        choose_context_ranks(question(FULL, FULL, context=context, memory=6 * GIB, zero_stage=1))
        for context in (65536, 262144, 1 << 20)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] == 1
    assert chosen[-1] > 1


def test_too_small_candidates_are_marked():
    plan = make_plan(question(FULL, FULL, context=1 << 20, memory=6 * GIB, zero_stage=1))
    assert not plan.candidates[0].fits
    assert plan.verdicts[0].startswith("does not fit; features takes")


def test_rates_of_group_and_fleet():
    candidate = candidates(question(SLIDING, SLIDING))[1]
    assert candidate.tokens == 256 * 7
    assert candidate.group_rate == pytest.approx(candidate.tokens / candidate.step_seconds)
    assert candidate.fleet_rate == pytest.approx(4 * candidate.group_rate)


def test_refusal_names_memory_ranks_and_stage_that_would_fit():
    asked = question(FULL, FULL, context=1 << 20, world=2, memory=4 * GIB)
    with pytest.raises(PlanError) as refused:
        make_plan(asked)
    message = str(refused.value)
    assert "3.7 GiB (4.0 GiB less 8% headroom)" in message
    assert "P = 1, 2" in message
    needed = float(re.search(r"fit with ([\d.]+) GiB of memory", message)[1])
    assert make_plan(dataclasses.replace(asked, device=DEVICE.with_memory((needed + 0.1) * GIB)))
    ranks = int(re.search(r"with (\d+) ranks", message)[1])
    assert make_plan(dataclasses.replace(asked, world=ranks))
    with pytest.raises(PlanError):
        make_plan(dataclasses.replace(asked, world=ranks // 2))


def test_refusal_offers_a_zero_stage_where_that_is_enough():
    large = shape(SLIDING, SLIDING, hidden=4096, intermediate=16384, vocabulary=150000)
    asked = dataclasses.replace(question(SLIDING, context=4096, anchors=16, world=8), shape=large)
    memory = candidates(asked)[-1].peak_bytes
    with pytest.raises(PlanError, match="ZeRO stage 1"):
        make_plan(dataclasses.replace(asked, device=DEVICE.with_memory(memory)))


def test_candidates_are_json():
    for candidate in candidates(question(SLIDING, FULL, world=2)):
        assert json.loads(json.dumps(candidate.to_dict()))["peak_gib"] > 0


def test_a_slow_disk_shows_as_read_time():
    slow = dataclasses.replace(DEVICE, disk_read=1e6)
    candidate = candidates(dataclasses.replace(question(SLIDING, world=1), device=slow))[0]
    read = candidate.feature_rows * 2560 * 2 / 1e6
    assert candidate.step_seconds == pytest.approx(read, rel=1e-6)


def test_planning_a_million_tokens_takes_seconds():
    """It runs before every `auto` training run; the bound is ten times what one core needs."""
    torch.set_num_threads(1)
    assert make_plan(question(SLIDING, SLIDING, context=1 << 20, anchors=2048)).chosen.fits
