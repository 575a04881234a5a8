"""Exchange: every rank sends every other the context rows that the other's windows reach, and nothing else.

Under dealt blocks a rank's windows reach nearly the union of all windows (a *gather*); under contiguous ones
they reach the W - 1 rows before its first anchor, however many neighbours' shards these span (a *halo*). The
wire is the same. Rows travel while the own block and the own rows are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from csbp.attention import SoftmaxState, Upstream, accumulator
from csbp.tiles import KeyRanges
from csbp.transport import BlockRows, Gradients, Wire


@dataclass(frozen=True)
class ExchangeRoute:
    """Attributes:
    lent: per context rank, int64 indices into own rows that it needs; empty for this rank itself.
    borrowed: per context rank, number of its rows that this rank needs.
    ranges: per context rank, own blocks x the rows borrowed from it, or x all own rows for this rank itself.
    """

    lent: tuple[Tensor, ...]
    borrowed: tuple[int, ...]
    ranges: tuple[KeyRanges, ...]

    def forward(
        self, wire: Wire, rows: BlockRows, k_TGE: Tensor, v_TGE: Tensor
    ) -> tuple[SoftmaxState, list[Tensor]]:
        me = wire.grid.context_rank
        flights = {
            peer: wire.post(
                [(peer, torch.stack([k_TGE[self.lent[peer]], v_TGE[self.lent[peer]]]), "context_kv")],
                [(peer, (2, self.borrowed[peer], *k_TGE.shape[1:]), k_TGE)],
            )
            for peer in self._peers(me)
        }
        state = rows.begin(k_TGE, v_TGE, self.ranges[me])
        kept = []
        for peer, flight in flights.items():
            (borrowed,) = flight.wait()
            kept.append(borrowed)
            rows.backend.forward(state, rows.q, borrowed[0], borrowed[1], self.ranges[peer])
        return state, kept

    def backward(
        self,
        wire: Wire,
        rows: BlockRows,
        upstream: Upstream,
        k_TGE: Tensor,
        v_TGE: Tensor,
        kept: list[Tensor],
    ) -> Gradients:
        me = wire.grid.context_rank
        dq = upstream.do.new_zeros(rows.q.shape, dtype=accumulator(rows.q))
        flights = {}
        for peer, borrowed in zip(self._peers(me), kept, strict=True):
            part = rows.backend.backward(dq, rows.q, upstream, borrowed[0], borrowed[1], self.ranges[peer])
            flights[peer] = wire.post(
                [(peer, torch.stack(part), "context_kv")],
                [(peer, (2, self.lent[peer].numel(), *k_TGE.shape[1:]), dq)],
            )
        dk_own, dv_own, dk, dv = rows.begin_backward(dq, upstream, k_TGE, v_TGE, self.ranges[me])
        for peer, flight in flights.items():
            (sums,) = flight.wait()
            dk.index_add_(0, self.lent[peer], sums[0])
            dv.index_add_(0, self.lent[peer], sums[1])
        return Gradients(dq, dk_own, dv_own, dk, dv)

    def _peers(self, me: int) -> list[int]:
        """Ranks with which rows are exchanged, in an order that pairs up on both sides."""
        return [
            peer
            for peer in range(len(self.ranges))
            if peer != me and (self.borrowed[peer] or self.lent[peer].numel())
        ]
