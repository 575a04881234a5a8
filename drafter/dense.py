"""Attention of blocks over their context as one masked matrix: the specification of every faster path.

Memory is A * B * (T + A * B) per head, so it is for tests and small checks.

Shape legend: A blocks, B rows of a block, T context rows, N = A * B, H query heads, G key/value heads,
E head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.attention import LayerMask


class DenseAttention:
    """`BlockAttention` over a context axis that may hold several documents.

    A block sees context rows of its own document strictly before its anchor, and the rows of itself, each as
    far as the layer's mask allows at the row's own position.
    """

    def __init__(
        self, anchors_A: Tensor, starts_A: Tensor, length: int, block_size: int, masks: Sequence[LayerMask]
    ) -> None:
        """Take int64 axis indices of anchors and of their documents' first rows, and the axis length."""
        offsets_B = torch.arange(block_size, device=anchors_A.device)
        query_N = (anchors_A[:, None] + offsets_B).flatten()
        block_N = torch.arange(len(anchors_A), device=anchors_A.device).repeat_interleave(block_size)
        key_T = torch.arange(length, device=anchors_A.device)
        context_NT = (key_T < anchors_A[block_N, None]) & (key_T >= starts_A[block_N, None])
        same_NN = block_N[:, None] == block_N
        key_K = torch.cat((key_T, query_N))
        self.visible = [
            torch.cat((context_NT, same_NN), 1) & mask_allows(mask, query_N[:, None], key_K) for mask in masks
        ]

    def context_rows(self, layer: int) -> Tensor | None:  # noqa: ARG002  the protocol asks per layer
        return None

    def __call__(
        self,
        layer: int,
        q_ABHE: Tensor,
        k_block_ABGE: Tensor,
        v_block_ABGE: Tensor,
        k_context_TGE: Tensor,
        v_context_TGE: Tensor,
    ) -> Tensor:
        groups = q_ABHE.shape[2] // k_context_TGE.shape[1]
        k_HKE = (
            torch.cat((k_context_TGE, k_block_ABGE.flatten(0, 1)))
            .transpose(0, 1)
            .repeat_interleave(groups, 0)
        )
        v_HKE = (
            torch.cat((v_context_TGE, v_block_ABGE.flatten(0, 1)))
            .transpose(0, 1)
            .repeat_interleave(groups, 0)
        )
        q_HNE = q_ABHE.flatten(0, 1).transpose(0, 1)
        scores_HNK = (q_HNE @ k_HKE.transpose(1, 2)) * q_ABHE.shape[-1] ** -0.5
        scores_HNK = scores_HNK.masked_fill(~self.visible[layer], float("-inf"))
        return (scores_HNK.softmax(-1) @ v_HKE).transpose(0, 1).reshape(q_ABHE.shape)


def mask_allows(mask: LayerMask, query: Tensor, key: Tensor) -> Tensor:
    """Return bool, broadcast: may a query at one position see a key at another (see `LayerMask`)."""
    allowed = torch.ones(
        torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=query.device
    )
    if mask.causal:
        allowed &= key <= query
    if mask.window is not None:
        allowed &= query - key < mask.window
        if not mask.causal:
            allowed &= key - query < mask.window
    return allowed
