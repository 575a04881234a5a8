"""Ring: shards of context K/V pass every rank, and their gradients follow them home.

At step s rank r meets the shard of rank r - s. In the backward pass the sums of dK and dV travel one step
behind the shard: started by the first visitor, completed by the last, which hands them to the owner. The
first `retain` received shards are kept from the forward pass and need not travel again.

With `block_rows` the blocks' own K/V and their gradients ride along. No block sees another's, so this only
costs; it is what context parallelism does that knows one sequence of clean and corrupted rows
(`csbp.baselines`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csbp.attention import SoftmaxState, Upstream, accumulator
from csbp.tiles import KeyRanges
from csbp.transport import BlockRows, Gradients, Kind, Pending, Wire


@dataclass(frozen=True)
class RingRoute:
    """Attributes:
    sizes: rows of each context rank's shard.
    ranges: per owner, own blocks x the owner's shard.
    retain: received shards that each rank keeps for the backward pass, 1 <= retain < P (0 for P = 1).
    block_rows: per context rank, block rows that travel with the shard; None when they stay at home.
    """

    sizes: tuple[int, ...]
    ranges: tuple[KeyRanges, ...]
    retain: int
    block_rows: tuple[int, ...] | None = None

    def forward(
        self, wire: Wire, rows: BlockRows, k_TGE: Tensor, v_TGE: Tensor
    ) -> tuple[SoftmaxState, list[Tensor]]:
        ranks, me = len(self.sizes), wire.grid.context_rank
        cargo = self._load(rows, k_TGE, v_TGE)
        kept: list[Tensor] = []
        for step in range(ranks):
            ahead = self._shift(wire, cargo, me - step - 1) if step + 1 < ranks else None
            k, v = cargo[0]
            ranges = self.ranges[(me - step) % ranks]
            if step == 0:
                state = rows.begin(k, v, ranges)
            else:
                rows.backend.forward(state, rows.q, k, v, ranges)
            if ahead is not None:
                cargo = ahead.wait()
                kept += cargo if step < self.retain else []
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
        ranks, me = len(self.sizes), wire.grid.context_rank
        dq = upstream.do.new_zeros(rows.q.shape, dtype=accumulator(rows.q))
        cargo = self._load(rows, k_TGE, v_TGE)
        home: list[Tensor] = []
        behind: Pending | None = None
        for step in range(ranks):
            moves = self.retain < step + 1 < ranks
            ahead = self._shift(wire, cargo, me - step - 1) if moves else None
            k, v = cargo[0]
            ranges = self.ranges[(me - step) % ranks]
            if step == 0:
                dk_own, dv_own, dk, dv = rows.begin_backward(dq, upstream, k, v, ranges)
            else:
                dk, dv = rows.backend.backward(dq, rows.q, upstream, k, v, ranges)
            # A visiting block's K/V are seen by none of this rank's blocks: their gradient travels as it
            # came.
            sums = [torch.stack([dk, dv]), *(torch.zeros_like(block, dtype=dq.dtype) for block in cargo[1:])]
            if behind is not None:
                sums = [mine.add_(theirs) for mine, theirs in zip(sums, behind.wait(), strict=True)]
            if step == 0:
                home = sums
            else:
                behind = self._shift(wire, sums, me - step - 1)
            if ahead is not None:
                cargo = ahead.wait()
            elif step + 1 < ranks:
                width = len(cargo)
                cargo = kept[step * width : (step + 1) * width]
        if behind is not None:
            home = [mine.add_(theirs) for mine, theirs in zip(home, behind.wait(), strict=True)]
        if self.block_rows:
            shape = rows.own.k.shape
            dk_own, dv_own = dk_own + home[1][0].view(shape), dv_own + home[1][1].view(shape)
        return Gradients(dq, dk_own, dv_own, *home[0])

    def _load(self, rows: BlockRows, k_TGE: Tensor, v_TGE: Tensor) -> list[Tensor]:
        """What leaves this rank first: [2, T, G, E] context K and V, and block rows alike if they travel."""
        context = torch.stack([k_TGE, v_TGE])
        if self.block_rows is None:
            return [context]
        return [context, torch.stack([rows.own.k.flatten(0, 1), rows.own.v.flatten(0, 1)])]

    def _shift(self, wire: Wire, cargo: Sequence[Tensor], owner: int) -> Pending:
        """Pass `cargo` to the right; receive `owner`'s of the same kind from the left."""
        me, ranks = wire.grid.context_rank, len(self.sizes)
        kinds: tuple[Kind, ...] = ("context_kv", "block_kv")
        sizes = [self.sizes] if self.block_rows is None else [self.sizes, self.block_rows]
        return wire.post(
            [((me + 1) % ranks, tensor, kind) for tensor, kind in zip(cargo, kinds, strict=False)],
            [
                ((me - 1) % ranks, (2, rows[owner % ranks], *tensor.shape[2:]), tensor)
                for tensor, rows in zip(cargo, sizes, strict=True)
            ],
        )
