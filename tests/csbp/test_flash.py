"""The backend `flash` against attention under an explicit mask, as it runs on a CPU and as on a GPU."""

import pytest
import torch

from csbp import flash
from csbp.attention import TORCH, SoftmaxState, pack, unpack
from csbp.flash import FLASH
from csbp.memory import PeakTracker
from csbp.rows import RowSet
from csbp.tiles import KeyRanges
from csbp.visibility import key_ranges
from tests.csbp.test_attention import LAYOUT, MASKS, PARTS, A, B, E, G, H, T, dense, in_parts, tensors


@pytest.fixture(params=["masked", "dense tiles and plain edges"])
def way(request, monkeypatch):
    """With a mask in the kernel, and without, as on a GPU."""
    monkeypatch.setattr(flash, "takes_masks", lambda device: request.param == "masked")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("bound", [2**20, 64])
def test_parts_add_up_to_attention_under_an_explicit_mask(mask, parts, bound, monkeypatch):
    monkeypatch.setattr(flash, "_CPU_TILES", flash._CPU_TILES._replace(scores=bound, start=bound))
    monkeypatch.setitem(flash.TILE_SIZES, "cpu", flash.TILE_SIZES["cpu"]._replace(scores=bound, start=bound))
    q, kb, vb, k, v = tensors()
    do = torch.randn(A, B, H, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    do[2, 1, 3] = 0.0  # a row without a gradient has no multiple of it
    wanted, wanted_grads = dense(mask, q, kb, vb, k, v, do)
    found, grads = in_parts(mask, q, kb, vb, k, v, do, parts, FLASH)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_the_rows_own_type(dtype):
    q, kb, vb, k, v = tensors(dtype)
    do = torch.randn(A, B, H, E, generator=torch.Generator().manual_seed(1))
    wanted, wanted_grads = dense(MASKS[3], q, kb, vb, k, v, do)
    found, grads = in_parts(MASKS[3], q, kb, vb, k, v, do, PARTS["halves"], FLASH)
    assert found.dtype == torch.float32
    for a, b in zip((found, *grads), (wanted, *wanted_grads), strict=True):
        assert a.dtype == torch.float32
        assert (a.double() - b).norm() < 4 * torch.finfo(dtype).eps * b.norm()


@pytest.mark.usefixtures("way")
def test_rows_that_see_nothing_of_a_part_keep_their_state():
    q, _, _, k, v = tensors()
    packed = pack(q, G)
    state = SoftmaxState.empty(packed)
    state.numerator += 1.0
    state.total += 2.0
    state.max.fill_(0.5)
    before = [x.clone() for x in (state.numerator, state.total, state.max)]
    lo = torch.full((A, B), 5)
    FLASH.forward(state, packed, k, v, KeyRanges(lo, torch.full((A,), 5)))
    some = KeyRanges(lo, torch.tensor([5, 5, 5, 5, 5, 5, 9]))
    FLASH.forward(state, packed, k, v, some)
    rows = slice(0, (A - 1) * B * H // G)
    for now, then in zip((state.numerator, state.total, state.max), before, strict=True):
        assert torch.equal(now[:, rows], then[:, rows])
        assert not torch.equal(now[:, rows.stop :], then[:, rows.stop :])


@pytest.mark.usefixtures("way")
def test_no_blocks_and_no_rows_are_allowed():
    q, _, _, k, v = tensors()
    none = pack(q[:0], G)
    ranges = KeyRanges(torch.zeros(0, B, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    state = SoftmaxState.empty(none)
    FLASH.forward(state, none, k, v, ranges)
    assert unpack(state.numerator, B, H).shape == (0, B, H, E)
    empty = key_ranges(LAYOUT, MASKS[0], torch.arange(A), RowSet.of([]))
    FLASH.forward(SoftmaxState.empty(pack(q, G)), pack(q, G), k[:0], v[:0], empty)


def test_memory_is_bounded_by_a_tile_not_by_rows_times_keys():
    blocks, length = 64, 16384
    anchors = torch.linspace(length // 2, length - 1, blocks).long()
    q, _, _, k, v = tensors(torch.float32, blocks, length)
    packed = pack(q, G)
    ranges = KeyRanges(torch.zeros(blocks, B, dtype=torch.int64), anchors)
    state = SoftmaxState.empty(packed)
    with PeakTracker() as peak:
        FLASH.forward(state, packed, k, v, ranges)
    scores = 4 * blocks * B * H * length
    # a mask, and what it is made from
    assert peak.peak_bytes < 4 * 4 * flash._CPU_TILES.scores < scores / 2
    other = SoftmaxState.empty(packed)
    TORCH.forward(other, packed, k, v, ranges)
    torch.testing.assert_close(state.finish(), other.finish(), rtol=1e-5, atol=1e-5)


def test_large_windows_are_met_without_a_mask(monkeypatch):
    """Keys that all rows of a tile see go to the kernel as they are."""
    met = []
    forward = flash._forward

    def watched(q, k, v, bias):
        met.append((k.shape[2], bias))
        return forward(q, k, v, bias)

    monkeypatch.setattr(flash, "_forward", watched)
    monkeypatch.setattr(flash, "takes_masks", lambda device: False)
    q, _, _, k, v = tensors()
    packed = pack(q, G)
    ranges = KeyRanges(torch.zeros(A, B, dtype=torch.int64), torch.arange(A) + T - A)
    FLASH.forward(SoftmaxState.empty(packed), packed, k, v, ranges)
    assert met == [(T - A, None)]


def test_what_a_gpu_cannot_take_is_refused():
    flash.check("cuda", torch.bfloat16, 128)
    flash.check("cpu", torch.float64, 5)
    for dtype, head in ((torch.float32, 128), (torch.bfloat16, 260), (torch.float16, 100)):
        with pytest.raises(ValueError, match="use the torch backend"):
            flash.check("cuda", dtype, head)
