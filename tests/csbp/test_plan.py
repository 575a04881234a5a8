import pytest
import torch

from csbp.layout import BlockLayout
from csbp.ownership import StepCost
from csbp.plan import PlanError, plan_step
from csbp.topology import Grid, TopologyError
from drafter.attention import LayerMask

FULL, SLIDING = LayerMask(None, causal=False), LayerMask(64, causal=False)


def layout(anchors, length=100_000, starts=0):
    at = torch.tensor(anchors)
    return BlockLayout(at, torch.full_like(at, starts), length, 8)


def ranks(count):
    return [Grid(count, rank, count) for rank in range(count)]


def read(plan):
    return sum(stop - start for start, stop in plan.rows)


def test_one_rank_reads_only_the_windows_of_its_blocks():
    plan = plan_step(layout([5_000, 90_000]), [SLIDING, SLIDING], Grid.single())
    assert plan.rows == [(4_937, 5_000), (89_937, 90_000)]
    assert plan.own.tolist() == [0, 1]
    assert plan.transports == ("local", "local")
    assert plan.attention().context_rows(0) is None


def test_positions_count_from_the_document():
    plan = plan_step(layout([1_010], starts=1_000), [FULL], Grid.single())
    assert plan.rows == [(1_000, 1_010)]
    assert plan.row_positions.tolist() == list(range(10))


def test_a_layer_projects_only_what_it_shows():
    plan = plan_step(layout([5_000]), [SLIDING, FULL], Grid.single())
    assert plan.rows == [(0, 5_000)]
    assert plan.attention().context_rows(0).tolist() == list(range(4_937, 5_000))
    assert plan.attention().context_rows(1) is None


def test_sequence_length_does_not_enter_an_all_sliding_step():
    near = [plan_step(layout(range(500, 4_500, 8)), [SLIDING], grid) for grid in ranks(4)]
    far = [plan_step(layout(range(900_500, 904_500, 8), 1_000_000), [SLIDING], grid) for grid in ranks(4)]
    assert [read(plan) for plan in near] == [read(plan) for plan in far]
    assert [plan.own.tolist() for plan in near] == [plan.own.tolist() for plan in far]


def test_auto_sends_nothing_for_sliding_layers_when_bytes_are_dear():
    plan = plan_step(layout(range(100, 90_000, 20)), [SLIDING] * 2, Grid(4, 0, 4), cost=StepCost(byte=1e6))
    assert plan.transports == ("local", "local")
    assert plan.placement == "contiguous"


def test_auto_lends_halo_rows_when_rows_are_dear():
    plan = plan_step(layout(range(100, 90_000, 20)), [SLIDING] * 2, Grid(4, 0, 4), cost=StepCost(row=1e9))
    assert plan.transports == ("halo", "halo")


def test_auto_sends_queries_when_blocks_are_few_and_a_ring_when_they_are_many():
    few = plan_step(layout([50_000, 60_000]), [FULL], Grid(2, 0, 2))
    many = plan_step(layout(range(100, 90_000, 20)), [FULL], Grid(2, 0, 2))
    assert few.transports == ("query-ring",)
    assert many.transports == ("ring",)


def test_ranks_choose_alike_and_share_all_blocks():
    plans = [plan_step(layout(range(100, 90_000, 700)), [SLIDING, FULL], grid) for grid in ranks(3)]
    assert len({(plan.placement, plan.transports) for plan in plans}) == 1
    assert sorted(torch.cat([plan.own for plan in plans]).tolist()) == list(
        range(len(plans[0].layout.anchors))
    )


def test_replicas_plan_alike():
    plans = [plan_step(layout([50_000, 60_000]), [FULL], Grid(4, rank, 2)) for rank in (0, 2)]
    assert plans[0].rows == plans[1].rows


@pytest.mark.parametrize("mode", ["cp", "replicated", "query-sharded"])
def test_baselines_compute_every_block(mode):
    plans = [plan_step(layout(range(100, 90_000, 900)), [SLIDING], grid, mode=mode) for grid in ranks(2)]
    blocks = torch.cat([plan.own for plan in plans])
    assert sorted(set(blocks.tolist())) == list(range(100))
    # each block counts once in sums over ranks
    assert sum(plan.loss_scale * plan.own.numel() for plan in plans) == 100


def test_query_sharded_reads_the_whole_context_on_every_rank():
    assert plan_step(layout([50_000]), [SLIDING], Grid(2, 1, 2), mode="query-sharded").rows == [(0, 100_000)]


def test_cp_gives_each_rank_half_of_all_rows_in_two_chunks():
    plans = [plan_step(layout(range(0, 100_000, 50)), [FULL], grid, mode="cp") for grid in ranks(2)]
    rows = [read(plan) + 8 * plan.own.numel() for plan in plans]
    assert sum(rows) == 100_000 + 8 * 2_000
    assert abs(rows[0] - rows[1]) <= 16  # cuts move to the ends of blocks
    assert len(plans[0].rows) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "csp"}, "mode must be one of"),
        ({"transport": "rnig"}, "transport must be one of"),
        ({"placement": "even"}, "placement must be one of"),
        ({"transport": ["ring"]}, "one for each of 2 layers"),
        ({"mode": "cp", "transport": "ring"}, "has its own placement and transport"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_a_wrong_name_is_refused_with_the_known_ones(options, message):
    with pytest.raises(PlanError, match=message):
        plan_step(layout([10]), [FULL, SLIDING], Grid.single(), **options)


def test_anchors_out_of_order_are_refused():
    with pytest.raises(PlanError, match="ascend"):
        plan_step(layout([10, 5]), [FULL], Grid.single())


def test_a_grid_must_tile_the_world():
    with pytest.raises(TopologyError, match=r"choose one of \[1, 2, 3, 6\]"):
        Grid(6, 0, 4)


def test_ranks_of_a_replica_are_neighbours():
    grid = Grid(8, 5, 4)
    assert (grid.replicas, grid.replica, grid.context_rank) == (2, 1, 1)
    assert [grid.peer(rank) for rank in range(-1, 5)] == [7, 4, 5, 6, 7, 4]
