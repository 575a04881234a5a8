"""Dot products of rows with a few rows each of a frozen table, without keeping the gathered rows.

Shape legend: R rows, D width, V rows of the table, k picks of each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

ROW_TILE = 256


def gathered_dot(rows_RD: Tensor, table_VD: Tensor, ids_Rk: Tensor) -> Tensor:
    """Return [R, k] dot products of each row with its picks, in float32 or wider; differentiable in the rows.

    The table is frozen. Peak extra memory is ROW_TILE * k * D elements, forward and backward.
    """
    products: Tensor = _GatheredDot.apply(rows_RD, table_VD, ids_Rk)
    return products


class _GatheredDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RD: Tensor, table_VD: Tensor, ids_Rk: Tensor) -> Tensor:
        ctx.save_for_backward(table_VD, ids_Rk)
        wide = torch.promote_types(rows_RD.dtype, torch.float32)
        products = torch.empty(ids_Rk.shape, dtype=wide, device=rows_RD.device)
        with torch.autocast(rows_RD.device.type, enabled=False):
            for tile in _tiles(len(rows_RD)):
                picks_tkD = table_VD[ids_Rk[tile]].to(wide)
                products[tile] = (picks_tkD @ rows_RD[tile].to(wide).unsqueeze(-1)).squeeze(-1)
        return products

    @staticmethod
    def backward(ctx: Any, gradient_Rk: Tensor) -> tuple[Tensor, None, None]:
        table_VD, ids_Rk = ctx.saved_tensors
        grad_RD = gradient_Rk.new_empty(len(ids_Rk), table_VD.shape[1])
        with torch.autocast(gradient_Rk.device.type, enabled=False):
            for tile in _tiles(len(ids_Rk)):
                picks_tkD = table_VD[ids_Rk[tile]].to(gradient_Rk.dtype)
                grad_RD[tile] = (gradient_Rk[tile].unsqueeze(-2) @ picks_tkD).squeeze(-2)
        return grad_RD, None, None


def _tiles(rows: int) -> list[slice]:
    return [slice(start, min(start + ROW_TILE, rows)) for start in range(0, rows, ROW_TILE)]
