# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201 - arguments of kernels are pointers, which have no Python type
"""RMS norm in one pass forward and one backward. Legend: R rows, D normed size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.kernels.launch import Launch, power_above

ELEMENTS = 8192  # of a tile: one wide row, or many narrow ones
SPLITS = 528  # programs that share the rows in the backward pass: four for each of 132 processors


@triton.jit(do_not_specialize=["R"])
def norm_kernel(
    x_pointer, weight_pointer, y_pointer, inverse_pointer, R, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write y [R, D] and float32 inverse root mean squares [R]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < R)[:, None] & (column < D)[None, :]
    where = row.to(tl.int64)[:, None] * D + column[None, :]
    x = tl.load(x_pointer + where, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    weight = tl.load(weight_pointer + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(y_pointer + where, x * inverse[:, None] * weight[None, :], mask=inside)
    tl.store(inverse_pointer + row, inverse, mask=row < R)


@triton.jit(do_not_specialize=["R", "steps"])
def norm_gradient_kernel(
    x_pointer, weight_pointer, inverse_pointer, dy_pointer, dx_pointer, dweight_pointer, R, steps,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write dx [R, D], and float32 [splits, D]: each program's share of the weight's gradient."""
    column = tl.arange(0, WIDTH)
    weight = tl.load(weight_pointer + column, mask=column < D, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < R)[:, None] & (column < D)[None, :]
        where = row.to(tl.int64)[:, None] * D + column[None, :]
        x = tl.load(x_pointer + where, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_pointer + where, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_pointer + row, mask=row < R, other=0.0)[:, None]
        weighted = dy * weight[None, :]
        share = tl.sum(weighted * x, 1)[:, None] * inverse * inverse * inverse / D
        tl.store(dx_pointer + where, weighted * inverse - share * x, mask=inside)
        total += tl.sum(dy * x * inverse, 0)
    tl.store(dweight_pointer + tl.program_id(0) * D + column, total, mask=column < D)


def _options(width: int) -> dict[str, int]:
    padded = power_above(width)
    rows = max(1, ELEMENTS // 4 // padded)
    return {"D": width, "WIDTH": padded, "ROWS": rows, "num_warps": 8 if padded > 2048 else 4}


def norm_launch(y_RD: Tensor, inverse_R: Tensor, x_RD: Tensor, weight_D: Tensor, eps: float) -> Launch:
    """Dense rows."""
    rows, width = x_RD.shape
    options = _options(width)
    return Launch(
        norm_kernel, (-(-rows // options["ROWS"]),), (x_RD, weight_D, y_RD, inverse_R, rows, eps), options
    )


def norm_gradient_launch(
    dx_RD: Tensor, dweight_SD: Tensor, dy_RD: Tensor, x_RD: Tensor, weight_D: Tensor, inverse_R: Tensor
) -> Launch:
    """Dense rows; the S shares of the weight's gradient are to be summed."""
    rows, width = x_RD.shape
    options, splits = _options(width), len(dweight_SD)
    steps = -(-rows // (options["ROWS"] * splits))
    arguments = (x_RD, weight_D, inverse_R, dy_RD, dx_RD, dweight_SD, rows, steps)
    return Launch(norm_gradient_kernel, (splits,), arguments, options)


def norm(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows in x's type, and what the gradient needs."""
    rows = x.contiguous().view(-1, x.shape[-1])
    y = torch.empty_like(rows)
    inverse = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    norm_launch(y, inverse, rows, weight_D, eps).run()
    return y.view(x.shape), inverse


def norm_gradients(dy: Tensor, x: Tensor, weight_D: Tensor, inverse_R: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    rows = x.contiguous().view(-1, x.shape[-1])
    dx = torch.empty_like(rows)
    splits = min(SPLITS, -(-len(rows) // _options(rows.shape[1])["ROWS"]))
    dweight = torch.empty((splits, rows.shape[1]), dtype=torch.float32, device=x.device)
    norm_gradient_launch(dx, dweight, dy.contiguous().view(rows.shape), rows, weight_D, inverse_R).run()
    return dx.view(x.shape), dweight.sum(0).to(weight_D.dtype)
