"""Which anchors are legal, and that slot j is labelled with the token at anchor + j."""

from __future__ import annotations

import pytest
import torch

from pipelines.anchors import Tokens, build_blocks, document_coverage, legal_anchors, legal_per_document
from pipelines.draw import AnchorConfig, draw_anchors


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
    assert legal_anchors(tokens("0001111001")).tolist() == [3, 4, 5]


def test_anchor_has_context_and_its_label_is_in_its_document():
    # documents [0, 4) and [4, 8), everything supervised: 0 and 4 have no context, 3 and 7 no label
    assert legal_anchors(tokens("11111111", (0, 4))).tolist() == [1, 2, 5, 6]


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
    drawn = draw_anchors(sample, AnchorConfig(per_document=2), 4, seed=0, epoch=0)
    assert torch.bucketize(drawn, torch.tensor([10, 20]), right=True).bincount().tolist() == [2, 2, 2]
    coverage = document_coverage(sample, torch.tensor([2, 3, 12, 13, 14, 15, 16, 17, 18, 19]))
    assert coverage.tolist() == [2 / 8, 1.0, 0.0]


def test_odd_lengths_need_no_padding():
    sample = tokens("0" + "1" * 1002)
    blocks = build_blocks([sample], [legal_anchors(sample)], block_size=8)
    assert len(blocks.anchor_ids) == 1001
    assert blocks.slots == sum(min(7, 1002 - a) for a in range(1, 1002))
    assert blocks.coverage_sum == blocks.documents == 1


def test_only_tokens_whose_rows_are_stored_may_be_anchors():
    whole = tokens("0" + "1" * 19, (0, 10))
    sample = Tokens(
        "kept", whole.token_ids, whole.loss_mask, whole.document_starts, torch.tensor([[3, 6], [8, 13]])
    )
    assert legal_anchors(sample).tolist() == [3, 4, 5, 8, 11, 12]
    assert legal_per_document(sample, legal_anchors(sample)) == [4, 2]
    assert legal_anchors(sample.cut(12)).tolist() == [3, 4, 5, 8]  # 11 has lost its successor
    assert sample.cut(5).anchor_spans.tolist() == [[3, 5]]
    # coverage counts what the store left out: slots of a block at 5 predict past the span
    coverage = document_coverage(sample, torch.tensor([6, 7, 8, 9]))
    assert coverage.tolist() == [4 / 8, 0.0]


def test_cut_keeps_documents_that_begin_before_it():
    cut = tokens("0111" * 5, (0, 8, 16)).cut(12)
    assert cut.length == 12
    assert cut.document_starts.tolist() == [0, 8]
    assert tokens("011").cut(None).length == 3


@pytest.mark.parametrize("mask", ["00", "0100", "0"])
def test_sample_without_legal_anchor_gives_no_block(mask):
    sample = tokens(mask)
    blocks = build_blocks([sample], [draw_anchors(sample, AnchorConfig(), 4, 0, 0)], block_size=4)
    assert blocks.labels.shape == (0, 3)
    assert blocks.slots == blocks.documents == 0
