"""Which samples an optimizer step takes, and which replica takes which of them at once.

Both are functions of (seed, step) and the data alone. The samples of a step do not depend on the number of
ranks, so the step number is the sampler's whole state and a run may go on with other ranks.

By number (`batch.samples`): the order of an epoch is a function of (seed, epoch, sample id), and step s takes
the samples s·G ... s·G + G - 1 of the endless sequence of epochs.

By size (`batch.tokens`, `batch.slots`): every epoch is packed into the same number of steps of about equal
size. Samples are put into buckets by the power of two below their size, shuffled in their bucket by (seed,
epoch), and given, largest bucket first, each to the step that holds least so far. So a step mixes long
samples with as many short ones as make up its size. A sample that fills a step alone is one. Steps are then
shuffled, since the first would hold the longest samples.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipelines.corpus import DataError, SampleRef, stable_hash

Unit = Literal["samples", "tokens", "slots"]
UNITS: tuple[Unit, ...] = ("samples", "tokens", "slots")
DEFAULT = {"samples": 4, "micro": 4}

Picked = tuple[SampleRef, int]  # a sample and its epoch


class BatchConfig(BaseModel):
    """Size of an optimizer step. Independent of the number of ranks, so that a run is too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int | None = Field(
        default=None, ge=1, description="Samples of one optimizer step over all replicas and micro-batches."
    )
    tokens: int | None = Field(
        default=None,
        ge=1,
        description="In place of `samples`: context tokens of one optimizer step. Long and short samples are "
        "mixed so that all steps are about equally large; a longer sample makes a step of its own.",
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        description="In place of `samples`: the same with slots to be predicted, anchors x (block_size - 1).",
    )
    micro: int | None = Field(
        default=None,
        ge=1,
        description="What one replica takes at once, in the unit of the step; the rest is accumulated. By "
        "default 4 samples, or all that a replica gets of a step of tokens or slots.",
    )

    @model_validator(mode="before")
    @classmethod
    def _in_samples_by_default(cls, given: Any) -> Any:
        if isinstance(given, dict) and all(given.get(unit) is None for unit in UNITS[1:]):
            return {**DEFAULT, **{key: value for key, value in given.items() if value is not None}}
        return given

    @model_validator(mode="after")
    def _one_size(self) -> BatchConfig:
        given = [unit for unit in UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of samples, tokens and slots; found {', '.join(given)}")
        return self

    @property
    def unit(self) -> Unit:
        return next(unit for unit in UNITS if getattr(self, unit) is not None)

    @property
    def size(self) -> int:
        """Of a step, in `unit`."""
        size: int = getattr(self, self.unit)
        return size

    def limit(self, replicas: int) -> int:
        """What a replica takes at once, in `unit`."""
        return self.micro or math.ceil(self.size / replicas)

    def accumulation(self, replicas: int) -> int:
        """Micro-batches of one replica in an optimizer step of a number of samples.

        Raises:
            DataError: the samples of a step do not divide over replicas and micro-batches.
        """
        micro = self.limit(replicas)
        count, rest = divmod(self.size, micro * replicas)
        if rest or not count:
            raise DataError(
                f"batch.samples = {self.samples} must be a multiple of batch.micro x replicas = "
                f"{micro} x {replicas}; change one of the three"
            )
        return count


class Sampler:
    """The steps of a run.

    Args:
        refs: training samples.
        batch: size of a step.
        measure: size of a sample in the batch's unit.
        seed: of the run.

    Attributes:
        steps_per_epoch: optimizer steps in which every sample is taken once; by number it may be broken.
    """

    def __init__(
        self, refs: Sequence[SampleRef], batch: BatchConfig, measure: Callable[[SampleRef], int], seed: int
    ) -> None:
        self._refs, self._batch, self._measure, self._seed = refs, batch, measure, seed
        self._by_number = batch.unit == "samples"
        # the reader may be in the next epoch already
        self._ordered, self._packed = lru_cache(2)(self._order_epoch), lru_cache(2)(self._pack_epoch)
        self.steps_per_epoch = len(refs) / batch.size if self._by_number else float(len(self._packed(0)))

    def step(self, number: int) -> list[Picked]:
        """Samples of optimizer step `number` (from 0), over all replicas."""
        if self._by_number:
            first = number * self._batch.size
            return [self._at(first + i) for i in range(self._batch.size)]
        epoch, index = divmod(number, int(self.steps_per_epoch))
        return [(ref, epoch) for ref in self._packed(epoch)[index]]

    def samples_before(self, number: int) -> int:
        """Samples of all steps before optimizer step `number`."""
        if self._by_number:
            return number * self._batch.size
        epoch, index = divmod(number, int(self.steps_per_epoch))
        return epoch * len(self._refs) + sum(map(len, self._packed(epoch)[:index]))

    def deal(self, picked: Sequence[Picked], replica: int, replicas: int) -> list[list[Picked]]:
        """What one replica takes of a step, micro-batch after micro-batch; equally many for every replica.

        By size, samples go, largest first, to the micro-batch that holds least, so that replicas have about
        equal work; a micro-batch may be empty if there are fewer samples than replicas.

        Raises:
            DataError: by number, the samples of a step do not divide over replicas and micro-batches.
        """
        if self._by_number:
            micro = self._batch.limit(replicas)
            rounds = range(self._batch.accumulation(replicas))
            firsts = [(number * replicas + replica) * micro for number in rounds]
            return [list(picked[first : first + micro]) for first in firsts]
        sizes = [self._measure(ref) for ref, _ in picked]
        groups = _balanced(sizes, replicas, self._batch.micro)
        return [[picked[i] for i in group] for group in groups[replica::replicas]]

    def groups(self, refs: Sequence[SampleRef], replicas: int) -> list[list[SampleRef]]:
        """All of `refs` in their order, cut into what a replica may take at once."""
        limit = self._batch.limit(replicas)
        groups: list[list[SampleRef]] = []
        room = 0
        for ref in refs:
            size = 1 if self._by_number else self._measure(ref)
            if size > room or not groups:
                groups.append([])
                room = limit
            groups[-1].append(ref)
            room -= size
        return groups

    def _at(self, position: int) -> Picked:
        """Sample at a place of the endless training sequence."""
        epoch, index = divmod(position, len(self._refs))
        return self._ordered(epoch)[index], epoch

    def _order_epoch(self, epoch: int) -> list[SampleRef]:
        return epoch_order(self._refs, self._seed, epoch)

    def _pack_epoch(self, epoch: int) -> list[list[SampleRef]]:
        """The samples of each step of an epoch."""
        order = epoch_order(self._refs, self._seed, epoch)
        steps = pack([self._measure(ref) for ref in order], self._batch.size)
        names = [stable_hash(f"{self._seed}\0{epoch}\0step\0{i}") for i in range(len(steps))]
        shuffled = sorted(range(len(steps)), key=names.__getitem__)
        return [[order[i] for i in steps[step]] for step in shuffled]


def epoch_order(refs: Sequence[SampleRef], seed: int, epoch: int) -> list[SampleRef]:
    """Training samples of an epoch in an order that depends on (seed, epoch, sample id) alone."""
    return sorted(refs, key=lambda ref: stable_hash(f"{seed}\0{epoch}\0{ref.sample_id}"))


def pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into `sizes` (shuffled), for each of a number of steps that depends on the set of sizes only.

    Sums of the steps are about `budget`; a size of at least `budget` has a step of its own.
    """
    alone = [[i] for i, size in enumerate(sizes) if size >= budget]
    rest = [i for i, size in enumerate(sizes) if size < budget]
    count = max(1, round(sum(sizes[i] for i in rest) / budget)) if rest else 0
    buckets = sorted(
        rest, key=lambda i: sizes[i].bit_length(), reverse=True
    )  # stable: the order stays inside
    return alone + _fill(buckets, sizes, count)


def _balanced(sizes: Sequence[int], replicas: int, limit: int | None) -> list[list[int]]:
    """A multiple of `replicas` groups of indices, larger ones first; none of several is above `limit`."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    rounds = 1 if limit is None else max(1, math.ceil(sum(sizes) / (limit * replicas)))
    while True:
        groups = _fill(order, sizes, rounds * replicas)
        sums = [sum(sizes[i] for i in group) for group in groups]
        if limit is None or all(len(g) <= 1 or total <= limit for g, total in zip(groups, sums, strict=True)):
            heavy = sorted(range(len(groups)), key=lambda g: -sums[g])
            return [sorted(groups[g]) for g in heavy]
        rounds += 1


def _fill(order: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """Give the indices one after the other to the lightest of `count` groups."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, group) for group in range(count)]
    for i in order:
        load, group = loads[0]
        groups[group].append(i)
        heapq.heapreplace(loads, (load + sizes[i], group))
    return groups
