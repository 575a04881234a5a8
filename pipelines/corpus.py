"""The training data: several feature stores as one set of samples with a fixed held-out part."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from pipelines.anchors import Tokens, legal_anchors
from pipelines.logs import watched
from pipelines.store import FeatureStore, Sample


class DataConfig(BaseModel):
    """What is trained on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stores: list[Path] = Field(min_length=1, description="Feature stores; all captured from the same target.")
    validation_fraction: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of the conversations that is held out. A conversation is held out or not by the "
        "hash of its id, so the split stays when the seed or the rest of the data changes.",
    )
    max_length: int | None = Field(
        default=None, ge=2, description="Tokens of a sample that are used, from its start."
    )
    prefetch: int = Field(default=2, ge=1, description="Micro-batches read ahead of the step.")


class DataError(ValueError):
    """The stores cannot be trained on as asked."""


@dataclass(frozen=True)
class SampleRef:
    """Where a sample lies."""

    store: int
    index: int
    sample_id: str


class Corpus:
    """Several stores as one set of samples with a fixed split into training and held-out conversations.

    Attributes:
        train, held_out: usable samples (with at least one legal anchor).
        unusable: number of samples without any legal anchor, which are left out.
        longest: tokens of the longest usable sample.
        most_documents: documents of the usable sample that packs most.
        frequent_ids: int64, supervised tokens, first the most frequent.
        fingerprint: over sample ids and the target's fingerprint; equal for equal data in any order.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self._stores = [FeatureStore.open(path) for path in config.stores]
        self.manifest = self._stores[0].manifest
        self._check_agreement()
        self.unusable = self.longest = self.most_documents = 0
        conversations: dict[SampleRef, str] = {}
        counts = torch.zeros(0, dtype=torch.int64)
        for number, store in enumerate(self._stores):
            for index in watched(len(store), f"samples of {store.path.name}"):
                sample = store.sample(index)
                tokens = _tokens(sample).cut(config.max_length)
                if bool(legal_anchors(tokens).any()):
                    self.longest = max(self.longest, tokens.length)
                    self.most_documents = max(self.most_documents, len(tokens.document_starts))
                    conversations[SampleRef(number, index, sample.id)] = sample.conversation
                    counts = _add_counts(counts, tokens.token_ids[tokens.loss_mask])
                else:
                    self.unusable += 1
        self._check_supervision(len(conversations))
        self.train, self.held_out = split(conversations, config.validation_fraction)
        self._check_training_part(len(conversations))
        self.frequent_ids = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
        digest = hashlib.blake2b(self.manifest.target_fingerprint.encode(), digest_size=16)
        for sample_id in sorted(ref.sample_id for ref in conversations):
            digest.update(b"\0" + sample_id.encode())
        self.fingerprint = digest.hexdigest()

    def tokens(self, ref: SampleRef) -> Tokens:
        return _tokens(self._stores[ref.store].sample(ref.index)).cut(self.config.max_length)

    def rows(
        self, refs: Sequence[SampleRef], lengths: Sequence[int], ranges: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Feature rows of axis ranges in the stored dtype, [sum of ranges, F]; reads nothing else.

        Args:
            refs: samples that make up the axis.
            lengths: axis rows of each.
            ranges: ascending, half-open axis ranges.
        """
        parts = [torch.empty(0, self._stores[0].feature_width, dtype=self.manifest.torch_dtype)]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for start, stop in ranges:
            for ref, length, end in zip(refs, lengths, ends, strict=True):
                first, last = max(start, end - length), min(stop, end)
                if first < last:
                    base = end - length
                    parts.append(self._stores[ref.store].rows(ref.index, first - base, last - base))
        return torch.cat(parts)

    def example_rows(self, samples: int = 32, rows: int = 128) -> Tensor:
        """Some feature rows, float32 [T, F]: up to `rows` from each of up to `samples` training samples."""
        chosen = sorted(self.train, key=lambda ref: stable_hash(ref.sample_id))[:samples]
        parts = []
        for ref in chosen:
            length = self.tokens(ref).length - 1
            start = max(0, length - rows)
            parts.append(self.rows([ref], [length], [(start, length)]).float())
        return torch.cat(parts)

    def _check_agreement(self) -> None:
        for path, store in zip(self.config.stores, self._stores, strict=True):
            for field in (
                "target_fingerprint",
                "tokenizer_fingerprint",
                "target_layer_ids",
                "hidden_size",
                "dtype",
            ):
                expected, found = getattr(self.manifest, field), getattr(store.manifest, field)
                if expected != found:
                    raise DataError(
                        f"stores must come from one target: {field} is {expected} in "
                        f"{self.config.stores[0]} and {found} in {path}; train on them apart or capture one "
                        "again"
                    )

    def _check_supervision(self, usable: int) -> None:
        if not usable:
            raise DataError(
                f"0 supervised tokens in the {self.unusable} samples of {self._names}: none has two "
                "neighbouring tokens that the target produced. Check the loss mask of the capture"
            )

    def _check_training_part(self, usable: int) -> None:
        if not self.train:
            raise DataError(
                f"all {usable} samples of {self._names} are held out; lower data.validation_fraction or add "
                "data"
            )

    @property
    def _names(self) -> str:
        return ", ".join(str(path) for path in self.config.stores)


def split(conversations: Mapping[SampleRef, str], fraction: float) -> tuple[list[SampleRef], list[SampleRef]]:
    """Training and held-out samples; at least one conversation is held out if `fraction` is above zero."""
    share = {name: stable_hash(name) / 2.0**64 for name in conversations.values()}
    limit = max(fraction, min(share.values()) + 2.0**-53) if fraction else 0.0
    train = [ref for ref, name in conversations.items() if share[name] >= limit]
    held_out = [ref for ref, name in conversations.items() if share[name] < limit]
    return train, held_out


def stable_hash(text: str) -> int:
    """64 bits of BLAKE2b, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _tokens(sample: Sample) -> Tokens:
    return Tokens(sample.id, sample.token_ids, sample.loss_mask, sample.document_starts)


def _add_counts(counts: Tensor, ids: Tensor) -> Tensor:
    """Add how often each id occurs to `counts`, which grows to the largest id."""
    found = ids.bincount(minlength=len(counts))
    found[: len(counts)] += counts
    return found
