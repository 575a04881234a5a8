"""No transport: a rank projects every context row that its own blocks see, whoever else projects it too.

Exact because the context stream is position-wise: a row projected twice is the same row, and its gradient
reaches the projections of both ranks, which the ordinary reduction over ranks adds up.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from csbp.attention import SoftmaxState, Upstream, accumulator
from csbp.tiles import KeyRanges
from csbp.transport import BlockRows, Gradients, Wire


@dataclass(frozen=True)
class LocalRoute:
    """Attributes:
    ranges: own blocks x local rows.
    """

    ranges: KeyRanges

    def forward(
        self, wire: Wire, rows: BlockRows, k_TGE: Tensor, v_TGE: Tensor
    ) -> tuple[SoftmaxState, list[Tensor]]:
        del wire
        state = SoftmaxState.empty(rows.q)
        rows.own_forward(state)
        rows.backend.forward(state, rows.q, k_TGE, v_TGE, self.ranges)
        return state, []

    def backward(
        self,
        wire: Wire,
        rows: BlockRows,
        upstream: Upstream,
        k_TGE: Tensor,
        v_TGE: Tensor,
        kept: list[Tensor],
    ) -> Gradients:
        del wire, kept
        dq = upstream.do.new_zeros(rows.q.shape, dtype=accumulator(rows.q))
        dk, dv = rows.backend.backward(dq, rows.q, upstream, k_TGE, v_TGE, self.ranges)
        return Gradients(dq, *rows.own_backward(dq, upstream), dk, dv)
