"""`BlockAttention` for a planned step: one autograd function around whichever route a layer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csbp.attention import Backend, OwnBlock, Upstream, own_block_mask, pack, unpack
from csbp.transport import BlockRows, Route, Wire
from drafter.attention import LayerMask
from drafter.precision import cpu_products


class _Attend(torch.autograd.Function):
    """Shape legend: as in `csbp.attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        q_ABHE: Tensor,
        k_ABGE: Tensor,
        v_ABGE: Tensor,
        k_TGE: Tensor,
        v_TGE: Tensor,
        mask_BB: Tensor,
        route: Route,
        backend: Backend,
        wire: Wire,
    ) -> Tensor:
        _, B, H, _ = q_ABHE.shape
        groups = k_ABGE.shape[2]
        own = OwnBlock(k_ABGE, v_ABGE, mask_BB)
        rows = BlockRows(pack(q_ABHE, groups), own, B * H // groups, backend)
        with cpu_products("fp32"):
            state, kept = route.forward(wire, rows, k_TGE, v_TGE)
        output, lse = state.finish()
        ctx.save_for_backward(rows.q, k_ABGE, v_ABGE, k_TGE, v_TGE, mask_BB, output, lse, *kept)
        ctx.route, ctx.backend, ctx.wire, ctx.heads, ctx.block_size = route, backend, wire, H, B
        return unpack(output, B, H).to(q_ABHE.dtype)

    @staticmethod
    def backward(ctx: Any, do_ABHE: Tensor) -> tuple[Tensor | None, ...]:
        q, k_ABGE, v_ABGE, k_TGE, v_TGE, mask_BB, output, lse, *kept = ctx.saved_tensors
        do = pack(do_ABHE, q.shape[0])
        upstream = Upstream(do, (do * output).sum(-1), lse)
        rows_of_a_block = ctx.block_size * ctx.heads // q.shape[0]
        rows = BlockRows(q, OwnBlock(k_ABGE, v_ABGE, mask_BB), rows_of_a_block, ctx.backend)
        with cpu_products("fp32"):
            grads = ctx.route.backward(ctx.wire, rows, upstream, k_TGE, v_TGE, kept)
        dq = unpack(grads.dq, ctx.block_size, ctx.heads)
        return (
            dq.to(q.dtype),
            grads.dk_block.to(k_ABGE.dtype),
            grads.dv_block.to(v_ABGE.dtype),
            grads.dk.to(k_TGE.dtype),
            grads.dv.to(v_TGE.dtype),
            *(None,) * 4,
        )


@dataclass(frozen=True)
class PlannedAttention:
    """Implements `drafter.attention.BlockAttention` for one planned step.

    Attributes:
        masks: one per layer.
        routes: one per layer.
        projected: per layer, indices into this rank's rows that the layer projects; None means all.
    """

    masks: Sequence[LayerMask]
    routes: Sequence[Route]
    projected: Sequence[Tensor | None]
    backend: Backend
    wire: Wire

    def context_rows(self, layer: int) -> Tensor | None:
        return self.projected[layer]

    def __call__(
        self,
        layer: int,
        q_ABHE: Tensor,
        k_block_ABGE: Tensor,
        v_block_ABGE: Tensor,
        k_context_TGE: Tensor,
        v_context_TGE: Tensor,
    ) -> Tensor:
        mask = own_block_mask(self.masks[layer], q_ABHE.shape[1], q_ABHE.device)
        return _Attend.apply(
            q_ABHE,
            k_block_ABGE,
            v_block_ABGE,
            k_context_TGE,
            v_context_TGE,
            mask,
            self.routes[layer],
            self.backend,
            self.wire,
        )
