"""Which anchors are legal, how they are drawn, and that slot j is labelled with the token at anchor + j."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.anchors import Tokens, build_blocks, document_coverage, draw_anchors, legal_anchors


def tokens(mask: str, starts: tuple[int, ...] = (0,), first_id: int = 100) -> Tokens:
    """A sample whose token id is its position + first_id; `mask` has one 0 or 1 per token."""
    return Tokens(
        f"sample-{mask}",
        torch.arange(len(mask)) + first_id,
        torch.tensor([c == "1" for c in mask]),
        torch.tensor(starts),
    )


def test_anchor_is_a_response_token_with_a_response_token_behind_it():
    # position 2 is the last prompt token: serving never drafts from it; 6 is the last token of its turn
    assert legal_anchors(tokens("0001111001")).nonzero().flatten().tolist() == [3, 4, 5]


def test_anchor_has_context_and_its_label_is_in_its_document():
    # documents [0, 4) and [4, 8), everything supervised: 0 and 4 have no context, 3 and 7 no label
    assert legal_anchors(tokens("11111111", (0, 4))).nonzero().flatten().tolist() == [1, 2, 5, 6]


def test_slot_j_is_labelled_with_the_token_at_anchor_plus_j():
    sample = tokens("0011111111")
    blocks = build_blocks([sample], [torch.tensor([2, 4])], block_size=4)
    assert blocks.anchor_ids.tolist() == [102, 104]
    assert blocks.labels.tolist() == [[103, 104, 105], [105, 106, 107]]
    assert blocks.supervised.all()


def test_no_block_spans_two_documents():
    sample = tokens("1" * 40, (0, 20))
    blocks = build_blocks([sample], [torch.tensor([15, 35])], block_size=8)
    assert blocks.labels.tolist() == [[116, 117, 118, 119, 0, 0, 0], [136, 137, 138, 139, 0, 0, 0]]
    assert blocks.supervised.sum(1).tolist() == [4, 4]
    assert blocks.layout.starts.tolist() == [0, 20]
    assert blocks.layout.positions.tolist() == [15, 15]


def test_supervision_ends_with_the_turn():
    # a draft never gets past the end of the answer, so the next answer's tokens are not behind the gap
    blocks = build_blocks([tokens("0111001111")], [torch.tensor([1])], block_size=8)
    assert blocks.supervised[0].tolist() == [True, True, False, False, False, False, False]


def test_samples_share_one_axis():
    one, two = tokens("0111111"), tokens("0011111", first_id=200)
    blocks = build_blocks([one, two], [torch.tensor([1]), torch.tensor([2, 3])], block_size=3)
    assert blocks.layout.anchors.tolist() == [1, 9, 10]
    assert blocks.layout.starts.tolist() == [0, 7, 7]
    assert blocks.layout.length == 14
    assert blocks.anchor_ids.tolist() == [101, 202, 203]
    assert blocks.labels[1].tolist() == [203, 204]


def test_budget_is_per_document_and_coverage_reported_for_each():
    sample = tokens(("0" + "1" * 9) * 3, (0, 10, 20))
    drawn = draw_anchors(sample, 2, seed=0, epoch=0)
    assert torch.bucketize(drawn, torch.tensor([10, 20]), right=True).bincount().tolist() == [2, 2, 2]
    coverage = document_coverage(sample, torch.tensor([2, 3, 12, 13, 14, 15, 16, 17, 18, 19]))
    assert coverage.tolist() == [2 / 8, 1.0, 0.0]


def test_odd_lengths_need_no_padding():
    sample = tokens("0" + "1" * 1002)
    blocks = build_blocks([sample], [draw_anchors(sample, 10_000, 0, 0)], block_size=8)
    assert len(blocks.anchor_ids) == 1001
    assert blocks.slots == sum(min(7, 1002 - a) for a in range(1, 1002))
    assert blocks.coverage_sum == blocks.documents == 1


def test_draw_depends_on_its_names_alone():
    sample = tokens("0" + "1" * 300)
    first = draw_anchors(sample, 16, seed=1, epoch=0)
    torch.manual_seed(123)  # process state must not matter
    assert torch.equal(first, draw_anchors(sample, 16, seed=1, epoch=0))
    assert not torch.equal(first, draw_anchors(sample, 16, seed=2, epoch=0))
    assert not torch.equal(first, draw_anchors(sample, 16, seed=1, epoch=1))
    other = Tokens("another", sample.token_ids, sample.loss_mask, sample.document_starts)
    assert not torch.equal(first, draw_anchors(other, 16, seed=1, epoch=0))


def test_draw_is_uniform():
    sample = tokens("0" + "1" * 41)  # 40 legal anchors, 10 drawn: each has probability 1/4
    counts = torch.zeros(42)
    for epoch in range(2000):
        counts[draw_anchors(sample, 10, 0, epoch)] += 1
    rate = counts[1:41] / 2000
    # standard error sqrt(.25 * .75 / 2000) = 0.0097; 4.5 of them over 40 anchors
    assert (rate - 0.25).abs().max() < 0.044


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_drawn_anchors_are_legal_ascending_and_within_budget(data):
    mask = data.draw(st.text("01", min_size=2, max_size=80))
    cuts = data.draw(st.sets(st.integers(1, len(mask) - 1), max_size=4))
    sample = tokens(mask, (0, *sorted(cuts)))
    budget = data.draw(st.integers(1, 8))
    drawn = draw_anchors(sample, budget, 3, 5)
    legal = legal_anchors(sample)
    assert legal[drawn].all()
    assert (drawn.diff() > 0).all()
    document = torch.bucketize(drawn, sample.document_starts, right=True) - 1
    legal_of = torch.bucketize(legal.nonzero().flatten(), sample.document_starts, right=True) - 1
    expected = legal_of.bincount(minlength=len(sample.document_starts)).clamp(max=budget)
    assert torch.equal(document.bincount(minlength=len(sample.document_starts)), expected)


def test_cut_keeps_documents_that_begin_before_it():
    cut = tokens("0111" * 5, (0, 8, 16)).cut(12)
    assert cut.length == 12
    assert cut.document_starts.tolist() == [0, 8]
    assert tokens("011").cut(None).length == 3


@pytest.mark.parametrize("mask", ["00", "0100", "0"])
def test_sample_without_legal_anchor_gives_no_block(mask):
    sample = tokens(mask)
    blocks = build_blocks([sample], [draw_anchors(sample, 4, 0, 0)], block_size=4)
    assert blocks.labels.shape == (0, 3)
    assert blocks.slots == blocks.documents == 0
