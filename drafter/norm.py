"""RMS norm with few passes over memory.

On a CPU core `torch.nn.functional.rms_norm` with its gradient takes twice the time of this one
([128, 8, 576] float32: 8.0 ms against 3.9 ms), because it is composed of separate operations.

Shape legend: ... any leading shape, D normed size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from drafter.kernels import fused


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _RmsNorm.apply(x, self.weight, self.eps)
        return normed


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if fused(x):
            from drafter.kernels.norm import norm

            y, inverse = norm(x, weight, eps)
            ctx.save_for_backward(x, weight, inverse)
            return y
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):  # it would take the statistics in half precision
            inverse = (torch.linalg.vecdot(wide, wide) / wide.shape[-1] + eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        if inverse.ndim == 1 and x.ndim > 1:
            from drafter.kernels.norm import norm_gradients

            return *norm_gradients(gradient, x, weight, inverse), None
        size = x.shape[-1]
        wide, gradient = x.to(inverse.dtype), gradient.to(inverse.dtype)
        weighted = gradient * weight
        with torch.autocast(x.device.type, enabled=False):
            projection = torch.linalg.vecdot(weighted, wide).unsqueeze(-1) * inverse.pow(3) / size
            grad_weight = inverse.reshape(1, -1) @ (gradient * wide).reshape(-1, size)
        grad_x = weighted.mul_(inverse).addcmul_(projection, wide, value=-1)
        return grad_x.to(x.dtype), grad_weight.reshape(-1).to(weight.dtype), None
