"""The one seam between a drafter and whoever provides attention over its context.

A drafter layer projects queries, its own block's keys and values, and the context keys and values that it is
told to project; it then asks a `BlockAttention` to mix them. Training on one rank, training on
context-sharded ranks (`csbp`) and decoding with a cache are three implementations of the same two
methods.

Shape legend: A blocks, B rows of a block, T context rows held by this rank, H query heads, G key/value heads,
E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class LayerMask:
    """What a block row at position p may see in one layer (arXiv 2602.06036 sec. 4; vLLM `layer_types`).

    A key at position k is visible iff ``(not causal or k <= p)`` and, with a window W, ``p - k < W`` and
    ``(causal or k - p < W)``. W counts the query itself. Context keys always satisfy ``k < anchor``.
    """

    window: int | None
    causal: bool


class BlockAttention(Protocol):
    """Attention of block rows over (visible context) + (own block), one object per step or per decode."""

    def context_rows(self, layer: int) -> Tensor | None:
        """Indices into the T local context rows that `layer` has to project; None means all of them."""
        ...

    def __call__(
        self,
        layer: int,
        q_ABHE: Tensor,
        k_block_ABGE: Tensor,
        v_block_ABGE: Tensor,
        k_context_TGE: Tensor,
        v_context_TGE: Tensor,
    ) -> Tensor:
        """Return [A, B, H, E]; keys already carry their norm and rotary angles; scale is E**-0.5."""
        ...
