"""Decode-time attention of one sequence: keys and values of the context, kept per layer.

Shape legend: T new context rows, n kept rows, B rows of a block, D hidden, F feature width, H query heads,
G key/value heads, R = H / G query heads per key head, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.attention import LayerMask
from drafter.config import DrafterConfig
from drafter.dense import mask_allows
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter

_FIRST_CAPACITY = 256


class DraftCache:
    """`BlockAttention` for one block after a growing context.

    Every call appends the new context rows and attends from the block; the block's own keys and values are
    overwritten by the next call. A full layer keeps all rows, a sliding layer the last W - 1: slot 0
    stands at the anchor, and no row further back is visible to any slot.

    Attributes:
        length: context rows seen, which is the position of the next anchor.
    """

    def __init__(self, config: DrafterConfig) -> None:
        self.length = 0
        self._new_rows = 0
        self._selections: dict[int, Tensor] = {}
        self._layers = [_LayerCache(mask) for mask in config.layer_masks]

    def expect(self, new_rows: int) -> None:
        """Announce the T context rows of the next pass; sliding layers project only those they keep."""
        self._new_rows = new_rows
        self.length += new_rows
        self._selections.clear()

    def context_rows(self, layer: int) -> Tensor | None:
        keep = self._layers[layer].keeps
        if keep is None or self._new_rows <= keep:
            return None
        if keep not in self._selections:
            self._selections[keep] = torch.arange(self._new_rows - keep, self._new_rows)
        return self._selections[keep]

    def kept_rows(self, layer: int) -> int:
        """Context rows that a layer holds."""
        return self._layers[layer].rows

    def __call__(
        self,
        layer: int,
        q_ABHE: Tensor,
        k_block_ABGE: Tensor,
        v_block_ABGE: Tensor,
        k_context_TGE: Tensor,
        v_context_TGE: Tensor,
    ) -> Tensor:
        cache = self._layers[layer]
        cache.append(k_context_TGE, v_context_TGE, room=k_block_ABGE.shape[1])
        return cache.attend(q_ABHE[0], k_block_ABGE[0], v_block_ABGE[0]).unsqueeze(0)


class _LayerCache:
    """Buffers [G, capacity, E]: kept context rows end at `end`, room for one block follows."""

    def __init__(self, mask: LayerMask) -> None:
        self.mask = mask
        self.keeps = None if mask.window is None else mask.window - 1
        self.start = self.end = 0
        self.k_GCE: Tensor | None = None
        self.v_GCE: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.end - self.start

    def append(self, k_TGE: Tensor, v_TGE: Tensor, room: int) -> None:
        if self.keeps is not None:
            self.start += max(0, self.rows + len(k_TGE) - self.keeps)
        self._reserve(k_TGE, len(k_TGE) + room)
        assert self.k_GCE is not None
        assert self.v_GCE is not None
        stop = self.end + len(k_TGE)
        self.k_GCE[:, self.end : stop] = k_TGE.transpose(0, 1)
        self.v_GCE[:, self.end : stop] = v_TGE.transpose(0, 1)
        self.end = stop

    def _reserve(self, like_TGE: Tensor, extra: int) -> None:
        """Make room after `end`; a copy happens once per doubling, or once per window of a sliding layer."""
        if self.k_GCE is not None and self.end + extra <= self.k_GCE.shape[1]:
            return
        _, heads, size = like_TGE.shape
        capacity = max(_FIRST_CAPACITY, 2 * (self.rows + extra))
        for name in ("k_GCE", "v_GCE"):
            old = getattr(self, name)
            fresh = like_TGE.new_empty(heads, capacity, size)
            if old is not None:
                fresh[:, : self.rows] = old[:, self.start : self.end]
            setattr(self, name, fresh)
        self.start, self.end = 0, self.rows

    def attend(self, q_BHE: Tensor, k_BGE: Tensor, v_BGE: Tensor) -> Tensor:
        assert self.k_GCE is not None
        assert self.v_GCE is not None
        block, heads, size = q_BHE.shape
        stop = self.end + block
        self.k_GCE[:, self.end : stop] = k_BGE.transpose(0, 1)
        self.v_GCE[:, self.end : stop] = v_BGE.transpose(0, 1)
        k_GnE, v_GnE = self.k_GCE[:, self.start : stop], self.v_GCE[:, self.start : stop]
        groups = len(k_GnE)
        q_GRE = q_BHE.view(block, groups, -1, size).permute(1, 2, 0, 3).reshape(groups, -1, size)
        scores_GRn = (q_GRE @ k_GnE.transpose(1, 2)).to(torch.promote_types(q_BHE.dtype, torch.float32))
        scores_GRn = scores_GRn * size**-0.5
        visible_Bn = self._visible(block, q_BHE.device)
        if visible_Bn is not None:
            blocked = ~visible_Bn.repeat(heads // groups, 1)
            scores_GRn = scores_GRn.masked_fill(blocked, float("-inf"))
        mixed_GRE = scores_GRn.softmax(-1).to(v_GnE.dtype) @ v_GnE
        return mixed_GRE.view(groups, -1, block, size).permute(2, 0, 1, 3).reshape(block, heads, size)

    def _visible(self, block: int, device: torch.device) -> Tensor | None:
        """Return bool [B, n + B], or None when every row sees every key."""
        window = self.mask.window
        if not self.mask.causal and (window is None or self.rows + block <= window):
            return None
        query_B = torch.arange(self.rows, self.rows + block, device=device)
        return mask_allows(self.mask, query_B[:, None], torch.arange(self.rows + block, device=device))


@torch.no_grad()
def draft_hidden(
    drafter: Drafter,
    cache: DraftCache,
    features_TF: Tensor,
    anchor_ids_1: Tensor,
    head: FrozenHead,
    block_size: int | None = None,
) -> Tensor:
    """Run one decode step of the drafter and return the block's hidden states [1, B, D] for `propose`.

    Args:
        drafter: in the dtype to decode in.
        cache: of this sequence.
        features_TF: taps of the context tokens since the last step, all prompt tokens in the first; T may
            be 0.
        anchor_ids_1: int64 [1], the token that follows this context.
        head: the target's frozen tables.
        block_size: rows to draft when fewer than the drafter's block, for instance near a length limit.
    """
    first = cache.length
    cache.expect(len(features_TF))
    blocks_1BD = embed_blocks(head, drafter.config, anchor_ids_1, block_size)
    device = features_TF.device
    context_positions = torch.arange(first, cache.length, device=device)
    block_positions = torch.arange(cache.length, cache.length + blocks_1BD.shape[1], device=device)
    hidden_1BD: Tensor = drafter(
        drafter.fuse(features_TF), context_positions, blocks_1BD, block_positions.unsqueeze(0), cache
    )
    return hidden_1BD
