import pytest
import torch

from csbp.layout import BlockLayout
from csbp.ownership import StepCost, _cut, block_costs, contiguous, dealt, visible_rows
from csbp.visibility import seen
from drafter.attention import LayerMask

FULL, SLIDING = LayerMask(None, causal=False), LayerMask(2048, causal=False)
KINDS = {"full": [FULL] * 2, "sliding": [SLIDING] * 2, "mixed": [SLIDING, FULL]}


def uniform(anchors=256, length=65536, seed=0):
    draw = torch.Generator().manual_seed(seed)
    at = torch.sort(torch.randperm(length - 2, generator=draw)[:anchors] + 1).values
    return BlockLayout(at, torch.zeros_like(at), length, 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("masks", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", [dealt, contiguous])
def test_every_block_and_visible_row_has_one_owner(place, masks, ranks):
    layout = uniform(61)
    owned = place(layout, masks, ranks, StepCost())
    assert sorted(torch.cat(owned.blocks).tolist()) == list(range(61))
    rows = torch.cat([shard.indices() for shard in owned.shards])
    assert torch.equal(torch.sort(rows).values, visible_rows(layout, masks).indices())


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("masks", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", [dealt, contiguous])
def test_the_busiest_rank_is_within_six_percent_of_the_mean(place, masks, ranks):
    cost = StepCost()
    layout = uniform()
    owned = place(layout, masks, ranks, cost)
    costs = block_costs(layout, masks, cost)
    rows = cost.row + cost.projection * len(masks)
    loads = torch.stack(
        [costs[b].sum() + rows * len(s) for b, s in zip(owned.blocks, owned.shards, strict=True)]
    )
    assert loads.max() <= 1.06 * loads.mean()


def test_dealt_pairs_of_linear_costs_sum_alike():
    at = torch.arange(16) * 100 + 1
    owned = dealt(BlockLayout(at, torch.zeros_like(at), 2000, 8), [FULL], 4, StepCost())
    assert {int(at[blocks].sum()) for blocks in owned.blocks} == {int(at.sum()) // 4}


def test_dealt_shards_are_the_first_and_last_chunks():
    layout = uniform()
    shard = dealt(layout, [FULL], 2, StepCost()).shards[0]
    assert len(shard.ranges) == 2
    assert shard.ranges[0][0] == 0
    assert shard.ranges[1][1] == int(layout.anchors[-1])


def test_fewer_blocks_than_ranks_leaves_ranks_without_blocks():
    at = torch.tensor([5, 90])
    layout = BlockLayout(at, torch.zeros_like(at), 100, 8)
    for place in (dealt, contiguous):
        counts = [blocks.numel() for blocks in place(layout, [FULL], 4, StepCost()).blocks]
        assert sum(counts) == 2
        assert max(counts) == 1


def test_contiguous_halo_is_the_window_before_the_first_anchor():
    layout = uniform()
    owned = contiguous(layout, [SLIDING], 2, StepCost())
    reached = seen(layout, SLIDING, owned.blocks[1])
    assert len(owned.shards[0].intersection(reached)) == SLIDING.window - 1


def test_rows_read_again_are_counted_when_cutting():
    layout = uniform()
    cost = StepCost(row=1e8)
    plain = contiguous(layout, [SLIDING], 2, cost)
    again = contiguous(layout, [SLIDING], 2, cost, {SLIDING})
    # rank 1 reads 2,047 rows more, so it gets fewer blocks
    assert again.blocks[1].numel() < plain.blocks[1].numel()


def test_cut_finds_the_least_possible_maximum():
    weights = [7.0, 2.0, 5.0, 10.0, 8.0]
    totals = [0.0, *torch.tensor(weights).cumsum(0).tolist()]
    runs = _cut(totals, [0.0] * 5, 2)
    assert runs == [(0, 3), (3, 5)]  # 14 and 18; any other cut has a run of at least 24
