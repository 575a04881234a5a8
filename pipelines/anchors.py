"""Which tokens of a sample begin a block, and what each block is asked to predict.

Serving drafts from the first generated token (sampled by the prefill) and then from every bonus token, so an
anchor is always a token that the target produced itself: a supervised token, never the last prompt token. A
legal anchor has a supervised successor in its own document, and at least one context row before it.

Anchors are drawn without replacement from (seed, sample id, epoch, document) by a counter-based generator, so
every rank draws the same list and a resumed run the same again; nothing is kept between calls.

Shape legend: L tokens of a sample, N documents in it, A blocks, B rows of a block, K = B - 1 predicted slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from csbp.layout import BlockLayout


class AnchorConfig(BaseModel):
    """How many blocks a document gives in one epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_document: int = Field(
        default=512,
        ge=1,
        description="Anchors drawn, uniformly and without replacement, from every document of a sample. "
        "A document with fewer legal anchors gives all of them. The budget is per document and not per "
        "packed sample, so packing does not thin the supervision.",
    )


@dataclass(frozen=True)
class Tokens:
    """The part of a sample that anchors and labels are made from.

    Attributes:
        sample_id: content hash or name of the sample; part of the key of the random draw.
        token_ids: int64 [L].
        loss_mask: bool [L], True where the target produced the token.
        document_starts: int64 [N], ascending, first is 0.
    """

    sample_id: str
    token_ids: Tensor
    loss_mask: Tensor
    document_starts: Tensor

    @property
    def length(self) -> int:
        return int(self.token_ids.shape[0])

    def cut(self, max_length: int | None) -> Tokens:
        """The first `max_length` tokens; documents that begin later are dropped."""
        if max_length is None or self.length <= max_length:
            return self
        return Tokens(
            self.sample_id,
            self.token_ids[:max_length],
            self.loss_mask[:max_length],
            self.document_starts[self.document_starts < max_length],
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
        documents: documents of the micro-batch that have a legal anchor.
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
    """Tokens that may begin a block, bool [L]."""
    mask = tokens.loss_mask
    legal = torch.zeros_like(mask)
    legal[:-1] = mask[:-1] & mask[1:]
    starts = tokens.document_starts
    legal[starts] = False  # a block needs one context row
    legal[starts[1:] - 1] = False  # the next token is another document's
    return legal


def draw_anchors(tokens: Tokens, per_document: int, seed: int, epoch: int | str) -> Tensor:
    """int64 [A], ascending: the anchors of one sample in one epoch, the same on every rank."""
    candidates = legal_anchors(tokens).nonzero().flatten()
    bounds = torch.searchsorted(candidates, tokens.document_starts).tolist()
    drawn = []
    for document, (first, last) in enumerate(zip(bounds, [*bounds[1:], len(candidates)], strict=True)):
        own = candidates[first:last]
        if len(own) > per_document:
            keys = _random_words(len(own), seed, tokens.sample_id, epoch, document)
            own = own[torch.from_numpy(np.sort(np.argpartition(keys, per_document)[:per_document]))]
        drawn.append(own)
    return torch.cat(drawn) if drawn else candidates


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
        ends = torch.cat([tokens.document_starts[1:], torch.tensor([tokens.length])])
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
    """float64 [documents with a legal anchor]: share of their predictable tokens at `predicted` positions.

    A token is predictable if some legal anchor stands right before it.
    """
    predictable = legal_anchors(tokens).roll(1).double()
    hit = torch.zeros(tokens.length, dtype=torch.float64)
    hit[predicted] = 1.0
    document = torch.bucketize(torch.arange(tokens.length), tokens.document_starts, right=True) - 1
    count = len(tokens.document_starts)
    total = torch.bincount(document, weights=predictable, minlength=count)
    hits = torch.bincount(document, weights=hit, minlength=count)
    return (hits / total)[total > 0]


def _random_words(count: int, seed: int, sample_id: str, epoch: int | str, document: int) -> np.ndarray:
    """uint64 [count] from a Philox stream named by its arguments.

    Raw words, since NumPy keeps the stream of a bit generator, but not of `Generator.choice`, across
    versions.
    """
    name = f"{seed}\0{sample_id}\0{epoch}\0{document}".encode()
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)
