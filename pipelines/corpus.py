"""The training data: several feature stores as one set of samples with a fixed held-out part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from csbp.plan import Mode
from drafter.config import DrafterConfig
from drafter.objective import ObjectiveConfig
from pipelines.anchors import Tokens, legal_anchors, legal_per_document
from pipelines.logs import watched
from pipelines.store import FeatureStore, Sample
from pipelines.store_schema import FEATURES


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
    upload_ahead: bool = Field(
        False,
        description="Copy the next micro-batch to the GPU, on a stream of its own, while one is computed; "
        "holds its features there a second time.",
    )
    prefetch: int = Field(
        default=2,
        ge=1,
        description="Micro-batches that wait or are being read beside the step; the reader holds no more.",
    )


READ_CHUNK = 1 << 12  # rows that are read at once


class DataError(ValueError):
    """The stores cannot be trained on as asked."""


@dataclass(frozen=True)
class SampleRef:
    """Where a sample lies, and its size.

    Attributes:
        store, index: of the store, and of the sample in it.
        sample_id: its id.
        tokens: tokens that are used.
        legal: legal anchors of each of its documents.
    """

    store: int
    index: int
    sample_id: str
    tokens: int = 0
    legal: tuple[int, ...] = ()


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
                legal = legal_anchors(tokens)
                if len(legal):
                    self.longest = max(self.longest, tokens.length)
                    self.most_documents = max(self.most_documents, len(tokens.document_starts))
                    per_document = tuple(legal_per_document(tokens, legal))
                    ref = SampleRef(number, index, sample.id, tokens.length, per_document)
                    conversations[ref] = sample.conversation
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

    @property
    def row_bytes(self) -> int:
        """Bytes of a feature row on disk."""
        return self.manifest.formats[FEATURES].row_bytes

    def rows(
        self, refs: Sequence[SampleRef], lengths: Sequence[int], ranges: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, int]:
        """Feature rows of axis ranges, [sum of ranges, F] in the dtype of reading, and the bytes read.

        Nothing else is read, and no more than a chunk of it is in memory twice.

        Args:
            refs: samples that make up the axis.
            lengths: axis rows of each.
            ranges: ascending, half-open axis ranges.
        """
        store = self._stores[0]
        rows_TF = torch.empty(
            sum(stop - start for start, stop in ranges), store.feature_width, dtype=store.dtype
        )
        at = 0
        for ref, first, last in _sample_ranges(refs, lengths, ranges):
            for start in range(first, last, READ_CHUNK):
                piece = self._stores[ref.store].rows(ref.index, start, min(start + READ_CHUNK, last))
                rows_TF[at : at + len(piece)] = piece
                at += len(piece)
        return rows_TF, at * self.row_bytes

    def last_states(self, refs: Sequence[SampleRef], lengths: Sequence[int], positions: Tensor) -> Tensor:
        """The target's states before its final norm, [n, D], at ascending int64 axis positions [n].

        Args:
            refs: samples that make up the axis.
            lengths: axis rows of each.
            positions: axis rows.
        """
        edges = torch.tensor([0, *lengths]).cumsum(0)
        bounds = torch.searchsorted(positions, edges).tolist()
        parts = [torch.empty(0, self.manifest.hidden_size, dtype=self.manifest.torch_dtype)]
        for number, ref in enumerate(refs):
            own = positions[bounds[number] : bounds[number + 1]] - edges[number]
            parts.append(self._stores[ref.store].last_hidden(ref.index, own))
        return torch.cat(parts)

    def example_rows(self, samples: int = 32, rows: int = 128) -> Tensor:
        """Some feature rows, float32 [T, F]: up to `rows` from each of up to `samples` training samples."""
        chosen = sorted(self.train, key=lambda ref: stable_hash(ref.sample_id))[:samples]
        parts = []
        for ref in chosen:
            kept = self._stores[ref.store].sample(ref.index).kept.clamp(max=ref.tokens - 1)
            start, stop = kept[kept[:, 0] < kept[:, 1]][-1].tolist()
            parts.append(self.rows([ref], [ref.tokens], [(max(start, stop - rows), stop)])[0].float())
        return torch.cat(parts)

    def check_reach(self, drafter: DrafterConfig, mode: Mode, objective: ObjectiveConfig) -> None:
        """Refuse stores that lack rows which some block would read; before the first step, not in it.

        Args:
            drafter: whose windows say how far a block sees.
            mode: who computes what.
            objective: says whether blocks are compared with the target's own distribution.

        Raises:
            DataError: the message names the store, what it holds and what is asked of it.
        """
        for path, store in zip(self.config.stores, self._stores, strict=True):
            problem = _window_problem(store.manifest.keep, drafter, mode)
            if problem:
                raise DataError(f"{path} {problem}, or capture with --keep all")
            if not objective.on_distribution:
                continue
            if not store.has_last_hidden:
                raise DataError(
                    f"{path} holds no last hidden states, which objective.loss {objective.loss} compares "
                    "with; capture again with --last-hidden, or take a loss on labels: ce, tv or lambda"
                )
            reach = store.manifest.keep.get("label_reach", drafter.num_drafts)
            if reach < drafter.num_drafts:
                raise DataError(
                    f"{path} holds last hidden states for {reach} labels behind an anchor, a block of "
                    f"{drafter.block_size} has {drafter.num_drafts}; capture again for this block size"
                )

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
    spans = sample.anchor_spans
    everywhere = spans.tolist() == [[0, len(sample.token_ids)]]
    return Tokens(
        sample.id,
        sample.token_ids,
        sample.loss_mask,
        sample.document_starts,
        None if everywhere else spans,
    )


def _sample_ranges(
    refs: Sequence[SampleRef], lengths: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[SampleRef, int, int]]:
    """Ascending axis ranges as (sample, first row, row behind the last) of the samples that they cross."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    number = 0
    for start, stop in ranges:
        at = start
        while at < stop:
            while ends[number] <= at:
                number += 1
            base, last = ends[number] - lengths[number], min(stop, ends[number])
            yield refs[number], at - base, last - base
            at = last


def _window_problem(keep: Mapping[str, Any], drafter: DrafterConfig, mode: Mode) -> str | None:
    """Why a store that keeps rows by this rule does not hold all that a block reads; None if it does."""
    if keep["rule"] == "all":
        return None
    held = f"keeps only the rows inside windows of {keep['window']} of its anchors"
    if mode not in ("csbp", "replicated"):
        return f"{held}, and mode {mode} reads whole samples: train with parallel.mode csbp"
    for mask in drafter.layer_masks:
        if mask.window is None:
            return f"{held}, and the drafter has a layer of full attention: slide all layers"
        if mask.window > keep["window"]:
            return f"{held}, and the drafter's window is {mask.window}: lower drafter.sliding_window"
    return None


def _add_counts(counts: Tensor, ids: Tensor) -> Tensor:
    """Add how often each id occurs to `counts`, which grows to the largest id."""
    found = ids.bincount(minlength=len(counts))
    found[: len(counts)] += counts
    return found
