"""Query ring: blocks' queries pass every shard of the context, and their softmax sums follow them home.

Sends less than the ring when A·B·H·E / P is far below L·G·E: few blocks over a long context. K/V and their
gradients stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from csbp.attention import SoftmaxState, Upstream, accumulator
from csbp.tiles import KeyRanges
from csbp.transport import BlockRows, Gradients, Pending, Wire


@dataclass(frozen=True)
class QueryRingRoute:
    """Attributes:
    blocks: number of blocks of each context rank.
    ranges: per context rank, its blocks x this rank's rows.
    """

    blocks: tuple[int, ...]
    ranges: tuple[KeyRanges, ...]

    def forward(
        self, wire: Wire, rows: BlockRows, k_TGE: Tensor, v_TGE: Tensor
    ) -> tuple[SoftmaxState, list[Tensor]]:
        ranks, me = len(self.blocks), wire.grid.context_rank
        query = rows.q
        kept: list[Tensor] = []
        behind: Pending | None = None
        for step in range(ranks):
            owner = (me - step) % ranks
            ahead = self._shift(wire, query, owner - 1, rows.rows_of_a_block) if step + 1 < ranks else None
            if step == 0:
                state = home = rows.begin(k_TGE, v_TGE, self.ranges[owner])
            else:
                state = SoftmaxState.empty(query)
                rows.backend.forward(state, query, k_TGE, v_TGE, self.ranges[owner])
            if behind is not None:
                state.merge(_loaded(behind))
            if step:
                behind = self._shift(wire, _cargo(state), owner - 1, rows.rows_of_a_block)
            if ahead is not None:
                (query,) = ahead.wait()
                kept.append(query)
        if behind is not None:
            home.merge(_loaded(behind))
        return home, kept

    def backward(
        self,
        wire: Wire,
        rows: BlockRows,
        upstream: Upstream,
        k_TGE: Tensor,
        v_TGE: Tensor,
        kept: list[Tensor],
    ) -> Gradients:
        ranks, me = len(self.blocks), wire.grid.context_rank
        dtype = accumulator(rows.q)
        home = upstream.do.new_zeros(rows.q.shape, dtype=dtype)
        statistics = torch.stack([upstream.delta, upstream.lse], -1)
        visitor = torch.cat([upstream.do.to(dtype), statistics], -1)
        behind: Pending | None = None
        for step in range(ranks):
            owner = (me - step) % ranks
            ahead = self._shift(wire, visitor, owner - 1, rows.rows_of_a_block) if step + 1 < ranks else None
            if step == 0:
                dq = home
                dk_own, dv_own, dk, dv = rows.begin_backward(dq, upstream, k_TGE, v_TGE, self.ranges[owner])
            else:
                query = kept[step - 1]
                dq = torch.zeros_like(query, dtype=dtype)
                arrived = Upstream(visitor[..., :-2], visitor[..., -2], visitor[..., -1])
                part = rows.backend.backward(dq, query, arrived, k_TGE, v_TGE, self.ranges[owner])
                dk, dv = dk.add_(part[0]), dv.add_(part[1])
            if behind is not None:
                dq.add_(behind.wait()[0])
            if step:
                behind = self._shift(wire, dq, owner - 1, rows.rows_of_a_block)
            if ahead is not None:
                (visitor,) = ahead.wait()
        if behind is not None:
            home.add_(behind.wait()[0])
        return Gradients(home, dk_own, dv_own, dk, dv)

    def _shift(self, wire: Wire, cargo: Tensor, owner: int, per_block: int) -> Pending:
        """Pass `cargo` [G, N, *] to the right; receive that of `owner`'s blocks from the left."""
        me, ranks = wire.grid.context_rank, len(self.blocks)
        shape = (cargo.shape[0], self.blocks[owner % ranks] * per_block, cargo.shape[2])
        return wire.post([((me + 1) % ranks, cargo, "other")], [((me - 1) % ranks, shape, cargo)])


def _cargo(state: SoftmaxState) -> Tensor:
    return torch.cat([state.numerator, state.max[..., None], state.total[..., None]], -1)


def _loaded(flight: Pending) -> SoftmaxState:
    (sums,) = flight.wait()
    return SoftmaxState(sums[..., :-2], sums[..., -2], sums[..., -1])
