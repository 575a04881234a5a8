# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201 - arguments of kernels are pointers, which have no Python type
"""silu(gate) * up and its gradients in one pass each, keeping nothing but gate and up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.kernels.launch import Launch

ELEMENTS = 2048  # of a program
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["elements"])
def swiglu_kernel(gate_pointer, up_pointer, out_pointer, elements, ELEMENTS: tl.constexpr):
    """One run of elements a program."""
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = index < elements
    gate = tl.load(gate_pointer + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_pointer + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_pointer + index, gate / (1.0 + tl.exp2(-gate * LOG2_E)) * up, mask=inside)


@triton.jit(do_not_specialize=["elements"])
def swiglu_gradient_kernel(
    gate_pointer, up_pointer, dout_pointer, dgate_pointer, dup_pointer, elements, ELEMENTS: tl.constexpr
):
    """The slope of silu is sigmoid * (1 + gate * (1 - sigmoid))."""
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = index < elements
    gate = tl.load(gate_pointer + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_pointer + index, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_pointer + index, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp2(-gate * LOG2_E))
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dgate_pointer + index, dout * up * slope, mask=inside)
    tl.store(dup_pointer + index, dout * gate * sigmoid, mask=inside)


def swiglu_launch(out: Tensor, gate: Tensor, up: Tensor) -> Launch:
    """Dense tensors of one shape."""
    grid = (-(-gate.numel() // ELEMENTS),)
    return Launch(swiglu_kernel, grid, (gate, up, out, gate.numel()), {"ELEMENTS": ELEMENTS, "num_warps": 4})


def swiglu_gradient_launch(dgate: Tensor, dup: Tensor, dout: Tensor, gate: Tensor, up: Tensor) -> Launch:
    """Dense tensors of one shape."""
    grid = (-(-gate.numel() // ELEMENTS),)
    arguments = (gate, up, dout, dgate, dup, gate.numel())
    return Launch(swiglu_gradient_kernel, grid, arguments, {"ELEMENTS": ELEMENTS, "num_warps": 4})


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The product, in the type of `gate`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    swiglu_launch(out, gate, up).run()
    return out


def swiglu_gradients(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    gate, up = gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    swiglu_gradient_launch(dgate, dup, dout.contiguous(), gate, up).run()
    return dgate, dup
