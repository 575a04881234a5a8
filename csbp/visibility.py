"""Which context rows the blocks of a layout see under a layer's mask.

Shape legend: A blocks, B rows of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csbp.layout import BlockLayout
from csbp.rows import RowSet
from csbp.tiles import KeyRanges
from drafter.attention import LayerMask


def first_visible(layout: BlockLayout, mask: LayerMask) -> Tensor:
    """int64 [A, B]: the first axis row that each block row sees; the last is always anchor - 1.

    The window is measured from the query at anchor + slot and counts it (vLLM, z-lab `dflash`).
    """
    starts = layout.starts[:, None].expand(-1, layout.block_size)
    if mask.window is None:
        return starts
    query = layout.anchors[:, None] + torch.arange(layout.block_size)
    return torch.minimum(torch.maximum(starts, query - mask.window + 1), layout.anchors[:, None])


def seen(layout: BlockLayout, mask: LayerMask, blocks: Tensor | None = None) -> RowSet:
    """Context rows that any of `blocks` (default: all) sees."""
    lo, hi = first_visible(layout, mask)[:, 0], layout.anchors
    return RowSet.union_of(lo, hi) if blocks is None else RowSet.union_of(lo[blocks], hi[blocks])


def key_ranges(
    layout: BlockLayout, mask: LayerMask, blocks: Tensor, rows: RowSet, device: torch.device | str = "cpu"
) -> KeyRanges:
    """What `blocks` see of the compacted rows `rows`, as indices into them."""
    lo = rows.rank_of(first_visible(layout, mask)[blocks])
    hi = rows.rank_of(layout.anchors[blocks])
    return KeyRanges(lo, hi).to(device)
