"""From feature stores to micro-batches: the split, the order, and the rows that a step reads.

The order of the training samples in an epoch is a function of (seed, epoch, sample id). Optimizer step s
takes the samples s·G … s·G + G - 1 of that endless sequence, G being the samples of a step over all
replicas, so the data of a step does not depend on the number of ranks, and the step number is the sampler's
whole state.

A rank reads the feature rows that its plan names and no others, in a thread that runs ahead of the step by a
bounded number of micro-batches.

Shape legend: L tokens of a sample, A blocks of this rank, K predicted slots, T context rows read, F feature
width.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from csbp.layout import BlockLayout
from csbp.plan import StepPlan
from pipelines.anchors import Blocks, Tokens, build_blocks, draw_anchors
from pipelines.corpus import Corpus, DataError, SampleRef, stable_hash

_MOVED = ("features", "anchor_ids", "labels", "supervised", "block_positions")
VALIDATION_EPOCH = "validation"  # names the random draw of held-out anchors: the same at every validation


class BatchConfig(BaseModel):
    """Samples of an optimizer step. Independent of the number of ranks, so that a run is too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int = Field(
        default=4, ge=1, description="Samples of one optimizer step over all replicas and micro-batches."
    )
    micro: int = Field(
        default=4, ge=1, description="Samples that one replica takes at once. What is left is accumulated."
    )

    def accumulation(self, replicas: int) -> int:
        """Micro-batches of one replica in one optimizer step.

        Raises:
            DataError: the samples of a step do not divide over replicas and micro-batches.
        """
        count, rest = divmod(self.samples, self.micro * replicas)
        if rest or not count:
            raise DataError(
                f"batch.samples = {self.samples} must be a multiple of batch.micro x replicas = "
                f"{self.micro} x {replicas}; change one of the three"
            )
        return count


@dataclass
class MicroBatch:
    """What one rank computes at once.

    Attributes:
        step: optimizer step, from 0.
        number: of this micro-batch in the step, from 0.
        step_slots: supervised slots of this replica in the whole optimizer step, over all its context ranks.
        plan: this rank's share of the layout.
        features: [T, F], stored dtype, rows of `plan.rows`.
        row_positions: int64 [T], where the plan lives.
        anchor_ids: int64 [A]; labels: int64 [A, K]; supervised: bool [A, K]; block_positions: int64 [A, B].
        documents, coverage_sum, tokens: of the replica's whole micro-batch.
    """

    step: int
    number: int
    step_slots: int
    plan: StepPlan
    features: Tensor
    row_positions: Tensor
    anchor_ids: Tensor
    labels: Tensor
    supervised: Tensor
    block_positions: Tensor
    documents: int
    coverage_sum: float
    tokens: int

    @property
    def feature_bytes(self) -> int:
        return self.features.numel() * self.features.element_size()

    def pin(self) -> MicroBatch:
        """Copy to page-locked memory, from where a GPU fetches while it computes."""
        for name in _MOVED:
            setattr(self, name, getattr(self, name).pin_memory())
        return self

    def to(self, device: torch.device) -> MicroBatch:
        """Move the tensors; the plan has placed its own."""
        for name in _MOVED:
            setattr(self, name, getattr(self, name).to(device, non_blocking=True))
        return self


@dataclass(frozen=True)
class Sharding:
    """This rank's part of every step: which replica's samples, and how its blocks are planned."""

    replica: int
    replicas: int
    plan: Callable[[BlockLayout], StepPlan]


@dataclass(frozen=True)
class _Drawn:
    """A micro-batch before its features are read."""

    refs: Sequence[SampleRef]
    tokens: Sequence[Tokens]
    blocks: Blocks


class Loader:
    """Micro-batches of a corpus for one rank."""

    def __init__(
        self,
        corpus: Corpus,
        batch: BatchConfig,
        sharding: Sharding,
        *,
        per_document: int,
        block_size: int,
        seed: int,
        pin: bool = False,
    ) -> None:
        self._corpus = corpus
        self._batch = batch
        self._sharding = sharding
        self._per_document = per_document
        self._block_size = block_size
        self._seed = seed
        self._pin = pin
        self._order: dict[int, list[SampleRef]] = {}
        self.accumulation = batch.accumulation(sharding.replicas)

    def train(self, first_step: int) -> Prefetcher:
        """Endless micro-batches from optimizer step `first_step` on, read ahead in a thread."""
        return Prefetcher(self._train(first_step), self._corpus.config.prefetch)

    def held_out(self, max_batches: int | None) -> Prefetcher:
        """Held-out micro-batches of this replica; their anchors are the same at every validation.

        Replicas yield equally many, the last ones possibly without a block, so that collectives agree.
        """
        refs, micro, replicas = self._corpus.held_out, self._batch.micro, self._sharding.replicas
        batches = -(-len(refs) // (micro * replicas))
        return Prefetcher(
            self._held_out(refs, min(batches, max_batches or batches)), self._corpus.config.prefetch
        )

    def _train(self, step: int) -> Iterator[MicroBatch]:
        micro, replica, replicas = self._batch.micro, self._sharding.replica, self._sharding.replicas
        while True:
            drawn = []
            for number in range(self.accumulation):
                first = step * self._batch.samples + (number * replicas + replica) * micro
                drawn.append(self._draw([self._at(first + i) for i in range(micro)]))
            slots = sum(item.blocks.slots for item in drawn)
            for number, item in enumerate(drawn):
                yield self._read(item, step, number, slots)
            step += 1

    def _held_out(self, refs: Sequence[SampleRef], batches: int) -> Iterator[MicroBatch]:
        micro, replica, replicas = self._batch.micro, self._sharding.replica, self._sharding.replicas
        for number in range(batches):
            first = (number * replicas + replica) * micro
            own = refs[first : first + micro]
            # a replica past the end takes part with a sample whose anchors are left out
            drawn = self._draw([(ref, VALIDATION_EPOCH) for ref in own] or [(refs[0], None)])
            yield self._read(drawn, 0, number, drawn.blocks.slots)

    def _at(self, position: int) -> tuple[SampleRef, int]:
        """Sample at a place of the endless training sequence, and its epoch."""
        epoch, index = divmod(position, len(self._corpus.train))
        if epoch not in self._order:
            self._order = {epoch: epoch_order(self._corpus.train, self._seed, epoch)}
        return self._order[epoch][index], epoch

    def _draw(self, picked: Sequence[tuple[SampleRef, int | str | None]]) -> _Drawn:
        refs = [ref for ref, _ in picked]
        tokens = [self._corpus.tokens(ref) for ref in refs]
        anchors = [
            torch.empty(0, dtype=torch.int64)
            if epoch is None
            else draw_anchors(sample, self._per_document, self._seed, epoch)
            for sample, (_, epoch) in zip(tokens, picked, strict=True)
        ]
        return _Drawn(refs, tokens, build_blocks(tokens, anchors, self._block_size))

    def _read(self, drawn: _Drawn, step: int, number: int, step_slots: int) -> MicroBatch:
        blocks = drawn.blocks
        plan = self._sharding.plan(blocks.layout)
        own = plan.own
        lengths = [sample.length for sample in drawn.tokens]
        batch = MicroBatch(
            step=step,
            number=number,
            step_slots=step_slots,
            plan=plan,
            features=self._corpus.rows(drawn.refs, lengths, plan.rows),
            row_positions=plan.row_positions,
            anchor_ids=blocks.anchor_ids[own],
            labels=blocks.labels[own],
            supervised=blocks.supervised[own],
            block_positions=blocks.layout.positions[own][:, None] + torch.arange(self._block_size),
            documents=blocks.documents,
            coverage_sum=blocks.coverage_sum,
            tokens=blocks.layout.length,
        )
        return batch.pin() if self._pin else batch


class Prefetcher(Iterator[MicroBatch]):
    """Runs an iterator in a thread, at most `depth` items ahead; its errors surface at the consumer."""

    _END = object()

    def __init__(self, source: Iterator[MicroBatch], depth: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(source,), daemon=True, name="feature-reader")
        self._thread.start()

    def __next__(self) -> MicroBatch:
        item = self._queue.get()
        if isinstance(item, MicroBatch):
            return item
        self._queue.put(item)  # a second call ends alike
        raise StopIteration if item is self._END else item

    def close(self) -> None:
        """Stop reading and wait for the thread."""
        self._stop.set()
        while self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(timeout=0.05)

    def _fill(self, source: Iterator[MicroBatch]) -> None:
        try:
            for item in source:
                if not self._offer(item):
                    return
            self._offer(self._END)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            self._offer(error)

    def _offer(self, item: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


def epoch_order(refs: Sequence[SampleRef], seed: int, epoch: int) -> list[SampleRef]:
    """Training samples of an epoch in an order that depends on (seed, epoch, sample id) alone."""
    return sorted(refs, key=lambda ref: stable_hash(f"{seed}\0{epoch}\0{ref.sample_id}"))
