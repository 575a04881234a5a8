# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202 - arguments of kernels are pointers, which have no Python type
"""Grouped dynamic causal convolution in one pass forward and one pass backward.

The plain form materialises [A, B, D] coefficients tap by tap. Here a program holds rows x groups of channels,
makes coefficients in registers, and adds the residual stream if there is one.

Legend: as in `drafter.convolution`; R = A·B rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.kernels.launch import Launch, power_above

ROWS = 16  # of a tile
CHANNELS = 256  # of a tile, about
SPLITS = 64  # programs that share the rows of one tile of channels in the backward pass


@triton.jit
def _coefficient(
    base_pointer,
    delta_pointer,
    row,
    tap,
    group,
    lane,
    valid,
    inside,
    D,
    GROUP: tl.constexpr,
    TAPS: tl.constexpr,
):
    """[rows, groups, lanes] float32: base of a tap plus the delta of each row; zero where not `valid`."""
    channel = group[:, None] * GROUP + lane[None, :]
    base = tl.load(base_pointer + tap * D + channel, mask=inside[:, None], other=0.0).to(tl.float32)
    where = (row.to(tl.int64) * TAPS + tap)[:, None] * (D // GROUP) + group[None, :]
    delta = tl.load(delta_pointer + where, mask=valid[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return base[None, :, :] + delta[:, :, None]


@triton.jit
def _tile(pointer, row, group, lane, valid, inside, D, GROUP: tl.constexpr):
    """[rows, groups, lanes] float32 of [R, D]; zero where not `valid`."""
    channel = group[:, None] * GROUP + lane[None, :]
    where = pointer + row.to(tl.int64)[:, None, None] * D + channel[None, :, :]
    return tl.load(where, mask=valid[:, None, None] & inside[None, :, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["R"])
def convolve_kernel(
    x_pointer,
    base_pointer,
    delta_pointer,
    residual_pointer,
    y_pointer,
    R,
    D,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write y [R, D], the convolution of x [R, D] with base [O, D] and delta [R, O, N], plus a residual.

    Program axes: tile of rows, tile of groups.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, GROUP)
    real, inside = row < R, group < D // GROUP
    y = tl.zeros([ROWS, GROUPS, GROUP], tl.float32)
    for tap in tl.static_range(TAPS):
        valid = real & (row % BLOCK >= tap)
        weight = _coefficient(
            base_pointer, delta_pointer, row, tap, group, lane, valid, inside, D, GROUP, TAPS
        )
        y += weight * _tile(x_pointer, row - tap, group, lane, valid, inside, D, GROUP)
    if RESIDUAL:
        y += _tile(residual_pointer, row, group, lane, real, inside, D, GROUP)
    where = row.to(tl.int64)[:, None, None] * D + (group[:, None] * GROUP + lane[None, :])[None, :, :]
    tl.store(y_pointer + where, y, mask=real[:, None, None] & inside[None, :, None])


@triton.jit(do_not_specialize=["R", "steps"])
def convolve_gradient_kernel(
    x_pointer,
    base_pointer,
    delta_pointer,
    dy_pointer,
    dx_pointer,
    ddelta_pointer,
    dbase_pointer,
    R,
    D,
    steps,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write dx [R, D], ddelta [R, O, N], and dbase float32 [splits, O, D]: the share of each program's rows.

    Program axes: run of `steps` tiles of rows, tile of groups.
    """
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, GROUP)
    inside = group < D // GROUP
    channel = group[:, None] * GROUP + lane[None, :]
    for tap in tl.static_range(TAPS):
        total = tl.zeros([GROUPS, GROUP], tl.float32)
        for step in range(steps):
            row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
            real = row < R
            valid = real & (row % BLOCK >= tap)
            dy = _tile(dy_pointer, row, group, lane, valid, inside, D, GROUP)
            x = _tile(x_pointer, row - tap, group, lane, valid, inside, D, GROUP)
            total += tl.sum(dy * x, 0)
            coefficient = (row.to(tl.int64) * TAPS + tap)[:, None] * (D // GROUP) + group[None, :]
            tl.store(ddelta_pointer + coefficient, tl.sum(dy * x, 2), mask=real[:, None] & inside[None, :])
        share = (tl.program_id(0) * TAPS + tap) * D + channel
        tl.store(dbase_pointer + share, total, mask=inside[:, None])
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        real = row < R
        dx = tl.zeros([ROWS, GROUPS, GROUP], tl.float32)
        for tap in tl.static_range(TAPS):
            # x of this row was multiplied into the row `tap` below it
            valid = real & (row % BLOCK + tap < BLOCK)
            weight = _coefficient(
                base_pointer, delta_pointer, row + tap, tap, group, lane, valid, inside, D, GROUP, TAPS
            )
            dx += weight * _tile(dy_pointer, row + tap, group, lane, valid, inside, D, GROUP)
        where = row.to(tl.int64)[:, None, None] * D + channel[None, :, :]
        tl.store(dx_pointer + where, dx, mask=real[:, None, None] & inside[None, :, None])


def convolve_launch(
    y_ABD: Tensor, x_ABD: Tensor, base_OD: Tensor, delta_ABON: Tensor, residual_ABD: Tensor | None
) -> Launch:
    """Write y; every tensor is dense, base and delta may be narrower or wider than x."""
    rows, grid, options = _sizes(x_ABD, base_OD, delta_ABON)
    residual = x_ABD if residual_ABD is None else residual_ABD
    arguments = (x_ABD, base_OD, delta_ABON, residual, y_ABD, rows, x_ABD.shape[2])
    return Launch(convolve_kernel, grid, arguments, {**options, "RESIDUAL": residual_ABD is not None})


def convolve_gradient_launch(
    dx_ABD: Tensor,
    ddelta_ABON: Tensor,
    dbase_SOD: Tensor,
    dy_ABD: Tensor,
    x_ABD: Tensor,
    base_OD: Tensor,
    delta_ABON: Tensor,
) -> Launch:
    """Write all three gradients; dbase [S, O, D] is to be summed over its S shares."""
    rows, (tiles, groups), options = _sizes(x_ABD, base_OD, delta_ABON)
    splits = len(dbase_SOD)
    arguments = (x_ABD, base_OD, delta_ABON, dy_ABD, dx_ABD, ddelta_ABON, dbase_SOD)
    return Launch(
        convolve_gradient_kernel,
        (splits, groups),
        (*arguments, rows, x_ABD.shape[2], -(-tiles // splits)),
        options,
    )


def _sizes(x_ABD: Tensor, base_OD: Tensor, delta_ABON: Tensor) -> tuple[int, tuple[int, int], dict[str, int]]:
    blocks, block, width = x_ABD.shape
    size = width // delta_ABON.shape[3]
    if size & (size - 1):
        raise ValueError(f"expected groups of a power of two of channels, found {size}")
    groups = max(1, min(CHANNELS // size, power_above(delta_ABON.shape[3])))
    options = {
        "BLOCK": block,
        "TAPS": len(base_OD),
        "GROUP": size,
        "ROWS": ROWS,
        "GROUPS": groups,
        "num_warps": 4,
        "num_stages": 2,
    }
    rows = blocks * block
    return rows, (-(-rows // ROWS), -(-delta_ABON.shape[3] // groups)), options


def convolve(
    x_ABD: Tensor, base_OD: Tensor, delta_ABON: Tensor, residual_ABD: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The convolution of x, plus the residual if there is one, as `dtype`; sums are float32."""
    y = torch.empty(x_ABD.shape, dtype=dtype, device=x_ABD.device)
    residual = None if residual_ABD is None else residual_ABD.contiguous()
    convolve_launch(y, x_ABD.contiguous(), base_OD.contiguous(), delta_ABON.contiguous(), residual).run()
    return y


def convolve_gradients(
    dy_ABD: Tensor, x_ABD: Tensor, base_OD: Tensor, delta_ABON: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, base and delta, each in its own type."""
    x, delta, base = x_ABD.contiguous(), delta_ABON.contiguous(), base_OD.contiguous()
    dx, ddelta = torch.empty_like(x), torch.empty_like(delta)
    splits = min(SPLITS, -(-x.shape[0] * x.shape[1] // ROWS))
    dbase = torch.empty((splits, *base.shape), dtype=torch.float32, device=x.device)
    convolve_gradient_launch(dx, ddelta, dbase, dy_ABD.contiguous(), x, base, delta).run()
    return dx, dbase.sum(0).to(base.dtype), ddelta
