import pytest
import torch

from csbp.cost import Workload, union_rows
from csbp.share import draw_layout
from csbp.visibility import seen
from drafter.attention import LayerMask
from pipelines.bench_long import LongOptions, line, render_bench_long, run_bench_long
from pipelines.bench_long_step import PartClock, SyntheticRows

SMALL = {"anchors": 16, "neighbourhoods": 2, "window": 64, "block": 4, "draft_layers": 1, "steps": 1}


@pytest.fixture(scope="module")
def sliding():
    return run_bench_long(LongOptions(contexts=(2048, 8192), warmup=0, timeout=300, **SMALL))


@pytest.mark.ranks
def test_work_of_sliding_layers_does_not_grow_with_the_sequence(sliding):
    first, last = sliding.to_dict()["runs"]
    # 16 blocks 4 apart in 2 neighbourhoods: 2 runs of 63 + 7 * 4 rows, with 5 x 576 elements of 2 bytes
    assert first["union_bytes"] == last["union_bytes"] == 2 * (63 + 7 * 4) * 5 * 576 * 2
    assert first["feature_bytes_read"] == last["feature_bytes_read"] == first["union_bytes"]
    assert first["flops"] == last["flops"] > 0
    assert first["kv_bytes_sent"] == last["kv_bytes_sent"] == 0
    assert sliding.peak_ratio == pytest.approx(1.0, abs=0.01)


@pytest.mark.ranks
def test_parts_add_up_to_the_step(sliding):
    for run in sliding.runs:
        for rank in run.ranks:
            assert sum(rank.parts_s[0].values()) == pytest.approx(rank.step_s[0])
            assert rank.parts_s[0]["attention forward"] > 0
            assert rank.parts_s[0]["attention backward"] > 0
    assert 0 < sliding.runs[0].gemm_share < 1
    render_bench_long(sliding)


@pytest.mark.ranks
def test_missed_bounds_are_named():
    """Full layers: memory follows the rows, so a bound on its growth has to fail."""
    options = LongOptions(
        contexts=(2048, 8192),
        layers="full",
        version=1,
        warmup=0,
        check=True,
        max_peak_ratio=1.01,
        max_total_gib=1e-6,
        min_gemm_share=1.0,
        timeout=300,
        **SMALL,
    )
    assert options.recompute
    result = run_bench_long(options)
    assert len(result.missed) == 3
    fit = result.fits()["peak_bytes_over_context_rows_of_a_rank"]
    # features in bfloat16, keys and values with their gradients, and no more than as much again
    row = 5 * 576 * 2 + 2 * 2 * 192 * 4
    assert row * 0.9 < fit["slope"] < 2 * row


def test_synthetic_rows_do_not_depend_on_how_they_are_read():
    store = SyntheticRows(3, torch.bfloat16)
    whole = store.rows([(16_000, 40_000)])
    parts = store.rows([(16_000, 16_500), (30_000, 40_000)])
    assert torch.equal(parts[:500], whole[:500])
    assert torch.equal(parts[500:], whole[14_000:])


def test_time_of_an_inner_part_is_not_counted_twice():
    clock = PartClock()
    with clock.part("outer"):
        clock.timed("inner", lambda: sum(range(200_000)))()
    assert clock.seconds["inner"] > 10 * clock.seconds["outer"]


def test_line_through_points():
    assert line([1, 2, 3], [5, 7, 9]) == pytest.approx({"slope": 2, "intercept": 3, "r2": 1})
    assert line([1, 1], [5, 7])["r2"] == 0


@pytest.mark.parametrize("neighbourhoods", [1, 2, 8])
def test_neighbourhoods_stand_apart_and_their_union_is_the_closed_form(neighbourhoods):
    work = Workload(20_000, 64, anchor_rule="locality", neighbourhoods=neighbourhoods)
    layout = draw_layout(work, 4)
    assert len(layout.anchors.unique()) == 64
    assert layout.anchors.min() > 0
    assert layout.anchors.max() < 20_000
    found = len(seen(layout, LayerMask(100, causal=False)))
    assert found == union_rows(work, 100, 4)
