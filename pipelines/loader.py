"""From feature stores to micro-batches: the blocks of a step, and the rows that they read.

A rank reads the feature rows that its plan names and no others, and last hidden states where its own blocks
have labels, in a thread that runs ahead of the step by a bounded number of micro-batches.

Shape legend: L tokens of a sample, A blocks of this rank, B rows of a block, K = B - 1 predicted slots,
T context rows read, F feature width, U rows of last hidden states, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csbp.layout import BlockLayout
from csbp.ownership import visible_rows
from csbp.plan import StepPlan
from pipelines.anchors import Blocks, Tokens, build_blocks
from pipelines.corpus import Corpus, SampleRef
from pipelines.draw import AnchorConfig, draw_anchors
from pipelines.prefetch import Prefetcher
from pipelines.rejected import read_rejected
from pipelines.sampler import BatchConfig, Sampler

_MOVED = (
    "features", "anchor_ids", "labels", "supervised", "block_positions", "last_states", "state_rows"
)  # fmt: skip
_CPU = torch.device("cpu")
VALIDATION_EPOCH = "validation"  # names the random draw of held-out anchors: the same at every validation


@dataclass
class MicroBatch:
    """What one rank computes at once.

    Attributes:
        step: optimizer step, from 0.
        last: of the step's micro-batches.
        step_slots: supervised slots of this replica in the whole optimizer step, over all its context ranks.
        plan: this rank's share of the layout.
        features: [T, F], rows of `plan.rows` in the dtype of reading.
        row_positions: int64 [T], where the plan lives.
        anchor_ids: int64 [A]; labels: int64 [A, K]; supervised: bool [A, K]; block_positions: int64 [A, B].
        last_states: [U, D], the target's states before its final norm from which the labels of this rank's
            blocks were predicted; None if the objective does not compare with them.
        state_rows: int64 [A, K], the row of `last_states` for each supervised slot.
        documents, coverage_sum, tokens: of the replica's whole micro-batch.
        feature_bytes_read: read from the store by this rank for `features`.
        union_bytes: of all rows that the replica's blocks can see, each once.
        state_bytes_read: read from the store by this rank for `last_states`.
    """

    step: int
    last: bool
    step_slots: int
    plan: StepPlan
    features: Tensor
    row_positions: Tensor
    anchor_ids: Tensor
    labels: Tensor
    supervised: Tensor
    block_positions: Tensor
    last_states: Tensor | None
    state_rows: Tensor | None
    documents: int
    coverage_sum: float
    tokens: int
    feature_bytes_read: int
    union_bytes: int
    state_bytes_read: int

    @property
    def waiting_bytes(self) -> int:
        """What the batch holds while it waits for the step."""
        held = [getattr(self, name) for name in _MOVED]
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def pin(self) -> MicroBatch:
        """Copy to page-locked memory, from where a GPU fetches while it computes."""
        return self._each(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> MicroBatch:
        """Move the tensors; the plan has placed its own."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def taken(self, device: torch.device) -> MicroBatch:
        """The batch on `device`, for the current stream to use, whichever stream has brought it there."""
        self.to(device)
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            for name in _MOVED:
                if (tensor := getattr(self, name)) is not None:
                    tensor.record_stream(stream)  # its memory is not given away before the step is done
        return self

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        for name in _MOVED:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))
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
    """Micro-batches of a corpus for one rank.

    Args:
        corpus: where samples lie.
        batch: size of a step.
        sharding: this rank's part.
        anchors: which blocks a sample gives.
        block_size: B.
        seed: of the run.
        last_hidden: read last hidden states too.
        device: where a step is computed. For a GPU batches wait in page-locked memory, and with
            `data.upload_ahead` the next one is copied there beside the step.
    """

    def __init__(
        self,
        corpus: Corpus,
        batch: BatchConfig,
        sharding: Sharding,
        *,
        anchors: AnchorConfig,
        block_size: int,
        seed: int,
        last_hidden: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        self._corpus = corpus
        self._sharding = sharding
        self._anchors = anchors
        self._rejected = {} if anchors.rejected is None else read_rejected(anchors.rejected)
        self._block_size = block_size
        self._seed = seed
        self._last_hidden = last_hidden
        self._device = device
        self.sampler = Sampler(corpus.train, batch, self._measure(batch), seed)
        if batch.unit == "samples":
            batch.accumulation(sharding.replicas)  # refuse here, not in the reader's thread

    def train(self, first_step: int) -> Prefetcher[MicroBatch]:
        """Endless micro-batches from optimizer step `first_step` on, read ahead in a thread."""
        return self._ahead(self._train(first_step))

    def held_out(self, max_batches: int | None) -> Prefetcher[MicroBatch]:
        """Held-out micro-batches of this replica; their anchors are the same at every validation.

        Replicas yield equally many, the last ones possibly without a block, so that collectives agree.
        """
        replicas = self._sharding.replicas
        groups = self.sampler.groups(self._corpus.held_out, replicas)
        batches = -(-len(groups) // replicas)
        rounds = range(min(batches, max_batches or batches))
        own = [
            groups[at : at + 1] for at in (number * replicas + self._sharding.replica for number in rounds)
        ]
        return self._ahead(self._held_out([group[0] if group else [] for group in own]))

    def _ahead(self, batches: Iterator[MicroBatch]) -> Prefetcher[MicroBatch]:
        reader = Prefetcher(batches, self._corpus.config.prefetch)
        if self._device.type == "cuda" and self._corpus.config.upload_ahead:
            return Prefetcher(uploaded(reader, self._device), 1)
        return reader

    def _measure(self, batch: BatchConfig) -> Callable[[SampleRef], int]:
        if batch.unit == "tokens":
            return lambda ref: ref.tokens
        drafts = self._block_size - 1
        return lambda ref: drafts * sum(map(self._anchors.taken, ref.legal))

    def _train(self, step: int) -> Iterator[MicroBatch]:
        replica, replicas = self._sharding.replica, self._sharding.replicas
        while True:
            dealt = self.sampler.deal(self.sampler.step(step), replica, replicas)
            drawn = [self._draw([*picked]) for picked in dealt]
            slots = sum(item.blocks.slots for item in drawn)
            for number, item in enumerate(drawn, 1):
                yield self._read(item, step, slots, last=number == len(drawn))
            step += 1

    def _held_out(self, groups: Sequence[Sequence[SampleRef]]) -> Iterator[MicroBatch]:
        for group in groups:
            drawn = self._draw([(ref, VALIDATION_EPOCH) for ref in group])
            yield self._read(drawn, 0, drawn.blocks.slots, last=True)

    def _draw(self, picked: Sequence[tuple[SampleRef, int | str]]) -> _Drawn:
        """Without a sample, the first two tokens of some sample: the rank takes part without a block."""
        if not picked:
            refs = self._corpus.train[:1]
            tokens = [self._corpus.tokens(refs[0]).cut(2)]
            anchors = [torch.empty(0, dtype=torch.int64)]
        else:
            refs = [ref for ref, _ in picked]
            tokens = [self._corpus.tokens(ref) for ref in refs]
            anchors = [
                draw_anchors(
                    sample,
                    self._anchors,
                    self._block_size,
                    self._seed,
                    epoch,
                    self._rejected.get(sample.sample_id),
                )
                for sample, (_, epoch) in zip(tokens, picked, strict=True)
            ]
        return _Drawn(refs, tokens, build_blocks(tokens, anchors, self._block_size))

    def _read(self, drawn: _Drawn, step: int, step_slots: int, *, last: bool) -> MicroBatch:
        blocks = drawn.blocks
        plan = self._sharding.plan(blocks.layout)
        own = plan.own
        lengths = [sample.length for sample in drawn.tokens]
        features, bytes_read = self._corpus.rows(drawn.refs, lengths, plan.rows)
        states, state_rows = self._read_states(drawn, lengths, own)
        batch = MicroBatch(
            step=step,
            last=last,
            step_slots=step_slots,
            plan=plan,
            features=features,
            row_positions=plan.row_positions,
            anchor_ids=blocks.anchor_ids[own],
            labels=blocks.labels[own],
            supervised=blocks.supervised[own],
            block_positions=blocks.layout.positions[own][:, None] + torch.arange(self._block_size),
            last_states=states,
            state_rows=state_rows,
            documents=blocks.documents,
            coverage_sum=blocks.coverage_sum,
            tokens=blocks.layout.length,
            feature_bytes_read=bytes_read,
            union_bytes=len(visible_rows(blocks.layout, plan.seam.masks)) * self._corpus.row_bytes,
            state_bytes_read=0 if states is None else states.numel() * states.element_size(),
        )
        return batch.pin() if self._device.type == "cuda" else batch

    def _read_states(
        self, drawn: _Drawn, lengths: Sequence[int], own: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Slot j of a block at a is predicted from the target's state at a + j - 1; each is read once."""
        if not self._last_hidden:
            return None, None
        blocks = drawn.blocks
        at_AK = blocks.layout.anchors[own, None] + torch.arange(self._block_size - 1)
        supervised_AK = blocks.supervised[own]
        wanted_U = at_AK[supervised_AK].unique()
        rows_AK = torch.searchsorted(wanted_U, at_AK).masked_fill(~supervised_AK, 0)
        return self._corpus.last_states(drawn.refs, lengths, wanted_U), rows_AK


def uploaded(batches: Prefetcher[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Micro-batches whose copies to a GPU have ended, made on a stream of their own.

    To be run in a thread: it is the thread that waits for the copies, and the step finds them done.
    """
    stream = torch.cuda.Stream(device)
    try:
        for batch in batches:
            with torch.cuda.stream(stream):
                batch.to(device)
            stream.synchronize()
            yield batch
    finally:
        batches.close()
