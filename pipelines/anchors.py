"""Which tokens of a sample may begin a block, and what each block is asked to predict.

Serving drafts from the first generated token (sampled by the prefill) and then from every bonus token, so an
anchor is always a token that the target produced itself: a supervised token, never the last prompt token. A
legal anchor has a supervised successor in its own document, and at least one context row before it. A store
that holds a part of the feature rows names the tokens whose rows it holds, and only those may be anchors.
Which of them are taken is decided by `pipelines.draw`.

Shape legend: L tokens of a sample, N documents in it, A blocks, B rows of a block, K = B - 1 predicted slots,
n legal anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csbp.layout import BlockLayout


@dataclass(frozen=True)
class Tokens:
    """The part of a sample that anchors and labels are made from.

    Attributes:
        sample_id: content hash or name of the sample; part of the key of the random draw.
        token_ids: int64 [L].
        loss_mask: bool [L], True where the target produced the token.
        document_starts: int64 [N], ascending, first is 0.
        anchor_spans: int64 [m, 2], ascending half-open ranges of tokens that may be anchors; None for all.
    """

    sample_id: str
    token_ids: Tensor
    loss_mask: Tensor
    document_starts: Tensor
    anchor_spans: Tensor | None = None

    @property
    def length(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def document_edges(self) -> Tensor:
        """int64 [N + 1]: first token of each document, and L."""
        return torch.cat([self.document_starts, torch.tensor([self.length])])

    def cut(self, max_length: int | None) -> Tokens:
        """The first `max_length` tokens; documents that begin later are dropped."""
        if max_length is None or self.length <= max_length:
            return self
        spans = self.anchor_spans
        if spans is not None:
            spans = spans[spans[:, 0] < max_length].clamp(max=max_length)
        return Tokens(
            self.sample_id,
            self.token_ids[:max_length],
            self.loss_mask[:max_length],
            self.document_starts[self.document_starts < max_length],
            spans,
        )


@dataclass(frozen=True)
class Blocks:
    """The blocks of one micro-batch on its context axis (the concatenation of its samples).

    Attributes:
        layout: where the blocks stand.
        anchor_ids: int64 [A], token of each anchor.
        labels: int64 [A, K]; slot j (from 1) holds the token at anchor + j, zero where not supervised.
        supervised: bool [A, K]. Always a leading run: a slot past the end of the document, or behind a token
            that the target did not produce, could never be reached by a draft.
        documents: documents of the micro-batch that have a predictable token.
        coverage_sum: sum over those documents of the share of their predictable tokens that a slot predicts.
    """

    layout: BlockLayout
    anchor_ids: Tensor
    labels: Tensor
    supervised: Tensor
    documents: int
    coverage_sum: float

    @property
    def slots(self) -> int:
        """Supervised slots, the unit of the loss and of every throughput figure."""
        return int(self.supervised.sum())


def legal_anchors(tokens: Tokens) -> Tensor:
    """int64 [n], ascending: tokens that may begin a block."""
    mask = tokens.loss_mask
    legal = torch.zeros_like(mask)
    legal[:-1] = mask[:-1] & mask[1:]
    starts = tokens.document_starts
    legal[starts] = False  # a block needs one context row
    legal[starts[1:] - 1] = False  # the next token is another document's
    places = legal.nonzero().flatten()
    if tokens.anchor_spans is None:
        return places
    edges = torch.searchsorted(places, tokens.anchor_spans).tolist()
    return torch.cat([places[:0], *(places[first:last] for first, last in edges)])


def legal_per_document(tokens: Tokens, legal: Tensor) -> list[int]:
    """How many of the ascending positions `legal` lie in each document."""
    counts: list[int] = torch.searchsorted(legal, tokens.document_edges).diff().tolist()
    return counts


def build_blocks(samples: Sequence[Tokens], anchors: Sequence[Tensor], block_size: int) -> Blocks:
    """Lay the blocks of several samples on one context axis and read off their labels.

    Args:
        samples: the samples of the micro-batch, in the order of the axis.
        anchors: int64 [A_i] each, ascending indices into sample i.
        block_size: B.
    """
    slots = torch.arange(1, block_size)
    offset = 0
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    documents, coverage_sum = 0, 0.0
    for tokens, own in zip(samples, anchors, strict=True):
        ends = tokens.document_edges[1:]
        document = torch.searchsorted(tokens.document_starts, own, right=True) - 1
        reached_AK = own[:, None] + slots
        inside_AK = reached_AK < ends[document][:, None]
        reached_AK = reached_AK.clamp(max=tokens.length - 1)
        supervised_AK = (inside_AK & tokens.loss_mask[reached_AK]).cumprod(dim=1).bool()
        labels_AK = tokens.token_ids[reached_AK].masked_fill(~supervised_AK, 0)
        starts = tokens.document_starts[document]
        parts.append((own + offset, starts + offset, tokens.token_ids[own], labels_AK, supervised_AK))
        covered = document_coverage(tokens, reached_AK[supervised_AK])
        documents += len(covered)
        coverage_sum += float(covered.sum())
        offset += tokens.length
    anchors_A, starts_A, ids_A, labels_AK, supervised_AK = (torch.cat(x) for x in zip(*parts, strict=True))
    layout = BlockLayout(anchors=anchors_A, starts=starts_A, length=offset, block_size=block_size)
    return Blocks(layout, ids_A, labels_AK, supervised_AK, documents, coverage_sum)


def document_coverage(tokens: Tokens, predicted: Tensor) -> Tensor:
    """float64 [documents with a predictable token]: share of those at `predicted` positions (any order).

    A token is predictable if a legal anchor stands right before it, whether or not the store has the rows for
    a block there: what a store leaves out is not covered.
    """
    edges = tokens.document_edges
    total = torch.searchsorted(legal_anchors(replace(tokens, anchor_spans=None)), edges).diff()
    hits = torch.searchsorted(predicted.unique(), edges).diff()
    return hits[total > 0].double() / total[total > 0]
