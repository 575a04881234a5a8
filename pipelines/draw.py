"""Which legal anchors a step takes of a sample: four rules, all without replacement.

Draws come from (seed, sample id, epoch, document) by a counter-based generator, so every rank draws the same
list and a resumed run the same again; nothing is kept between calls. Below, n legal anchors of a document and
m = min(per_document, n) that are taken.

`uniform` takes every set of m anchors with equal probability.

`locality` lays disjoint neighbourhoods on the n legal anchors, joined to a circle. Each gives its share of m,
uniformly from its own anchors. The pattern of neighbourhoods and picks is drawn first and then turned by a
uniform number of anchors, so every anchor is taken with probability m / n exactly, those at the ends of the
document included; only which anchors come together differs from `uniform`. Blocks of a neighbourhood see
nearly the same rows, so a step reads about one window and the neighbourhood's span for each.

`supervised` gives every span of neighbouring legal anchors (an answer) the same number, as far as it has so
many, and then takes them uniformly from the span: a short answer is not outnumbered by a long one. What is
left after equal numbers goes, one each, to spans drawn uniformly from those that have more.

`rejected` takes a share of m from the anchors that a list names, uniformly, and the others uniformly from the
rest. The list is where an earlier drafter's own decoding was rejected (`longdraft replay --rejected`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from pipelines.anchors import Tokens, legal_anchors, legal_per_document

AnchorRule = Literal["uniform", "locality", "supervised", "rejected"]


class AnchorConfig(BaseModel):
    """How many blocks a document gives in one epoch, and where they stand."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: AnchorRule = Field(
        default="uniform",
        description="`uniform`: anywhere. `locality`: in `neighbourhoods`, so that the windows of a step "
        "overlap and few rows are read; every anchor is still equally likely. `supervised`: as many from a "
        "short answer as from a long one. `rejected`: mostly those that the file `rejected` names.",
    )
    rejected: Path | None = Field(
        default=None,
        description="Anchors at which a drafter's own decoding was rejected, from `replay --rejected`; goes "
        "with the rule `rejected`.",
    )
    rejected_share: float = Field(
        default=0.75, gt=0, le=1, description="Of the anchors under `rejected`, as far as there are so many."
    )
    per_document: int = Field(
        default=512,
        ge=1,
        description="Anchors drawn without replacement from every document of a sample. A document with "
        "fewer legal anchors gives all of them. The budget is per document and not per packed sample, so "
        "packing does not thin the supervision.",
    )
    neighbourhoods: int = Field(
        default=8, ge=1, description="Of a document in `locality`; each gives an equal share of its anchors."
    )
    neighbourhood_length: int | None = Field(
        default=None,
        ge=1,
        description="Legal anchors that a neighbourhood of `locality` spans; default: its share of anchors "
        "times the block size. At least its share, at most an equal part of the document.",
    )

    @model_validator(mode="after")
    def _list_and_rule(self) -> AnchorConfig:
        if (self.rule == "rejected") != (self.rejected is not None):
            raise ValueError(
                f"rule {self.rule} with rejected {self.rejected}: the rule `rejected` needs the file that "
                "`longdraft replay --rejected` writes, and no other rule takes one"
            )
        return self

    def taken(self, legal: int) -> int:
        """m: anchors taken from a document with that many legal ones."""
        return min(self.per_document, legal)


def draw_anchors(
    tokens: Tokens,
    config: AnchorConfig,
    block_size: int,
    seed: int,
    epoch: int | str,
    listed: np.ndarray | None = None,
) -> Tensor:
    """int64 [A], ascending: the anchors of one sample in one epoch, the same on every rank.

    Args:
        tokens: of the sample.
        config: the rule.
        block_size: rows of a block.
        seed: of the run.
        epoch: or another name of the draw.
        listed: the sample's anchors in the list of the rule `rejected`; None for none.
    """
    legal = legal_anchors(tokens)
    drawn = [legal[:0]]
    for document, own in enumerate(legal.split(legal_per_document(tokens, legal))):
        if len(own) <= config.per_document:
            drawn.append(own)
            continue
        words = _Words(f"{seed}\0{tokens.sample_id}\0{epoch}\0{document}")
        if config.rule == "rejected":
            named = np.isin(own.numpy(), [] if listed is None else listed)
            places = _listed_places(named, config, words)
        else:
            places = _places(own.numpy(), config, block_size, words)
        drawn.append(own[torch.from_numpy(places)])
    return torch.cat(drawn)


class _Words:
    """A Philox stream named by a text.

    Raw words, since NumPy keeps the stream of a bit generator, but not of `Generator.choice`, across
    versions.
    """

    def __init__(self, name: str) -> None:
        key = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), dtype=np.uint64)
        self._generator = np.random.Philox(key=key)

    def below(self, limit: int, count: int) -> np.ndarray:
        """int64 [count], each in [0, limit), equally likely up to limit / 2^64."""
        return (self._generator.random_raw(count) % np.uint64(limit)).astype(np.int64)

    def subset(self, size: int, count: int) -> np.ndarray:
        """int64 [count], ascending: numbers below `size`, all sets equally likely."""
        if count == size:
            return np.arange(size)
        keys = self._generator.random_raw(size)
        return np.sort(np.argpartition(keys, count)[:count])


def _places(legal: np.ndarray, config: AnchorConfig, block_size: int, words: _Words) -> np.ndarray:
    """int64 [m], ascending: places in `legal`, of which there are more than m."""
    if config.rule == "uniform":
        return words.subset(len(legal), config.per_document)
    if config.rule == "locality":
        return _neighbourhood_places(len(legal), config, block_size, words)
    return _span_places(legal, config.per_document, words)


def _listed_places(named: np.ndarray, config: AnchorConfig, words: _Words) -> np.ndarray:
    """int64 [m], ascending: places among n > m legal anchors, of which some are `named` [n]."""
    inside, outside = np.flatnonzero(named), np.flatnonzero(~named)
    count = config.per_document
    wanted = min(len(inside), max(round(config.rejected_share * count), count - len(outside)))
    picks = (inside[words.subset(len(inside), wanted)], outside[words.subset(len(outside), count - wanted)])
    return np.sort(np.concatenate(picks))


def _neighbourhood_places(size: int, config: AnchorConfig, block_size: int, words: _Words) -> np.ndarray:
    count = config.per_document
    groups = min(config.neighbourhoods, count)
    shares = np.full(groups, count // groups) + (np.arange(groups) < count % groups)
    length = config.neighbourhood_length or block_size * -(-count // groups)
    # at most an equal part of the circle, so that they fit; shares that are larger fit because m < n
    spans = np.maximum(shares, min(length, size // groups))
    before = np.sort(words.below(size - int(spans.sum()) + 1, groups))
    starts = before + spans.cumsum() - spans
    picks = [
        start + words.subset(int(span), int(share))
        for start, span, share in zip(starts, spans, shares, strict=True)
    ]
    turn = words.below(size, 1)
    return np.sort((np.concatenate(picks) + turn) % size)


def _span_places(legal: np.ndarray, count: int, words: _Words) -> np.ndarray:
    first = np.flatnonzero(np.diff(legal, prepend=legal[0] - 2) != 1)
    sizes = np.diff(first, append=len(legal))
    shares = _equal_shares(sizes, count, words)
    picks = [
        start + words.subset(int(size), int(share))
        for start, size, share in zip(first, sizes, shares, strict=True)
        if share
    ]
    return np.concatenate(picks)


def _equal_shares(sizes: np.ndarray, count: int, words: _Words) -> np.ndarray:
    """int64, as `sizes`: how many to take of each, `count` in all (less than there are)."""
    low, high = (
        0,
        int(sizes.max()),
    )  # the largest level with sum(min(sizes, level)) <= count lies in [low, high)
    while high - low > 1:
        level = (low + high) // 2
        low, high = (level, high) if np.minimum(sizes, level).sum() <= count else (low, level)
    shares = np.minimum(sizes, low)
    larger = np.flatnonzero(sizes > low)
    shares[larger[words.subset(len(larger), count - int(shares.sum()))]] += 1
    return shares
