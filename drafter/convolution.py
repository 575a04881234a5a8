"""Grouped dynamic causal convolution of DFlash2: neighbouring block rows mixed with input-dependent weights.

Shape legend: A blocks, B rows of a block, D hidden, N groups, S group size (D = N * S), O taps of the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from drafter.kernels import fused


class GroupedDynamicCausalConv(nn.Module):
    """Two convolutions around one sublayer, with coefficients from the sublayer's input.

    y[j, ch] = sum_o (base[o, ch] + delta[j, o, group(ch)]) * x[j - o, ch], rows before the block are zero.
    Identity at initialisation, so that a new DFlash2 drafter computes exactly what DFlash computes.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.groups, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def before(self, normed_ABD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sublayer's convolved input [A, B, D] and the coefficients [A, B, O, N] for `after`."""
        delta = self.kernel_projection(normed_ABD).unflatten(-1, (2, self.kernel_size, self.groups))
        return convolve(normed_ABD, self.base_kernel[0], delta[:, :, 0]), delta[:, :, 1]

    def after(self, output_ABD: Tensor, delta_ABON: Tensor, residual_ABD: Tensor) -> Tensor:
        """Return the residual stream [A, B, D] plus the convolved output of the sublayer."""
        return convolve(output_ABD, self.base_kernel[1], delta_ABON, residual_ABD)


def convolve(
    x_ABD: Tensor, base_OD: Tensor, delta_ABON: Tensor, residual_ABD: Tensor | None = None
) -> Tensor:
    """Apply one convolution and add the residual, if any; no state passes from one block to the next."""
    convolved: Tensor = _Convolve.apply(x_ABD, base_OD, delta_ABON, residual_ABD)
    return convolved


class _Convolve(torch.autograd.Function):
    """Keeps x and delta only; the [A, B, O, D] coefficients exist one tap at a time."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_ABD: Tensor, base_OD: Tensor, delta_ABON: Tensor, residual_ABD: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x_ABD, base_OD, delta_ABON)
        if fused(x_ABD):
            from drafter.kernels import convolution

            dtype = x_ABD.dtype if residual_ABD is None else torch.result_type(residual_ABD, x_ABD)
            return convolution.convolve(x_ABD, base_OD, delta_ABON, residual_ABD, dtype)
        y_ABD = _coefficients(base_OD, delta_ABON, 0).to(x_ABD.dtype) * x_ABD
        for tap in range(1, min(base_OD.shape[0], x_ABD.shape[1])):
            weights = _coefficients(base_OD, delta_ABON[:, tap:], tap).to(x_ABD.dtype)
            y_ABD[:, tap:].addcmul_(weights, x_ABD[:, :-tap])
        return y_ABD if residual_ABD is None else residual_ABD + y_ABD

    @staticmethod
    def backward(ctx: Any, gradient_ABD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        x_ABD, base_OD, delta_ABON = ctx.saved_tensors
        grad_residual = gradient_ABD if ctx.needs_input_grad[3] else None
        if fused(x_ABD):
            from drafter.kernels import convolution

            return *convolution.convolve_gradients(gradient_ABD, x_ABD, base_OD, delta_ABON), grad_residual
        gradient_ABD = gradient_ABD.to(x_ABD.dtype)
        groups = delta_ABON.shape[-1]
        grouped = (groups, x_ABD.shape[-1] // groups)
        grad_x = _coefficients(base_OD, delta_ABON, 0).to(x_ABD.dtype) * gradient_ABD
        grad_base, grad_delta = torch.zeros_like(base_OD), torch.zeros_like(delta_ABON)
        for tap in range(min(base_OD.shape[0], x_ABD.shape[1])):
            upstream = gradient_ABD[:, tap:]
            source = x_ABD[:, : x_ABD.shape[1] - tap]
            if tap:
                weights = _coefficients(base_OD, delta_ABON[:, tap:], tap).to(x_ABD.dtype)
                grad_x[:, :-tap].addcmul_(weights, upstream)
            product = upstream * source
            grad_base[tap] = product.sum((0, 1))
            grad_delta[:, tap:, tap] = product.unflatten(-1, grouped).sum(-1)
        return grad_x, grad_base, grad_delta, grad_residual


def _coefficients(base_OD: Tensor, delta_ABON: Tensor, tap: int) -> Tensor:
    """Return base + delta of one tap as [A, B, D]."""
    groups = delta_ABON.shape[-1]
    base_NS = base_OD[tap].view(groups, -1)
    return (base_NS + delta_ABON[:, :, tap, :, None]).flatten(-2)
