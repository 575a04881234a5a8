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
        return rows.begin(k_TGE, v_TGE, self.ranges), []

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
        return Gradients(dq, *rows.begin_backward(dq, upstream, k_TGE, v_TGE, self.ranges))
