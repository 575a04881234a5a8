"""How far drafts of held-out blocks would be accepted.

All figures are pooled: sums over blocks, divided once. A mean of batch means weighs blocks by how many share
their batch, and a product of per-position rates is not the length of any run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from csbp.topology import Grid
from drafter.objective import ObjectiveConfig, block_loss
from drafter.proposal import walk_metrics
from pipelines.figures import Sums, per_slot
from pipelines.loader import MicroBatch
from pipelines.ranks import add_tensors_over_ranks
from pipelines.step import DraftStep


class ValidationConfig(BaseModel):
    """When held-out blocks are drafted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(
        default=500, ge=1, description="Optimizer steps between validations; the last step always has one."
    )
    max_batches: int | None = Field(
        default=50, ge=1, description="Held-out micro-batches of each replica; null for all."
    )


_PLAIN = ObjectiveConfig.model_validate({"selector_weight": 0.0})  # cross entropy over the whole vocabulary


@torch.no_grad()
def validate(module: DraftStep, batches: Iterable[MicroBatch], grid: Grid) -> dict[str, Any]:
    """Draft held-out blocks greedily and compare with what the target said.

    Returns:
        Pooled over all ranks: ``accepted``, drafts before the first miss per block, and
        ``acceptance_length`` = 1 + accepted; ``accepted_unary``, the same with each slot's best token in
        place of the selector's choice; ``acceptance_by_slot``, of blocks whose earlier drafts all hit;
        ``recall_by_slot``, slots whose candidates hold the token; ``ce`` over the whole vocabulary;
        ``blocks``.
    """
    head, device = module.head, module.device
    sums = Sums()
    for batch in batches:
        batch.taken(device)
        hidden_ABD = module.hidden(batch)
        with module.precision():
            walked = walk_metrics(
                module.drafter, hidden_ABD, batch.anchor_ids, batch.labels, batch.supervised, head
            )
            losses = block_loss(
                module.drafter,
                hidden_ABD,
                batch.labels,
                batch.supervised,
                batch.anchor_ids,
                head,
                _PLAIN,
                0,
            )
        found = {**walked, "ce": losses.metrics["ce"], "slots": losses.metrics["slots"].sum()}
        sums.add({name: batch.plan.loss_scale * value for name, value in found.items()})
    pooled = add_tensors_over_ranks(sums.take(), grid, device)
    blocks = float(pooled["walk_blocks"])
    accepted = float(pooled["walk_run"]) / blocks
    prefix_hits, prefix_slots = pooled["walk_prefix_hits"], pooled["walk_prefix_slots"]
    return {
        "accepted": accepted,
        "acceptance_length": 1.0 + accepted,
        "accepted_unary": float(pooled["unary_run"]) / blocks,
        "ce": float(pooled["ce"]) / float(pooled["slots"]),
        "blocks": blocks,
        "acceptance_by_slot": per_slot(prefix_hits, prefix_slots),
        "recall_by_slot": per_slot(pooled["recall_hits"], pooled["walk_slots"]),
    }
