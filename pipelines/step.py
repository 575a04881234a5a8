"""One micro-batch through the drafter: features and anchors in, summed loss out.

Shape legend: A blocks of this rank, B rows of a block, K = B - 1 predicted slots, T context rows, D hidden.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from csbp.footprint import Recompute
from drafter.context import Features
from drafter.distribution import TargetStates
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.objective import LossSums, ObjectiveConfig, block_loss
from pipelines.loader import MicroBatch


class DraftStep(nn.Module):
    """The drafter, its frozen tables and its objective as one module, so that an engine can wrap them."""

    def __init__(
        self,
        drafter: Drafter,
        head: FrozenHead,
        objective: ObjectiveConfig,
        *,
        autocast: bool,
        seed: int,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        drafter.recompute = recompute in ("blocks", "all")
        self._recompute = recompute
        self.drafter = drafter
        self.head = head
        self.objective = objective
        self._autocast = autocast
        self._seed = seed

    @property
    def device(self) -> torch.device:
        return self.drafter.fc.weight.device

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Final-normed hidden states [A, B, D] of this rank's blocks."""
        with self.precision():
            again = self._recompute in ("context", "all")
            context = Features(batch.features) if again else self.drafter.fuse(batch.features)
            embeddings_ABD = embed_blocks(self.head, self.drafter.config, batch.anchor_ids)
            hidden_ABD: Tensor = self.drafter(
                context, batch.row_positions, embeddings_ABD, batch.block_positions, batch.plan.attention()
            )
        return hidden_ABD

    def forward(self, batch: MicroBatch) -> LossSums:
        """Sums of the loss and of its metrics over the supervised slots of this rank's blocks.

        Sums over ranks count every block once, also where several ranks compute it (`StepPlan.loss_scale`).
        The vocabulary sample and the selector's blocks are drawn from (seed, step), alike on every rank and
        in every micro-batch.
        """
        hidden_ABD = self.hidden(batch)
        generator = torch.Generator(device=self.device).manual_seed(self._seed * 1_000_003 + batch.step)
        with self.precision():
            sums = block_loss(
                self.drafter,
                hidden_ABD,
                batch.labels,
                batch.supervised,
                batch.anchor_ids,
                self.head,
                self.objective,
                batch.step,
                generator,
                _target_states(batch),
            )
        share = batch.plan.loss_scale
        if share == 1.0:
            return sums
        return LossSums(share * sums.loss, {name: share * value for name, value in sums.metrics.items()})

    def precision(self) -> AbstractContextManager[None]:
        """bfloat16 matrix products where asked for; parameters stay float32."""
        if not self._autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _target_states(batch: MicroBatch) -> TargetStates | None:
    if batch.last_states is None or batch.state_rows is None:
        return None
    return TargetStates(batch.last_states, batch.state_rows)
