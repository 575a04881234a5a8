"""What one of P context ranks holds, projects and sends: expected rows, pairs and bytes per layer.

The numbers are those of the most loaded rank, because it sets the step's time and has to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from csbp.cost import DrafterShape, Workload, mean_visible, union_rows

Placement = Literal["dealt", "contiguous"]
ACCUMULATOR_BYTES = 4  # outputs, log-sum-exps and key/value gradients travel in float32


@dataclass(frozen=True)
class LayerShare:
    """One layer on one rank.

    Attributes:
        transport: how context keys and values reach the blocks: `local` (they are here already, also when
            every rank projects its own windows again), `halo`, `gather`, `ring` or `query-ring`.
        own_rows: context rows that the rank projects.
        received_rows: context rows of other ranks that it holds at once, in the largest moment of the layer.
        pairs: (query row, key) pairs, own blocks included.
        forward_bytes, backward_bytes: sent by the rank.
    """

    transport: str
    own_rows: float
    received_rows: float
    pairs: float
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0


@dataclass(frozen=True)
class RankShare:
    """One rank of a replica.

    Attributes:
        placement: how blocks and context rows are dealt out.
        blocks: blocks of the rank.
        feature_rows: context rows whose features the rank reads and fuses.
        layers: one entry per layer.
    """

    placement: Placement
    blocks: int
    feature_rows: float
    layers: tuple[LayerShare, ...]

    @property
    def sent_bytes(self) -> float:
        """Context bytes that the rank sends in one step, forward and backward."""
        return sum(layer.forward_bytes + layer.backward_bytes for layer in self.layers)


def placements(shape: DrafterShape, work: Workload, ranks: int) -> tuple[Placement, ...]:
    """Placements worth comparing.

    Windowed layers gain from neighbours on one rank. With a full layer the context is cut where the anchors
    are cut, which would give one rank nearly all rows if the anchors sat in one neighbourhood.
    """
    if ranks == 1 or all(mask.window is not None for mask in shape.masks):
        return ("contiguous",)
    if all(mask.window is None for mask in shape.masks) or work.anchor_rule == "locality":
        return ("dealt",)
    return ("dealt", "contiguous")


def rank_share(
    shape: DrafterShape, work: Workload, ranks: int, placement: Placement, *, wire_bytes: int
) -> RankShare:
    """The most loaded rank.

    Args:
        shape: the drafter.
        work: the replica's micro-step.
        ranks: P.
        placement: one of `placements`.
        wire_bytes: bytes of a key, value or query element on the wire.
    """
    return _Replica(shape, work, ranks, placement, wire_bytes).share()


@dataclass(frozen=True)
class _Replica:
    shape: DrafterShape
    work: Workload
    ranks: int
    placement: Placement
    wire_bytes: int

    def share(self) -> RankShare:
        layers = tuple(self._layer(index) for index in range(self.shape.layers))
        feature_rows = self._shard_rows if self._any_full else max(layer.own_rows for layer in layers)
        return RankShare(self.placement, math.ceil(self.work.blocks * self._shard), feature_rows, layers)

    @property
    def _any_full(self) -> bool:
        return any(mask.window is None for mask in self.shape.masks)

    @property
    def _shard(self) -> float:
        """Largest share of the blocks, and of the axis where a full layer needs all of it."""
        if self._any_full and self.placement == "contiguous" and self.ranks > 1:
            return _largest_share(self.shape, self.work, self.ranks)
        return 1 / self.ranks

    @property
    def _shard_rows(self) -> float:
        return self.work.rows * self._shard

    def _layer(self, index: int) -> LayerShare:
        window, ranks = self.shape.masks[index].window, self.ranks
        union = union_rows(self.work, window, self.shape.block_size)
        pairs = layer_pairs(self.shape, self.work, index) / ranks
        if ranks == 1:
            return LayerShare("local", union, 0.0, pairs)
        if window is None:
            return self._full_layer(pairs)
        if not self._any_full:
            own = min(union / ranks + window - 1, math.ceil(self.work.blocks / ranks) * (window - 1), union)
            return LayerShare("local", own, 0.0, pairs)
        if self.placement == "contiguous":
            halo = min(window - 1, union)
            return LayerShare("halo", min(union, self._shard_rows), halo, pairs, *self._row_bytes(halo))
        remote = union * (ranks - 1) / ranks
        return LayerShare("gather", union / ranks, remote, pairs, *self._row_bytes(remote))

    def _row_bytes(self, rows: float) -> tuple[float, float]:
        """Bytes of keys and values forward and of their gradients backward."""
        elements = rows * 2 * self.shape.kv_width
        return elements * self.wire_bytes, elements * ACCUMULATOR_BYTES

    def _full_layer(self, pairs: float) -> LayerShare:
        """A ring of key/value shards, or of queries where those are smaller (few blocks, long context)."""
        shape, work, hops = self.shape, self.work, self.ranks - 1
        forward, gradients = self._row_bytes(work.rows / self.ranks * hops)
        ring = forward, forward + gradients
        queries = work.blocks / self.ranks * shape.block_size * shape.query_width * hops
        statistics = 1 / shape.head_size  # one log-sum-exp for the elements of one head
        query_ring = (
            queries * (self.wire_bytes + (1 + statistics) * ACCUMULATOR_BYTES),
            queries * (2 * self.wire_bytes + (1 + 2 * statistics) * ACCUMULATOR_BYTES),
        )
        if sum(query_ring) < sum(ring):
            return LayerShare("query-ring", self._shard_rows, 0.0, pairs, *query_ring)
        return LayerShare("ring", self._shard_rows, self._shard_rows, pairs, *ring)


def layer_pairs(shape: DrafterShape, work: Workload, index: int) -> float:
    """(query row, key) pairs of one layer over all blocks of the micro-step.

    The window moves along the block, so slot j sees j context rows fewer than the anchor, and sees its block.
    """
    mask, rows = shape.masks[index], shape.block_size
    visible = mean_visible(work, mask.window)
    if mask.window is not None and mask.window < work.context:
        visible = max(0.0, visible - (rows - 1) / 2)
    own = (rows + 1) / 2 if mask.causal else rows
    return work.blocks * rows * (visible + own)


def _largest_share(shape: DrafterShape, work: Workload, ranks: int) -> float:
    """Share of the axis (and of the uniform anchors) of the rank whose blocks are cheapest, under equal cost.

    A block at position x L costs 1 + s x, where s is the cost of the pairs of its full layers at the end of
    the axis over the rest of its cost. The first of P ranks of equal cost then ends at the root of
    x + s x^2 / 2 = (1 + s / 2) / P.
    """
    slope = _full_cost_ratio(shape, work)
    target = (1 + slope / 2) / ranks
    return 2 * target / (1 + math.sqrt(1 + 2 * slope * target))


def _full_cost_ratio(shape: DrafterShape, work: Workload) -> float:
    full = sum(mask.window is None for mask in shape.masks)
    layer = 2 * shape.query_width + 2 * shape.kv_width + 3 * shape.intermediate + 2 * shape.conv_coefficients
    fixed = 6.0 * shape.block_size * shape.hidden * layer * shape.layers
    fixed += 4 * shape.supervised_slots * shape.hidden * shape.vocabulary
    pair = 14 * shape.query_width * shape.block_size
    windowed = sum(mask.window for mask in shape.masks if mask.window is not None)
    return pair * full * work.context / (fixed + pair * windowed)
