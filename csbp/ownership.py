"""Who owns what: blocks and context rows dealt to the context ranks of one replica.

Every rank computes the same ownership of every rank from the layout alone, so nothing has to be agreed upon.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from csbp.layout import BlockLayout
from csbp.rows import RowSet
from csbp.visibility import first_visible, seen
from drafter.attention import LayerMask


@dataclass(frozen=True)
class StepCost:
    """What the parts of a step cost, in floating-point operations forward and backward.

    Only ratios matter to ownership. The defaults are those of a two-layer drafter for a 0.1-B target (D =
    576, V = 49,152, block 8) in fp32; `from_shape` computes them for any drafter.

    Attributes:
        block: projections, MLP and vocabulary loss of one block.
        pair: one block's attention to one context row in one layer.
        row: reading and fusing one context row's features.
        projection: projecting one context row to one layer's keys and values.
        row_bytes: keys and values of one context row in one layer on the wire.
        query_bytes: queries of one block on the wire.
        byte: operations that a rank does in the time of sending one byte.
    """

    block: float = 1.1e9
    pair: float = 6.5e4
    row: float = 6.6e6
    projection: float = 1.3e6
    row_bytes: float = 1536.0
    query_bytes: float = 18432.0
    byte: float = 100.0

    @classmethod
    def from_shape(
        cls,
        *,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        features: int,
        vocabulary: int,
        layers: int,
        block_size: int,
        wire_bytes: int = 4,
        byte: float = 100.0,
    ) -> StepCost:
        """Count matrix products: 2 operations a multiply-add, three products a trained weight and step.

        The frozen head costs two (logits and the gradient of the hidden state, made together), the fusion two
        (its input has no gradient), a score seven of size E (two forward, five backward).
        """
        width, kv_width = heads * head_dim, kv_heads * head_dim
        layer = 2 * hidden * width + 2 * hidden * kv_width + 3 * hidden * intermediate
        return cls(
            block=6.0 * block_size * layers * layer + 4.0 * (block_size - 1) * vocabulary * hidden,
            pair=14.0 * block_size * width,
            row=4.0 * features * hidden,
            projection=6.0 * hidden * 2 * kv_width,
            row_bytes=2.0 * kv_width * wire_bytes,
            query_bytes=float(block_size * width * wire_bytes),
            byte=byte,
        )


@dataclass(frozen=True)
class Ownership:
    """Attributes:
    blocks: per context rank, int64 ascending indices into the layout.
    shards: per context rank, the context rows it owns: it fuses, projects and lends them.
    """

    blocks: tuple[Tensor, ...]
    shards: tuple[RowSet, ...]


def visible_rows(layout: BlockLayout, masks: Sequence[LayerMask]) -> RowSet:
    """Rows that some block sees in some layer; the others are neither projected nor sent."""
    rows = RowSet.of([])
    for mask in set(masks):
        rows = rows.union(seen(layout, mask))
    return rows


def block_costs(layout: BlockLayout, masks: Sequence[LayerMask], cost: StepCost) -> Tensor:
    """float64 [A]: t_block + t_pair · sum over layers of min(a - start, W_layer)."""
    pairs = torch.zeros(layout.anchors.numel(), dtype=torch.float64)
    for mask in masks:
        pairs += layout.anchors - first_visible(layout, mask)[:, 0]
    return cost.block + cost.pair * pairs


def dealt(layout: BlockLayout, masks: Sequence[LayerMask], ranks: int, cost: StepCost) -> Ownership:
    """Pair heavy blocks with light ones and deal the pairs; two chunks of the visible rows per rank.

    Rank r owns chunks r and 2P - 1 - r of 2P equal ones (arXiv 2609.19242), so that each step of a ring is
    about equally heavy for all ranks.
    """
    costs = block_costs(layout, masks, cost)
    order = torch.argsort(costs, descending=True, stable=True).tolist()
    hands: list[list[int]] = [[] for _ in range(ranks)]
    pairs = len(order) // (2 * ranks) * ranks
    for i in range(pairs):
        turn = i % (2 * ranks)
        hands[min(turn, 2 * ranks - 1 - turn)] += [order[i], order[-1 - i]]
    loads = [float(costs[hand].sum()) for hand in hands]
    for block in order[pairs : len(order) - pairs]:
        rank = min(range(ranks), key=lambda r: (len(hands[r]), loads[r]))
        hands[rank].append(block)
        loads[rank] += float(costs[block])
    return Ownership(
        tuple(torch.tensor(sorted(hand), dtype=torch.int64) for hand in hands),
        zigzag(visible_rows(layout, masks), ranks),
    )


def zigzag(rows: RowSet, ranks: int) -> tuple[RowSet, ...]:
    """Chunks r and 2P - 1 - r of 2P nearly equal chunks of `rows`."""
    edges = [len(rows) * i // (2 * ranks) for i in range(2 * ranks + 1)]
    chunks = [rows.members(lo, hi) for lo, hi in pairwise(edges)]
    return tuple(chunks[r].union(chunks[2 * ranks - 1 - r]) for r in range(ranks))


def contiguous(
    layout: BlockLayout,
    masks: Sequence[LayerMask],
    ranks: int,
    cost: StepCost,
    reread: Collection[LayerMask] = (),
) -> Ownership:
    """Cut the ascending anchors into runs of equal total cost, and the visible rows at each run's first
    anchor.

    A run's cost counts its blocks, the rows from its first anchor to the next run's, and for the masks of
    `reread` the rows before its first anchor that its rank fuses and projects once more.
    """
    rows = visible_rows(layout, masks)
    per_row = cost.row + cost.projection * len(masks)
    at = rows.rank_of(layout.anchors)
    before = torch.cat([at, torch.tensor([len(rows)])])
    before[0] = 0
    totals = torch.zeros(before.numel(), dtype=torch.float64)
    torch.cumsum(block_costs(layout, masks, cost), 0, out=totals[1:])
    totals += per_row * before
    again = torch.zeros_like(at)
    for mask in reread:
        again = torch.maximum(again, at - rows.rank_of(first_visible(layout, mask)[:, 0]))
    runs = _cut(totals.tolist(), (per_row * again).tolist(), ranks)
    edges = [0, *(int(before[last]) for _, last in runs[:-1]), len(rows)]
    return Ownership(
        tuple(torch.arange(first, last) for first, last in runs),
        tuple(rows.members(lo, hi) for lo, hi in pairwise(edges)),
    )


def _cut(totals: list[float], extra: list[float], ranks: int) -> list[tuple[int, int]]:
    """Runs [first, last) whose costliest, totals[last] - totals[first] + extra[first], is least."""

    def runs_within(limit: float) -> list[tuple[int, int]]:
        runs, first = [], 0
        for rank in range(ranks):
            room = totals[first] + limit - (extra[first] if first < len(extra) and rank else 0.0)
            last = max(first, bisect_right(totals, room) - 1)
            runs.append((first, last))
            first = last
        return runs

    low, high = 0.0, totals[-1] + max(extra, default=0.0)
    for _ in range(60):
        middle = (low + high) / 2
        if runs_within(middle)[-1][1] == len(extra):
            high = middle
        else:
            low = middle
    return runs_within(high)
