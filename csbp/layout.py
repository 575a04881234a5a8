"""Where the blocks of one micro-step stand on its context axis.

The context axis is the concatenation of the samples of one micro-batch of one replica. All ranks of a replica
hold the same layout; it is drawn from (seed, sample, epoch), never from a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """Blocks on the context axis.

    Attributes:
        anchors: int64 [A], ascending; axis index of every block's anchor token. Context rows strictly before
            the anchor and not before `starts` are visible to the block; the anchor's own row is not.
        starts: int64 [A], axis index of the first row of the anchor's document.
        length: rows of the axis.
        block_size: B, rows of a block (the anchor and B - 1 drafts).
    """

    anchors: Tensor
    starts: Tensor
    length: int
    block_size: int

    @property
    def positions(self) -> Tensor:
        """int64 [A]: rotary position of each anchor, counted from the first row of its document."""
        return self.anchors - self.starts
