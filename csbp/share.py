"""What each of P context ranks holds, projects and sends in a step, before there is any data.

Anchors are drawn once by the rule that training will use, and `csbp.choice` deals them out exactly as a
training step does, so the plan and the run cannot disagree about placement, transports or rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from csbp.choice import Choice, Placement, choose
from csbp.cost import DrafterShape, ShapeError, Workload
from csbp.layout import BlockLayout
from csbp.ownership import StepCost
from csbp.routes import RouteBuilder, Transport
from csbp.rows import RowSet
from csbp.visibility import first_visible, seen
from drafter.attention import LayerMask

ACCUMULATOR_BYTES = 4  # partial outputs, their statistics and key/value gradients travel in float32


@dataclass(frozen=True)
class LayerShare:
    """One layer on one rank.

    Attributes:
        transport: how context keys and values reach the blocks.
        own_rows: context rows that the rank projects.
        kept_bytes: received keys and values, or queries, that wait for the backward pass.
        moving_bytes: the largest messages in flight with what is made of them, in the backward pass.
        pairs: (query row, key) pairs of the rank's blocks, own blocks included.
        forward_bytes, backward_bytes: sent by the rank.
    """

    transport: str
    own_rows: int
    kept_bytes: int
    moving_bytes: int
    pairs: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class RankShare:
    """One rank of a replica.

    Attributes:
        blocks: blocks of the rank. feature_rows: context rows whose features the rank reads and fuses.
        layers: one entry per layer. selections: rows of each group of layers that projects only a part of
        the rank's rows; they are copied.
    """

    blocks: int
    feature_rows: int
    layers: tuple[LayerShare, ...]
    selections: tuple[int, ...]

    @property
    def sent_bytes(self) -> int:
        """Context bytes that the rank sends in one step, forward and backward."""
        return sum(layer.forward_bytes + layer.backward_bytes for layer in self.layers)


@dataclass(frozen=True)
class ReplicaShare:
    """The ranks of a replica under one choice of placement and transports."""

    placement: str
    transports: tuple[str, ...]
    ranks: tuple[RankShare, ...]


def draw_layout(work: Workload, block_size: int) -> BlockLayout:
    """One draw of the anchors of a micro-step; every token but a sequence's first may be an anchor.

    One neighbourhood stands in the middle of its sequence, where a full layer sees the mean context; several
    stand in the middles of equal parts of it.
    """
    generator = torch.Generator().manual_seed(0)
    anchors = []
    for _ in range(work.sequences):
        if work.anchor_rule == "uniform":
            drawn = 1 + torch.randperm(work.context - 1, generator=generator)[: work.anchors].sort().values
        else:
            drawn = _neighbourhoods(work, block_size)
        anchors.append(drawn)
    starts = work.context * torch.arange(work.sequences).repeat_interleave(work.anchors)
    return BlockLayout(torch.cat(anchors) + starts, starts, work.rows, block_size)


def _neighbourhoods(work: Workload, block_size: int) -> Tensor:
    """Anchors of one sequence: runs of one block distance, each in the middle of its part of the sequence."""
    part = (work.context - 1) // work.neighbourhoods
    runs = []
    for number, run in enumerate(torch.arange(work.anchors).tensor_split(work.neighbourhoods)):
        distance = max(1, min(block_size, part // len(run)))
        first = 1 + number * part + (part - distance * (len(run) - 1) - 1) // 2
        runs.append(first + distance * torch.arange(len(run)))
    return torch.cat(runs)


# a plan asks again for other ZeRO stages and worlds, which change nothing here
@functools.lru_cache(maxsize=256)
def replica_share(
    shape: DrafterShape,
    work: Workload,
    ranks: int,
    cost: StepCost,
    *,
    wire_bytes: int,
    retain: int | None,
    placement: Placement | Literal["auto"] = "auto",
    transports: tuple[Transport | Literal["auto"], ...] = ("auto",),
) -> ReplicaShare:
    """Deal a drawn micro-step to P ranks.

    Args:
        shape: the drafter.
        work: the replica's micro-step.
        ranks: P.
        cost: what `csbp.choice` goes by.
        wire_bytes: bytes of a key, value or query element on the wire.
        retain: received shards that a ring keeps, as in `csbp.plan.plan_step`.
        placement: as asked for.
        transports: as asked for; one stands for all layers.

    Raises:
        ShapeError: transports are neither one nor one a layer.
    """
    if len(transports) not in (1, shape.layers):
        raise ShapeError(
            f"expected one transport, or one for each of {shape.layers} layers, found {len(transports)}"
        )
    layout = draw_layout(work, shape.block_size)
    asked = transports * shape.layers if len(transports) == 1 else transports
    choice = choose(layout, shape.masks, ranks, cost, placement, asked)
    kinds = tuple(zip(shape.masks, choice.transports, strict=True))
    builder = RouteBuilder(layout, choice.ownership, me=0, retain=ranks)
    projected = {kind: [builder.projected(rank, *kind) for rank in range(ranks)] for kind in set(kinds)}
    layers = {
        kind: _Kind(
            shape, layout, choice, kind[0], wire_bytes, ranks if retain is None else max(1, retain)
        ).shares(kind[1], [len(rows) for rows in parts])
        for kind, parts in projected.items()
    }
    shares = []
    for rank in range(ranks):
        read = len(functools.reduce(RowSet.union, (parts[rank] for parts in projected.values())))
        sizes = [len(parts[rank]) for parts in projected.values()]
        shares.append(
            RankShare(
                blocks=choice.ownership.blocks[rank].numel(),
                feature_rows=read,
                layers=tuple(layers[kind][rank] for kind in kinds),
                selections=tuple(size for size in sizes if size != read),
            )
        )
    return ReplicaShare(choice.placement, tuple(choice.transports), tuple(shares))


@dataclass(frozen=True)
class _Kind:
    """All layers with one mask and one transport."""

    shape: DrafterShape
    layout: BlockLayout
    choice: Choice
    mask: LayerMask
    wire_bytes: int
    retain: int

    @property
    def ranks(self) -> int:
        return len(self.choice.ownership.shards)

    def shares(self, transport: str, sizes: Sequence[int]) -> list[LayerShare]:
        """One share per rank, of which rank r projects `sizes[r]` rows."""
        if transport == "local" or self.ranks == 1:
            moved = [(0, 0, 0, 0)] * self.ranks
        elif transport == "ring":
            moved = [self._ring(rank, sizes) for rank in range(self.ranks)]
        elif transport == "query-ring":
            moved = [self._query_ring(rank, sizes[rank]) for rank in range(self.ranks)]
        else:
            moved = self._exchange()
        pairs = [_pairs(self.layout, self.mask, blocks) for blocks in self.choice.ownership.blocks]
        return [
            LayerShare(transport, size, kept, moving, count, forward, backward)
            for size, count, (kept, moving, forward, backward) in zip(sizes, pairs, moved, strict=True)
        ]

    def _rows(self, rows: int, element_bytes: int) -> int:
        """Bytes of the keys and values (or their gradients) of some rows."""
        return rows * 2 * self.shape.kv_width * element_bytes

    def _ring(self, rank: int, sizes: Sequence[int]) -> tuple[int, int, int, int]:
        """Forward every shard but the right neighbour's is passed on; backward those that were not kept, and
        the sums of all shards but the own.
        """
        ranks, retain = self.ranks, min(self.retain, self.ranks - 1)
        received = [sizes[(rank - step) % ranks] for step in range(1, ranks)]
        kept = self._rows(sum(received[:retain]), self.wire_bytes)
        forward = self._rows(sum(sizes) - sizes[(rank + 1) % ranks], self.wire_bytes)
        again = sum(([sizes[rank], *received])[retain : ranks - 1])
        backward = self._rows(again, self.wire_bytes) + self._rows(sum(received), ACCUMULATOR_BYTES)
        largest = max(sizes)
        # a shard's gradients, their stacked copy, the sums that leave and those that arrive
        moving = 4 * self._rows(largest, ACCUMULATOR_BYTES) + 2 * self._rows(largest, self.wire_bytes)
        return kept, moving, forward, backward

    def _query_ring(self, rank: int, size: int) -> tuple[int, int, int, int]:
        """Queries go around once; numerators with two statistics follow. Backward the output gradient goes
        around with two statistics, and the query gradient follows, while the shard's own gradients of two
        visitors are added up.
        """
        rows = [blocks.numel() * self.layout.block_size for blocks in self.choice.ownership.blocks]
        others = sum(rows) - rows[rank]
        width, heads = self.shape.query_width, self.shape.heads
        visitor = (width + 2 * heads) * ACCUMULATOR_BYTES
        forward = others * (width * self.wire_bytes + visitor)
        backward = others * (visitor + width * ACCUMULATOR_BYTES)
        moving = 5 * max(rows) * visitor + self._rows(size, ACCUMULATOR_BYTES)
        return others * width * self.wire_bytes, moving, forward, backward

    def _exchange(self) -> list[tuple[int, int, int, int]]:
        """Rows that others' windows reach are lent, and their gradients come home."""
        ownership, ranks = self.choice.ownership, range(self.ranks)
        reach = [seen(self.layout, self.mask, blocks) for blocks in ownership.blocks]
        table = [
            [0 if p == q else len(ownership.shards[p].intersection(reach[q])) for q in ranks] for p in ranks
        ]
        moved = []
        for rank in ranks:
            lent, borrowed = sum(table[rank]), sum(row[rank] for row in table)
            moving = 2 * self._rows(borrowed, ACCUMULATOR_BYTES) + self._rows(lent, ACCUMULATOR_BYTES)
            forward, kept = self._rows(lent, self.wire_bytes), self._rows(borrowed, self.wire_bytes)
            moved.append((kept, moving, forward, self._rows(borrowed, ACCUMULATOR_BYTES)))
        return moved


def _pairs(layout: BlockLayout, mask: LayerMask, blocks: Tensor) -> int:
    """(query row, key) pairs of some blocks in one layer: visible context rows, and the own block."""
    context = int((layout.anchors[blocks, None] - first_visible(layout, mask)[blocks]).sum())
    rows = layout.block_size
    slots = torch.arange(rows)
    ahead = slots[None, :] - slots[:, None]
    visible = ahead <= 0 if mask.causal else torch.ones_like(ahead, dtype=torch.bool)
    if mask.window is not None:
        visible &= ahead.abs() < mask.window
    return context + blocks.numel() * int(visible.sum())
