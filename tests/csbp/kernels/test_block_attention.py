"""The Triton kernels, run by Triton's interpreter in float32, against the plain backend and dense float64."""

import pytest
import torch

from csbp.attention import TORCH, OwnBlock, SoftmaxState, Upstream, own_block_mask, pack, unpack
from csbp.layout import BlockLayout
from csbp.rows import RowSet
from csbp.tiles import KeyRanges
from csbp.visibility import key_ranges
from drafter.attention import LayerMask
from drafter.dense import DenseAttention

B, G, T = 4, 2, 90
ANCHORS, STARTS = [1, 2, 30, 33, 51, 70, 88], [0, 0, 0, 0, 40, 40, 40]
LAYOUT = BlockLayout(torch.tensor(ANCHORS), torch.tensor(STARTS), T, B)
COUNT = len(ANCHORS)
WHOLE_AXIS = RowSet.of([(0, T)])
MASKS = [
    LayerMask(None, causal=False),
    LayerMask(None, causal=True),
    LayerMask(12, causal=True),
    LayerMask(12, causal=False),
    LayerMask(1, causal=False),
    LayerMask(1000, causal=True),
]


def tensors(head=16, heads=6, blocks=COUNT, length=T, block=B):
    draw = torch.Generator().manual_seed(0)
    shapes = [(blocks, block, heads, head), *[(blocks, block, G, head)] * 2, *[(length, G, head)] * 2]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def run(backend, q, kb, vb, k, v, own_mask, parts, ranges):
    """Output, log-sum-exp and all gradients, with the context met in `parts`, slices of its rows."""
    packed = pack(q, G)
    own = OwnBlock(kb, vb, own_mask)
    state = backend.begin(packed, own, k[parts[0]], v[parts[0]], ranges[0])
    for part, seen in zip(parts[1:], ranges[1:], strict=True):
        backend.forward(state, packed, k[part], v[part], seen)
    out, lse = state.finish()
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    upstream = Upstream(do, (do * out).sum(-1), lse)
    dq = torch.zeros_like(out)
    dkb, dvb, *first = backend.begin_backward(dq, packed, upstream, own, k[parts[0]], v[parts[0]], ranges[0])
    of_parts = [first]
    for part, seen in zip(parts[1:], ranges[1:], strict=True):
        of_parts.append(backend.backward(dq, packed, upstream, k[part], v[part], seen))
    dk, dv = (torch.cat(pieces) for pieces in zip(*of_parts, strict=True))
    return out, lse, dq, dkb, dvb, dk, dv


def check(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        # float32 sums of at most 100 terms of size 1, in another order
        torch.testing.assert_close(a, b.to(a.dtype), rtol=2e-5, atol=2e-5)


def compare(triton_backend, mask, rows, layout=LAYOUT, **sizes):
    q, kb, vb, k, v = tensors(blocks=len(layout.anchors), length=layout.length, **sizes)
    own = own_block_mask(mask, q.shape[1], q.device)
    parts = [part.indices() for part in rows]
    ranges = [key_ranges(layout, mask, torch.arange(len(layout.anchors)), part) for part in rows]
    arguments = (q, kb, vb, k, v, own, parts, ranges)
    check(run(triton_backend.TRITON, *arguments), run(TORCH, *arguments))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_kernels_equal_the_plain_backend(triton_backend, mask):
    # windows, causal own blocks, ranges that end inside a tile of 32 keys, a range of one row
    compare(triton_backend, mask, [WHOLE_AXIS])


def test_parts_add_up(triton_backend):
    interleaved = [
        RowSet.of([(0, 10), (31, 50), (70, 71)]),
        RowSet.of([(10, 31), (50, 70), (71, T)]),
    ]
    compare(triton_backend, MASKS[3], interleaved)


@pytest.mark.parametrize(("head", "heads"), [(64, 2), (48, 8), (128, 4)])
def test_head_sizes_and_groups(triton_backend, head, heads):
    # 48 is padded to 64 columns; heads / G rows share a key
    compare(triton_backend, MASKS[3], [WHOLE_AXIS], head=head, heads=heads)


@pytest.mark.parametrize("block", [1, 5, 8])
def test_block_sizes_that_do_not_divide_a_tile(triton_backend, block):
    layout = BlockLayout(LAYOUT.anchors, LAYOUT.starts, T, block)
    compare(triton_backend, LayerMask(12, causal=False), [WHOLE_AXIS], layout, block=block)


def test_one_block_and_one_row(triton_backend):
    layout = BlockLayout(torch.tensor([1]), torch.tensor([0]), 1, B)
    compare(triton_backend, MASKS[0], [RowSet.of([(0, 1)])], layout)


def test_many_keys_take_whole_tiles(triton_backend):
    # 10 tiles of 32 keys between the edges, and blocks of which every row sees whole tiles
    anchors = torch.arange(300, 340, 5)
    layout = BlockLayout(anchors, torch.zeros_like(anchors), 340, B)
    compare(triton_backend, LayerMask(290, causal=False), [RowSet.of([(0, 340)])], layout)


def test_kernels_equal_dense_attention_in_float64(triton_backend):
    q, kb, vb, k, v = tensors()
    mask = MASKS[3]
    ranges = [key_ranges(LAYOUT, mask, torch.arange(COUNT), WHOLE_AXIS)]
    own = own_block_mask(mask, B, q.device)
    out, _, dq, *others = run(triton_backend.TRITON, q, kb, vb, k, v, own, [slice(None)], ranges)
    leaves = [x.double().requires_grad_() for x in (q, kb, vb, k, v)]
    wanted = DenseAttention(LAYOUT.anchors, LAYOUT.starts, T, B, [mask])(0, *leaves)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(wanted, leaves, unpack(do, B, 6).double())
    check((unpack(out, B, 6), unpack(dq, B, 6), *others), (wanted, *grads))


def test_empty_ranges_and_empty_sides(triton_backend):
    backend = triton_backend.TRITON
    q, kb, vb, k, v = tensors()
    own = own_block_mask(MASKS[0], B, q.device)
    blind = torch.full((COUNT, B), 7)
    ranges = [KeyRanges(blind, blind[:, 0].contiguous())]
    arguments = (q, kb, vb, k, v, own, [slice(None)], ranges)
    found = run(backend, *arguments)
    check(found, run(TORCH, *arguments))
    assert not found[5].any()
    assert not found[6].any()
    # no context rows
    nothing = [KeyRanges(torch.zeros_like(blind), torch.zeros(COUNT, dtype=torch.int64))]
    arguments = (q, kb, vb, k[:0], v[:0], own, [slice(None)], nothing)
    check(run(backend, *arguments), run(TORCH, *arguments))
    # no blocks: the context still gets a gradient, of zero
    none = [KeyRanges(blind[:0], blind[:0, 0].contiguous())]
    found = run(backend, q[:0], kb[:0], vb[:0], k, v, own, [slice(None)], none)
    assert found[5].shape == k.shape
    assert not found[5].any()
    assert not found[6].any()


def test_rows_beyond_two_to_the_31_elements(triton_backend, monkeypatch):
    """Keys a million elements apart; those that blocks see lie beyond what an int32 offset reaches."""
    # the interpreter copies every argument back, which would touch all pages
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    stride, keys, head = 2**20, 2056, 16
    sparse = torch.zeros((keys - 1) * stride + G * head)  # pages that nobody touches take no memory
    far = sparse.as_strided((keys, G, head), (stride, head, 1))
    near = torch.randn(8, G, head, generator=torch.Generator().manual_seed(2))
    far[-8:].copy_(near)
    assert (keys - 8) * stride >= 2**31
    q, kb, vb, *_ = tensors(blocks=2)
    own = own_block_mask(MASKS[0], B, q.device)
    lo, hi = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 4]]), torch.tensor([5, 8])
    distant = [KeyRanges(lo + keys - 8, hi + keys - 8)]
    found = run(triton_backend.TRITON, q, kb, vb, far, far, own, [slice(None)], distant)
    wanted = run(TORCH, q, kb, vb, near, near, own, [slice(None)], [KeyRanges(lo, hi)])
    check([*found[:5], found[5][-8:], found[6][-8:]], wanted)
    assert not found[5][:-8].any()
    assert not found[6][:-8].any()


def test_more_blocks_do_not_compile_again(triton_backend):
    from csbp.kernels import backward, forward

    for kernel in (forward.forward_kernel, backward.query_gradient_kernel):
        assert "rows" in kernel.kwargs["do_not_specialize"]
    for kernel in (backward.key_gradient_kernel, backward.own_gradient_kernel):
        assert {"rows", "keys"} <= set(kernel.kwargs["do_not_specialize"])


def test_float64_rows_are_refused(triton_backend):
    q = torch.zeros(G, 8, 16, dtype=torch.float64)
    ranges = KeyRanges(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="use the torch backend"):
        triton_backend.part_forward(SoftmaxState.empty(q), q, q[0, :, None], q[0, :, None], ranges)


def test_which_blocks_see_a_tile_of_keys(triton_backend):
    ranges = key_ranges(LAYOUT, LayerMask(12, causal=False), torch.arange(COUNT), WHOLE_AXIS)
    first, whole_first, whole_last, last = triton_backend.visitors(ranges, T, 4)
    for tile, start in enumerate(range(0, T, 4)):
        keys = torch.arange(start, min(start + 4, T))
        seen = (keys >= ranges.lo[..., None]) & (keys < ranges.hi[:, None, None])
        some, every = seen.flatten(1).any(1).nonzero()[:, 0], seen.flatten(1).all(1).nonzero()[:, 0]
        assert set(some.tolist()) <= set(range(int(first[tile]), int(last[tile])))
        assert set(range(int(whole_first[tile]), int(whole_last[tile]))) == set(every.tolist())
