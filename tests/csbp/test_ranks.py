import time

import pytest
import torch

from csbp.processes import RanksError, run_ranks
from pipelines.bench_exactness import ExactnessOptions, run_bench_exactness
from tests.csbp.workers import (
    BLOCK,
    FULL,
    GROUPS,
    HEADS,
    LENGTH,
    SIZE,
    SLIDING,
    WINDOW,
    all_sent_bytes,
    lose_a_peer,
    neighbourhood,
    spread,
    wait_for_a_sleeper,
)

pytestmark = pytest.mark.ranks

ROW = 2 * GROUPS * SIZE * 4  # K and V of one context row in float32
CASES = {
    "ring": (spread(), [FULL], {"placement": "dealt", "transport": "ring"}),
    "ring again": (spread(), [FULL], {"placement": "dealt", "transport": "ring", "retain": 1}),
    "ring bf16": (spread(), [FULL], {"placement": "dealt", "transport": "ring"}, torch.bfloat16),
    "query ring": (spread(), [FULL], {"placement": "dealt", "transport": "query-ring"}),
    "gather": (spread(), [SLIDING], {"placement": "dealt", "transport": "gather"}),
    "halo": (spread(), [SLIDING], {"placement": "contiguous", "transport": "halo"}),
    "halo, 10 x the length": (spread(40_010), [SLIDING], {"placement": "contiguous", "transport": "halo"}),
    "local": (neighbourhood(), [SLIDING] * 2, {"transport": "local"}),
    "cp": (spread(), [FULL], {"mode": "cp"}),
    "replicated": (spread(), [FULL], {"mode": "replicated"}),
    "query-sharded": (spread(), [FULL], {"mode": "query-sharded"}),
}


@pytest.fixture(scope="module", params=[2, 4])
def sent(request):
    ranks = request.param
    found = run_ranks(all_sent_bytes, ranks, CASES, timeout=120)
    return ranks, {name: [rank[name] for rank in found] for name in CASES}


def total(reports, kind="context_kv"):
    return sum(report["sent"].get(kind, 0) for report in reports)


def visible(layout):
    return int(layout.anchors[-1])


def test_ring_sends_each_shard_and_its_gradient_round_once(sent):
    ranks, reports = sent
    wanted = 2 * (ranks - 1) * visible(spread()) * ROW
    assert total(reports["ring"]) == wanted


def test_ring_with_bounded_memory_sends_shards_again(sent):
    ranks, reports = sent
    wanted = (2 * (ranks - 1) + ranks - 2) * visible(spread()) * ROW
    assert total(reports["ring again"]) == wanted


def test_gradients_travel_in_float32_whatever_the_rows_are(sent):
    ranks, reports = sent
    wanted = (ranks - 1) * visible(spread()) * (ROW // 2 + ROW)
    assert total(reports["ring bf16"]) == wanted


def test_query_ring_sends_no_context(sent):
    ranks, reports = sent
    assert total(reports["query ring"]) == 0
    rows = spread().anchors.numel() * BLOCK * HEADS
    # queries, sums with two statistics, output gradients with two statistics, query gradients
    wanted = (ranks - 1) * rows * (SIZE + SIZE + 2 + SIZE + 2 + SIZE) * 4
    assert total(reports["query ring"], "other") == wanted


def test_gather_sends_the_union_of_windows_to_whoever_sees_it(sent):
    ranks, reports = sent
    # blocks 13 rows apart are dealt out, so every rank's windows reach the whole union but its edges
    union = visible(spread())
    wanted = 2 * (ranks - 1) * union * ROW
    assert wanted * 0.98 <= total(reports["gather"]) <= wanted


def test_halo_sends_the_window_before_each_cut_whatever_the_length(sent):
    ranks, reports = sent
    wanted = 2 * (ranks - 1) * (WINDOW - 1) * ROW
    assert total(reports["halo"]) == wanted
    assert total(reports["halo, 10 x the length"]) == wanted


def test_all_sliding_layers_can_send_nothing(sent):
    _, reports = sent
    assert all(not report["sent"] for report in reports["local"])


def test_csbp_never_sends_block_rows_and_cp_does(sent):
    ranks, reports = sent
    for name in CASES:
        if name != "cp":
            assert total(reports[name], "block_kv") == 0
    rows = spread().anchors.numel() * BLOCK
    assert total(reports["cp"], "block_kv") == 2 * (ranks - 1) * rows * ROW
    assert total(reports["cp"]) == 2 * (ranks - 1) * LENGTH * ROW


def test_baselines_do_what_they_are_named_for(sent):
    ranks, reports = sent
    blocks = spread().anchors.numel()
    assert [report["blocks"] for report in reports["replicated"]] == [blocks] * ranks
    assert total(reports["replicated"]) == total(reports["ring"])
    assert all(not report["sent"] for report in reports["query-sharded"])


@pytest.mark.parametrize(
    ("ranks", "dtype", "only"),
    [
        (2, "float64", ("one document, first", "packed documents | mixed")),
        (3, "float64", ("fewer blocks", "one neighbourhood | mixed")),
        (
            4,
            "float64",
            ("packed documents | full", "packed documents | mixed", "last anchor | window over several"),
        ),
        (2, "float32", ("packed documents | mixed", "one neighbourhood | sliding, causal")),
    ],
)
def test_a_step_on_many_ranks_is_the_step_of_one(ranks, dtype, only):
    result = run_bench_exactness(ExactnessOptions(ranks=str(ranks), dtype=dtype, only=only))
    assert result.passed, max(result.cases, key=lambda case: case.max_rel_err)
    assert len(result.cases) > 13


def test_a_lost_peer_raises_instead_of_hanging():
    began = time.monotonic()
    with pytest.raises(RanksError, match="exit code"):
        run_ranks(lose_a_peer, 3, timeout=60)
    assert time.monotonic() - began < 50


def test_a_peer_that_does_not_take_part_raises_after_the_timeout():
    with pytest.raises(RanksError, match="lost a peer"):
        run_ranks(wait_for_a_sleeper, 2, timeout=60)
