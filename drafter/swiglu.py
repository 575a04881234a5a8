"""The gated MLP of a draft layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from drafter.config import DrafterConfig
from drafter.kernels import fused


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(gated(self.gate_proj(rows), self.up_proj(rows)))
        return mixed


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the type of `gate`."""
    if not fused(gate):
        return F.silu(gate) * up
    mixed: Tensor = _Gated.apply(gate, up)
    return mixed


class _Gated(torch.autograd.Function):
    """Keeps gate and up only; silu(gate) exists in registers."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        from drafter.kernels.swiglu import swiglu

        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        from drafter.kernels.swiglu import swiglu_gradients

        return swiglu_gradients(gradient, *ctx.saved_tensors)
