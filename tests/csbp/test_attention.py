import pytest
import torch

from csbp.attention import (
    TORCH,
    SoftmaxState,
    Upstream,
    own_block_backward,
    own_block_forward,
    own_block_mask,
    pack,
    part_forward,
    unpack,
)
from csbp.layout import BlockLayout
from csbp.memory import PeakTracker
from csbp.plan import plan_step
from csbp.rows import RowSet
from csbp.tiles import TILE_SIZES, KeyRanges
from csbp.topology import Grid
from csbp.visibility import first_visible, key_ranges
from drafter.attention import LayerMask
from drafter.dense import DenseAttention

A, B, H, G, E, T = 7, 4, 6, 2, 8, 90
LAYOUT = BlockLayout(torch.tensor([1, 2, 30, 33, 51, 70, 88]), torch.tensor([0, 0, 0, 0, 40, 40, 40]), T, B)
MASKS = [
    LayerMask(None, causal=False),
    LayerMask(None, causal=True),
    LayerMask(12, causal=True),
    LayerMask(12, causal=False),
    LayerMask(3, causal=False),
    LayerMask(1, causal=False),
    LayerMask(1000, causal=True),
]


def tensors(dtype=torch.float64, blocks=A, length=T):
    draw = torch.Generator().manual_seed(0)
    shapes = [(blocks, B, H, E), (blocks, B, G, E), (blocks, B, G, E), (length, G, E), (length, G, E)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def dense(mask, q, kb, vb, k, v, do):
    """Output and gradients under one explicit mask."""
    leaves = [x.detach().double().clone().requires_grad_() for x in (q, kb, vb, k, v)]
    out = DenseAttention(LAYOUT.anchors, LAYOUT.starts, T, B, [mask])(0, *leaves)
    return out, torch.autograd.grad(out, leaves, do.double(), materialize_grads=True)


def in_parts(mask, q, kb, vb, k, v, do, parts, backend=TORCH):
    """Own block first, then the context in `parts`, a list of row sets that tile the axis."""
    own = own_block_mask(mask, B, q.device)
    packed = pack(q, G)
    state = SoftmaxState.empty(packed)
    own_block_forward(state, packed, kb, vb, own)
    blocks = torch.arange(A)
    views = [(rows.indices(), key_ranges(LAYOUT, mask, blocks, rows)) for rows in parts]
    for index, ranges in views:
        backend.forward(state, packed, k[index], v[index], ranges)
    out, lse = state.finish()
    do = pack(do, G)
    upstream = Upstream(do, (do * out).sum(-1), lse)
    dq = torch.zeros_like(out)
    dkb, dvb = own_block_backward(dq, packed, upstream, kb, vb, own)
    dk, dv = torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype)
    for index, ranges in views:
        a, b = backend.backward(dq, packed, upstream, k[index], v[index], ranges)
        dk[index] += a
        dv[index] += b
    return unpack(out, B, H), (unpack(dq, B, H), dkb, dvb, dk, dv)


PARTS = {
    "whole": [RowSet.of([(0, T)])],
    "halves": [RowSet.of([(0, 45)]), RowSet.of([(45, T)])],
    "interleaved": [RowSet.of([(0, 10), (31, 50), (70, 71)]), RowSet.of([(10, 31), (50, 70), (71, T)])],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("tile", [2**18, 8])
def test_parts_add_up_to_attention_under_an_explicit_mask(mask, parts, tile, monkeypatch):
    monkeypatch.setitem(TILE_SIZES, "cpu", TILE_SIZES["cpu"]._replace(scores=tile))
    q, kb, vb, k, v = tensors()
    do = torch.randn(A, B, H, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted, wanted_grads = dense(mask, q, kb, vb, k, v, do)
    found, grads = in_parts(mask, q, kb, vb, k, v, do, parts)
    # float64 rounding of sums of at most 94 terms of size 1
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_bfloat16_inputs_accumulate_in_float32():
    q, kb, vb, k, v = tensors(torch.bfloat16)
    do = torch.randn(A, B, H, E, generator=torch.Generator().manual_seed(1))
    wanted, _ = dense(MASKS[0], q, kb, vb, k, v, do)
    found, grads = in_parts(MASKS[0], q, kb, vb, k, v, do, PARTS["halves"])
    assert found.dtype == torch.float32
    assert all(grad.dtype == torch.float32 for grad in grads)
    # the inputs are exact bfloat16 numbers, so only float32 rounding remains
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_states_merge_in_any_order():
    q, kb, vb, k, v = tensors()
    packed = pack(q, G)
    mask = MASKS[0]
    states = []
    for rows in PARTS["interleaved"]:
        state = SoftmaxState.empty(packed)
        part_forward(
            state,
            packed,
            k[rows.indices()],
            v[rows.indices()],
            key_ranges(LAYOUT, mask, torch.arange(A), rows),
        )
        states.append(state)
    own = SoftmaxState.empty(packed)
    own_block_forward(own, packed, kb, vb, own_block_mask(mask, B, q.device))
    states[1].merge(states[0])
    states[1].merge(own)
    wanted, _ = dense(mask, q, kb, vb, k, v, torch.zeros(A, B, H, E))
    torch.testing.assert_close(unpack(states[1].finish()[0], B, H), wanted, rtol=1e-12, atol=1e-12)


def test_a_window_is_measured_from_each_query_and_counts_it():
    layout = BlockLayout(torch.tensor([20]), torch.tensor([0]), 40, B)
    # slot j stands at 20 + j: with W = 4 it sees 17 + j ... 20 + j, of which rows below 20 are context
    assert first_visible(layout, LayerMask(4, causal=True)).tolist() == [[17, 18, 19, 20]]


def test_a_block_moves_only_with_the_rows_it_may_see():
    # two overlapping blocks 3 apart; the second starts inside the first (SpecForge issue 470)
    layout = BlockLayout(torch.tensor([20, 23]), torch.tensor([5, 5]), 40, 8)
    for mask in (LayerMask(None, causal=False), LayerMask(6, causal=True), LayerMask(6, causal=False)):
        draw = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
            for shape in [(2, 8, H, E), (2, 8, G, E), (2, 8, G, E), (40, G, E), (40, G, E)]
        ]
        plan = plan_step(layout, [mask], Grid.single(), mode="query-sharded")
        out = plan.attention()(0, *leaves)
        for block, anchor in enumerate((20, 23)):
            for slot in range(8):
                grads = torch.autograd.grad(out[block, slot].sum(), leaves[1:], retain_graph=True)
                own, _, context, _ = (grad.abs().flatten(-2).sum(-1) > 0 for grad in grads)
                first = 5 if mask.window is None else max(5, anchor + slot - mask.window + 1)
                assert context.nonzero().flatten().tolist() == list(range(first, anchor))
                assert not own[1 - block].any()
                last = slot if mask.causal else 7 if mask.window is None else min(7, slot + mask.window - 1)
                nearest = 0 if mask.window is None else max(0, slot - mask.window + 1)
                assert own[block].nonzero().flatten().tolist() == list(range(nearest, last + 1))


def test_tiles_cover_every_visible_pair_once_and_waste_little():
    draw = torch.Generator().manual_seed(3)
    layout = BlockLayout(
        torch.sort(torch.randint(1, 65536, (256,), generator=draw)).values,
        torch.zeros(256, dtype=torch.int64),
        65536,
        8,
    )
    for mask, bound in ((LayerMask(2048, causal=False), 1.3), (LayerMask(None, causal=False), 1.05)):
        ranges = key_ranges(layout, mask, torch.arange(256), RowSet.of([(0, 65536)]))
        covered = torch.zeros(256, dtype=torch.int64)
        area = 0
        for tile in ranges.tiles(24):
            inside = slice(tile.first, tile.last)
            lo, hi = ranges.lo[inside, 0].clamp(min=tile.lo), ranges.hi[inside].clamp(max=tile.hi)
            covered[inside] += (hi - lo).clamp(min=0)
            area += (tile.last - tile.first) * (tile.hi - tile.lo)
        visible = ranges.hi - ranges.lo[:, 0]
        assert torch.equal(covered, visible)
        assert area <= bound * int(visible.sum())


def test_memory_is_bounded_by_a_tile_not_by_rows_times_keys():
    blocks, length = 64, 16384
    layout = BlockLayout(
        torch.linspace(length // 2, length - 1, blocks).long(),
        torch.zeros(blocks, dtype=torch.int64),
        length,
        B,
    )
    q, _, _, k, v = tensors(torch.float32, blocks, length)
    packed = pack(q, G)
    ranges = key_ranges(layout, LayerMask(None, causal=False), torch.arange(blocks), RowSet.of([(0, length)]))
    state = SoftmaxState.empty(packed)
    with PeakTracker() as peak:
        part_forward(state, packed, k, v, ranges)
    scores = 4 * blocks * B * H * length
    # one tile of scores, its mask and a tile's worth of rescaled sums
    assert peak.peak_bytes < 6 * 4 * TILE_SIZES["cpu"].scores < scores / 5


def test_no_blocks_and_no_rows_are_allowed():
    q, kb, vb, k, v = tensors()
    none = q[:0]
    packed = pack(none, G)
    state = SoftmaxState.empty(packed)
    own_block_forward(state, packed, kb[:0], vb[:0], own_block_mask(MASKS[0], B, q.device))
    part_forward(
        state,
        packed,
        k,
        v,
        KeyRanges(torch.zeros(0, B, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
    )
    assert unpack(state.finish()[0], B, H).shape == (0, B, H, E)
