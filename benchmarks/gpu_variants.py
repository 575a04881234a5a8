"""The same training step in other ways, to compare with: a part of `benchmarks/gpu_step.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from csbp.layout import BlockLayout
from csbp.plan import StepPlan
from drafter import kernels, objective
from drafter.attention import LayerMask
from drafter.frozen import LogitScale
from drafter.vocabulary import Vocabulary


class FlexBlockAttention:
    """`BlockAttention` by FlexAttention: context rows and block rows are one sequence of keys under a mask.

    Attributes:
        compiled: FlexAttention as a kernel; without, it makes all scores.
    """

    def __init__(self, plan: StepPlan, masks: tuple[LayerMask, ...], device: torch.device) -> None:
        self.plan, self.masks = plan, masks
        self.compiled = torch.compile(flex_attention) if device.type == "cuda" else flex_attention
        self._masks: dict[LayerMask, Any] = {}

    def context_rows(self, layer: int) -> Tensor | None:
        return self.plan.seam.context_rows(layer)

    def mask(self, layer: int, rows: int, device: torch.device) -> Any:
        """The mask of block rows x (context rows, block rows); layers that are alike share it."""
        mask = self.masks[layer]
        if mask not in self._masks:
            layout: BlockLayout = self.plan.layout
            selected = self.plan.seam.context_rows(layer)
            axis = torch.cat([torch.arange(a, b) for a, b in self.plan.rows]).to(device)
            axis = axis if selected is None else axis[selected]
            anchors, starts = layout.anchors.to(device), layout.starts.to(device)
            block, context = layout.block_size, len(axis)
            window = mask.window or 1 << 30
            axis = torch.cat([axis, axis.new_zeros(rows)])

            def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
                del batch, head
                own = row // block
                at = anchors[own] + row % block
                place = axis[key]
                seen = (key < context) & (place < anchors[own]) & (place >= starts[own])
                slot = key - context
                ahead = slot % block - row % block
                same = (key >= context) & (slot // block == own) & (ahead < window) & (-ahead < window)
                if mask.causal:
                    same = same & (ahead <= 0)
                return (seen & (at - place < window)) | same

            made = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
            self._masks[mask] = made(visible, 1, 1, rows, context + rows, device=device)
        return self._masks[mask]

    def __call__(
        self, layer: int, q_ABHE: Tensor, k_ABGE: Tensor, v_ABGE: Tensor, k_TGE: Tensor, v_TGE: Tensor
    ) -> Tensor:
        rows = q_ABHE.flatten(0, 1)
        k, v = torch.cat([k_TGE, k_ABGE.flatten(0, 1)]), torch.cat([v_TGE, v_ABGE.flatten(0, 1)])
        mixed = self.compiled(
            rows.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            block_mask=self.mask(layer, len(rows), rows.device),
            enable_gqa=True,
        )
        return mixed[0].transpose(0, 1).reshape(q_ABHE.shape)


def dense_loss(
    hidden_MD: Tensor, vocabulary: Vocabulary, scale: LogitScale, *_: int, **__: int
) -> tuple[Tensor, Tensor, None]:
    """Cross entropy from the logits of all rows at once, by the framework's own operations."""
    logits = scale(hidden_MD.to(vocabulary.table.dtype) @ vocabulary.table.T)
    ce = F.cross_entropy(logits.float(), vocabulary.gold, reduction="none")
    return ce, logits.detach().argmax(1) == vocabulary.gold, None


@contextmanager
def flex(step: Any) -> Iterator[None]:
    """FlexAttention in place of the kernels."""
    plan_of = step.plan

    def plan(layout: BlockLayout) -> Any:
        made = plan_of(layout)
        attention = FlexBlockAttention(made, step.config.layer_masks, step.device)
        return mock.Mock(wraps=made, row_positions=made.row_positions, attention=lambda: attention)

    with mock.patch.object(step, "plan", plan):
        yield


@contextmanager
def flash_tiles(step: Any) -> Iterator[None]:
    """FlashAttention on dense tiles, the plain form on their edges."""
    with mock.patch.object(step, "backend", "flash"):
        yield


@contextmanager
def dense_logits(step: Any) -> Iterator[None]:
    """All logits of the loss at once."""
    del step
    with mock.patch.object(objective, "cross_entropy_with_candidates", dense_loss):
        yield


@contextmanager
def plain_modules(step: Any) -> Iterator[None]:
    """Norms, convolutions, gates and the loss without kernels."""
    del step
    with kernels.mode("never"):
        yield


FLEX = "FlexAttention"
VARIANTS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    FLEX: flex,
    "flash tiles": flash_tiles,
    "dense logits": dense_logits,
    "plain modules": plain_modules,
}
