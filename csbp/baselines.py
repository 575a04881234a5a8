"""What csbp is compared with: other ownerships and routes over the same attention kernels.

| mode | context rows | blocks | what crosses ranks |
|---|---|---|---|
| `cp` | sharded by position, zigzag | where their anchor lies | clean and block K/V, gradients of both |
| `replicated` | sharded, zigzag | all of them on every rank | clean K/V and their gradients |
| `query-sharded` | all of them on every rank | dealt | nothing |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from csbp.choice import Choice
from csbp.layout import BlockLayout
from csbp.ownership import Ownership, StepCost, dealt, visible_rows, zigzag
from csbp.routes import Transport
from csbp.rows import RowSet
from drafter.attention import LayerMask

BASELINES = ("cp", "replicated", "query-sharded")


def baseline(
    mode: str, layout: BlockLayout, masks: Sequence[LayerMask], ranks: int, cost: StepCost
) -> Choice:
    """Ownership and transports of a baseline."""
    transport: Transport = "ring"
    if mode == "cp":
        ownership = _by_position(layout, ranks)
    elif mode == "replicated":
        blocks = torch.arange(layout.anchors.numel())
        ownership = Ownership((blocks,) * ranks, zigzag(visible_rows(layout, masks), ranks))
    else:
        transport = "local"
        whole = RowSet.of([(0, layout.length)])
        ownership = Ownership(dealt(layout, masks, ranks, cost).blocks, (whole,) * ranks)
    return Choice(mode, (transport,) * len(masks), ownership)


def _by_position(layout: BlockLayout, ranks: int) -> Ownership:
    """One sequence of L + A·B rows, a block's rows at its anchor, cut in 2P chunks of which rank r has two.

    A cut that falls into a block moves to the block's end, since its convolution and its loss need it whole.
    """
    size = layout.block_size
    first_row = layout.anchors + size * torch.arange(layout.anchors.numel())
    total = layout.length + size * layout.anchors.numel()
    context, blocks = [], []
    last_row, last_block = 0, 0
    for chunk in range(1, 2 * ranks + 1):
        edge = total * chunk // (2 * ranks)
        block = int((first_row < edge).sum())
        before = int(layout.anchors[block - 1]) if block else 0
        row = min(max(before, edge - size * block), layout.length)
        context.append(RowSet.of([(last_row, row)]))
        blocks.append(torch.arange(last_block, block))
        last_row, last_block = row, block
    pairs = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    return Ownership(
        tuple(torch.cat([blocks[a], blocks[b]]) for a, b in pairs),
        tuple(context[a].union(context[b]) for a, b in pairs),
    )
