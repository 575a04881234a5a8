"""From an ownership to one rank's routes: sizes, indices and key ranges that each transport works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from csbp.exchange import ExchangeRoute
from csbp.layout import BlockLayout
from csbp.local import LocalRoute
from csbp.ownership import Ownership
from csbp.query_ring import QueryRingRoute
from csbp.ring import RingRoute
from csbp.rows import RowSet
from csbp.tiles import KeyRanges
from csbp.transport import Route
from csbp.upload import upload
from csbp.visibility import key_ranges, seen
from drafter.attention import LayerMask

Transport = Literal["local", "halo", "gather", "ring", "query-ring"]


@dataclass(frozen=True)
class RouteBuilder:
    """Builds the routes of rank `me`.

    Attributes:
        layout: the blocks of the replica.
        ownership: who owns what.
        me: the context rank whose routes are built.
        retain: shards that a ring keeps for its backward pass.
        compact: leave out the rows that no block sees. Baselines may not know better than to project them.
        carry_blocks: rings carry block K/V too.
        device: where index tensors live.
    """

    layout: BlockLayout
    ownership: Ownership
    me: int
    retain: int
    compact: bool = True
    carry_blocks: bool = False
    device: torch.device | str = "cpu"

    def projected(self, rank: int, mask: LayerMask, transport: Transport) -> RowSet:
        """Context rows that `rank` projects in a layer."""
        if not self.compact:
            return self.ownership.shards[rank]
        if transport == "local":
            return seen(self.layout, mask, self.ownership.blocks[rank])
        return self.ownership.shards[rank].intersection(seen(self.layout, mask))

    def route(self, mask: LayerMask, transport: Transport) -> Route:
        if transport == "local":
            return LocalRoute(self._ranges(mask, self.me, self.projected(self.me, mask, transport)))
        if transport == "ring":
            return self._ring(mask)
        if transport == "query-ring":
            return self._query_ring(mask)
        return self._exchange(mask, transport)

    def _ring(self, mask: LayerMask) -> RingRoute:
        shards = [self.projected(rank, mask, "ring") for rank in self._everyone]
        block_rows = tuple(b.numel() * self.layout.block_size for b in self.ownership.blocks)
        return RingRoute(
            tuple(len(shard) for shard in shards),
            tuple(self._ranges(mask, self.me, shard) for shard in shards),
            min(self.retain, len(shards) - 1),
            block_rows if self.carry_blocks else None,
        )

    def _query_ring(self, mask: LayerMask) -> QueryRingRoute:
        mine = self.projected(self.me, mask, "query-ring")
        return QueryRingRoute(
            tuple(blocks.numel() for blocks in self.ownership.blocks),
            tuple(self._ranges(mask, rank, mine) for rank in self._everyone),
        )

    def _exchange(self, mask: LayerMask, transport: Transport) -> ExchangeRoute:
        mine = self.projected(self.me, mask, transport)
        lent, borrowed, ranges = [], [], []
        for peer in self._everyone:
            lends = self._borrowed(mask, lender=self.me, borrower=peer)
            borrows = mine if peer == self.me else self._borrowed(mask, lender=peer, borrower=self.me)
            lent.append(
                self._nothing if peer == self.me else upload(mine.rank_of(lends.indices()), self.device)
            )
            borrowed.append(0 if peer == self.me else len(borrows))
            ranges.append(self._ranges(mask, self.me, borrows))
        return ExchangeRoute(tuple(lent), tuple(borrowed), tuple(ranges))

    def _borrowed(self, mask: LayerMask, lender: int, borrower: int) -> RowSet:
        reached = seen(self.layout, mask, self.ownership.blocks[borrower])
        return self.ownership.shards[lender].intersection(reached)

    def _ranges(self, mask: LayerMask, rank: int, rows: RowSet) -> KeyRanges:
        return key_ranges(self.layout, mask, self.ownership.blocks[rank], rows, self.device)

    @property
    def _everyone(self) -> range:
        return range(len(self.ownership.shards))

    @property
    def _nothing(self) -> Tensor:
        return torch.zeros(0, dtype=torch.int64, device=self.device)
