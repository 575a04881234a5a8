"""Which placement and transports a step takes: every sensible combination is priced, the cheapest wins.

The price is the time of the busiest rank in operations, plus its bytes times `StepCost.byte`. All ranks price
the same combinations with the same numbers, so they choose alike without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor

from csbp.layout import BlockLayout
from csbp.ownership import Ownership, StepCost, contiguous, dealt
from csbp.routes import RouteBuilder, Transport
from csbp.rows import RowSet
from csbp.visibility import first_visible, seen
from drafter.attention import LayerMask

Placement = Literal["dealt", "contiguous"]


@dataclass(frozen=True)
class Choice:
    placement: str
    transports: tuple[Transport, ...]
    ownership: Ownership


def choose(
    layout: BlockLayout,
    masks: Sequence[LayerMask],
    ranks: int,
    cost: StepCost,
    placement: Placement | Literal["auto"],
    asked: Sequence[Transport | Literal["auto"]],
) -> Choice:
    """The cheapest combination that respects `placement` and the transports `asked` for, per layer."""
    found = list(_candidates(layout, masks, ranks, cost, placement, asked))
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda choice: price(layout, masks, cost, choice))


def _candidates(
    layout: BlockLayout,
    masks: Sequence[LayerMask],
    ranks: int,
    cost: StepCost,
    placement: Placement | Literal["auto"],
    asked: Sequence[Transport | Literal["auto"]],
) -> Iterator[Choice]:
    names: tuple[str, ...] = get_args(Placement) if placement == "auto" else (placement,)
    if placement == "auto":
        names = (
            tuple(n for n, avoid in (("dealt", "halo"), ("contiguous", "gather")) if avoid not in asked)
            or names
        )
    for name in names:
        # Layers with one mask take one transport unless asked otherwise: nothing distinguishes them.
        kinds = list(dict.fromkeys(zip(masks, asked, strict=True)))
        for picked in product(*(_options(name, mask, ask, ranks) for mask, ask in kinds)):
            pick = dict(zip(kinds, picked, strict=True))
            transports = tuple(pick[kind] for kind in zip(masks, asked, strict=True))
            if name == "dealt":
                ownership = dealt(layout, masks, ranks, cost)
            else:
                reread = {m for m, t in zip(masks, transports, strict=True) if t == "local"}
                ownership = contiguous(layout, masks, ranks, cost, reread)
            yield Choice(name, transports, ownership)


def _options(
    placement: str, mask: LayerMask, asked: Transport | Literal["auto"], ranks: int
) -> tuple[Transport, ...]:
    if asked != "auto":
        return (asked,)
    if ranks == 1:
        return ("local",)
    if mask.window is None:
        return ("ring", "query-ring")
    return ("gather", "local") if placement == "dealt" else ("halo", "local")


def price(layout: BlockLayout, masks: Sequence[LayerMask], cost: StepCost, choice: Choice) -> float:
    """Operations of the busiest rank, its bytes included. A ring waits for the slowest rank at every step."""
    ownership = choice.ownership
    ranks = len(ownership.shards)
    builder = RouteBuilder(layout, ownership, me=0, retain=ranks - 1)
    work = torch.tensor([cost.block * b.numel() for b in ownership.blocks], dtype=torch.float64)
    rows = [RowSet.of([]) for _ in range(ranks)]
    lockstep = 0.0
    for (mask, transport), layers in Counter(zip(masks, choice.transports, strict=True)).items():
        projected = [builder.projected(rank, mask, transport) for rank in range(ranks)]
        rows = [a.union(b) for a, b in zip(rows, projected, strict=True)]
        work += layers * cost.projection * torch.tensor([len(p) for p in projected], dtype=torch.float64)
        pairs = layers * cost.pair * _pairs(layout, mask, ownership, transport)
        if transport in ("ring", "query-ring"):
            rank = torch.arange(ranks)
            lockstep += sum(float(pairs[rank, (rank - step) % ranks].max()) for step in range(ranks))
        else:
            work += pairs.sum(1)
        work += layers * cost.byte * _bytes(layout, mask, cost, ownership, projected, transport)
    work += cost.row * torch.tensor([len(r) for r in rows], dtype=torch.float64)
    return float(work.max()) + lockstep


def _pairs(
    layout: BlockLayout,
    mask: LayerMask,
    ownership: Ownership,
    transport: Transport,
) -> Tensor:
    """float64 [P, P]: (block, row) pairs of rank r's blocks with the rows of rank o."""
    lo, hi = first_visible(layout, mask)[:, 0], layout.anchors
    if transport == "local":
        return torch.diag(torch.stack([(hi - lo)[b].sum() for b in ownership.blocks]).double())
    shards = ownership.shards
    visible = torch.stack([shard.rank_of(hi) - shard.rank_of(lo) for shard in shards], -1).double()
    return torch.stack([visible[b].sum(0) for b in ownership.blocks])


def _bytes(
    layout: BlockLayout,
    mask: LayerMask,
    cost: StepCost,
    ownership: Ownership,
    projected: Sequence[RowSet],
    transport: Transport,
) -> Tensor:
    """float64 [P]: bytes that each rank sends in one layer, forward and backward."""
    ranks = len(projected)
    if transport == "local" or ranks == 1:
        return torch.zeros(ranks, dtype=torch.float64)
    sizes = torch.tensor([len(p) for p in projected], dtype=torch.float64)
    if transport == "ring":
        return cost.row_bytes * (2 * sizes.sum() - sizes - sizes.roll(-1))
    if transport == "query-ring":
        return torch.full_like(sizes, 4 * cost.query_bytes * layout.anchors.numel() * (ranks - 1) / ranks)
    reached = [seen(layout, mask, blocks) for blocks in ownership.blocks]
    moved = torch.tensor(
        [
            [0 if p == q else shard.overlap(reach) for q, reach in enumerate(reached)]
            for p, shard in enumerate(ownership.shards)
        ],
        dtype=torch.float64,
    )
    return cost.row_bytes * (moved.sum(0) + moved.sum(1))
