# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202 - arguments of kernels are pointers and tiles, which have no Python type
"""The backward pass of block attention: queries by tiles of rows, keys and values by tiles of keys.

The weights are made again from the final log-sum-exp, so parts of the context are independent. No two
programs add to one element: results do not depend on the order in which programs run. Legend: as in
`csbp.kernels.pieces`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from csbp.kernels.pieces import (
    LOG2_E,
    edge_start,
    edge_tile,
    load_rows,
    own_range,
    own_tile,
    own_visible,
    product,
    product_less,
    store_rows,
    three_runs,
    visible_runs,
    whole_tile,
)


@triton.jit
def _query_gradient(dq, q, do, k, v, lse, delta, visible, factor, MASKED: tl.constexpr):
    weights = tl.exp2(product(q, tl.trans(k)) * factor - lse[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    ds = weights * (product(do, tl.trans(v)) - delta[:, None])
    return dq + product(ds.to(k.dtype), k)


@triton.jit(do_not_specialize=["rows"])
def query_gradient_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    lo_pointer,
    hi_pointer,
    own_k_pointer,
    own_v_pointer,
    own_mask_pointer,
    do_pointer,
    lse_pointer,
    delta_pointer,
    dq_pointer,
    rows,
    k_stride,
    v_stride,
    scale,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
):
    """Add to dq, float32 [G, N, E], the share of a part's keys (PART) and of the own block's (OWN).

    Program axes: tile of rows, group. do is [G, N, E] in the rows' type, lse and delta are float32 [G, N].
    The rest is as in `csbp.kernels.forward`.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    group = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    real = first + row < rows
    slot = (first + row) // SHARING
    lo = tl.load(lo_pointer + slot, mask=real, other=0)
    hi = tl.load(hi_pointer + slot // BLOCK, mask=real, other=0)
    start = group * rows + first
    q = load_rows(q_pointer + start * HEAD, row, HEAD, real, HEAD, WIDTH, True)
    do = load_rows(do_pointer + start * HEAD, row, HEAD, real, HEAD, WIDTH, True)
    lse = tl.load(lse_pointer + start + row, mask=real, other=0.0) * LOG2_E
    delta = tl.load(delta_pointer + start + row, mask=real, other=0.0)
    factor = scale * LOG2_E
    dq = tl.zeros([ROWS, WIDTH], tl.float32)

    if OWN:
        own_begin, own_end = own_range(first, rows, SHARING, BLOCK, ROWS)
        for step in tl.range(tl.cdiv(own_end - own_begin, OWN_KEYS), num_stages=1 if PART else EDGE_STAGES):
            here = own_begin + step * OWN_KEYS
            k, v, visible = own_tile(
                here, own_end, slot, real, group, own_k_pointer, own_v_pointer, own_mask_pointer,
                HEAD, WIDTH, BLOCK, OWN_KEYS,
            )  # fmt: skip
            dq = _query_gradient(dq, q, do, k, v, lse, delta, visible, factor, True)

    if PART:
        begin, end, left, middle, steps, right = visible_runs(lo, hi, real, KEYS, WHOLE)
        k_pointer += group * HEAD
        v_pointer += group * HEAD
        if WHOLE:
            for step in range(steps):
                k, v = whole_tile(
                    middle + step * KEYS, k_pointer, v_pointer, k_stride, v_stride, HEAD, WIDTH, KEYS
                )
                dq = _query_gradient(dq, q, do, k, v, lse, delta, None, factor, False)
        for step in tl.range(left + right, num_stages=EDGE_STAGES):
            here = edge_start(step, begin, left, middle + steps * KEYS, KEYS)
            k, v, visible = edge_tile(
                here, end, lo, hi, k_pointer, v_pointer, k_stride, v_stride, HEAD, WIDTH, KEYS
            )
            dq = _query_gradient(dq, q, do, k, v, lse, delta, visible, factor, True)

    before = load_rows(dq_pointer + start * HEAD, row, HEAD, real, HEAD, WIDTH, True)
    store_rows(dq_pointer + start * HEAD, row, HEAD, real, before + dq * scale, HEAD, WIDTH)


@triton.jit
def _key_gradients(dk, dv, k, v, q, do, lse, delta, visible, scale, MASKED: tl.constexpr):
    """Add rows to dk / scale and dv. Scores stand as [keys, rows]: no product has to turn its weights."""
    weights = tl.exp2(product_less(k, tl.trans(q), lse / scale) * (scale * LOG2_E))
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    ds = product_less(v, tl.trans(do), delta) * weights
    dv += product(weights.to(do.dtype), do)
    return dk + product(ds.to(q.dtype), q), dv


@triton.jit
def _edge_rows(
    here, end, q_pointer, do_pointer, lse_pointer, delta_pointer,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Queries, output gradients and statistics of rows from `here` to `end` at most, and which there are."""
    row = tl.arange(0, ROWS)
    present = here + row < end
    far = here.to(tl.int64)
    q = load_rows(q_pointer + far * HEAD, row, HEAD, present, HEAD, WIDTH, True)
    do = load_rows(do_pointer + far * HEAD, row, HEAD, present, HEAD, WIDTH, True)
    lse = tl.load(lse_pointer + far + row, mask=present, other=0.0)
    delta = tl.load(delta_pointer + far + row, mask=present, other=0.0)
    return q, do, lse, delta, present


@triton.jit(do_not_specialize=["rows", "keys", "tiles"])
def key_gradient_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    lo_pointer,
    hi_pointer,
    visitors_pointer,
    do_pointer,
    lse_pointer,
    delta_pointer,
    dk_pointer,
    dv_pointer,
    rows,
    keys,
    tiles,
    k_stride,
    v_stride,
    scale,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
):
    """Write dk and dv, float32 [T, G, E], of one tile of keys. Program axes: tile of keys, group.

    `visitors` is int32 [4, tiles]: the first block that sees some key of the tile, the first and last that
    see all of them, and the last that sees some (lasts are exclusive). `keys` is T. The rest is as in
    `query_gradient_kernel`.
    """
    tile = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    first = tile * KEYS
    key = tl.arange(0, KEYS)
    real = first + key < keys
    at = first.to(tl.int64)
    k = load_rows(k_pointer + at * k_stride + group * HEAD, key, k_stride, real, HEAD, WIDTH, True)
    v = load_rows(v_pointer + at * v_stride + group * HEAD, key, v_stride, real, HEAD, WIDTH, True)
    begin = tl.load(visitors_pointer + tile) * (BLOCK * SHARING)
    whole_begin = tl.load(visitors_pointer + tiles + tile) * (BLOCK * SHARING)
    whole_end = tl.load(visitors_pointer + 2 * tiles + tile) * (BLOCK * SHARING)
    end = tl.load(visitors_pointer + 3 * tiles + tile) * (BLOCK * SHARING)
    left, middle, steps, right = three_runs(begin, whole_begin, whole_end, end, ROWS, WHOLE)
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, WIDTH], tl.float32)
    row = tl.arange(0, ROWS)
    q_pointer += group * rows * HEAD
    do_pointer += group * rows * HEAD
    lse_pointer += group * rows
    delta_pointer += group * rows
    if WHOLE:
        for step in range(steps):
            far = (middle + step * ROWS).to(tl.int64)
            q = load_rows(q_pointer + far * HEAD, row, HEAD, None, HEAD, WIDTH, False)
            do = load_rows(do_pointer + far * HEAD, row, HEAD, None, HEAD, WIDTH, False)
            lse = tl.load(lse_pointer + far + row)
            delta = tl.load(delta_pointer + far + row)
            dk, dv = _key_gradients(dk, dv, k, v, q, do, lse, delta, None, scale, False)
    for step in tl.range(left + right, num_stages=EDGE_STAGES):
        here = edge_start(step, begin, left, middle + steps * ROWS, ROWS)
        q, do, lse, delta, present = _edge_rows(
            here, end, q_pointer, do_pointer, lse_pointer, delta_pointer, HEAD, WIDTH, ROWS
        )
        slot = (here + row) // SHARING
        lo = tl.load(lo_pointer + slot, mask=present, other=0)
        hi = tl.load(hi_pointer + slot // BLOCK, mask=present, other=0)
        visible = (first + key[:, None] >= lo[None, :]) & (first + key[:, None] < hi[None, :])
        dk, dv = _key_gradients(dk, dv, k, v, q, do, lse, delta, visible, scale, True)

    # A key's row in dk and dv holds all groups, without gaps.
    stride = tl.num_programs(1) * HEAD
    out = at * stride + group * HEAD
    store_rows(dk_pointer + out, key, stride, real, dk * scale, HEAD, WIDTH)
    store_rows(dv_pointer + out, key, stride, real, dv, HEAD, WIDTH)


@triton.jit(do_not_specialize=["rows", "keys"])
def own_gradient_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    mask_pointer,
    do_pointer,
    lse_pointer,
    delta_pointer,
    dk_pointer,
    dv_pointer,
    rows,
    keys,
    scale,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Write dk and dv, float32 [A·B, G, E], of a tile of own-block keys. Program axes: tile of keys, group.

    k and v are [A·B, G, E] without gaps and `keys` is A·B; the rest is as in `query_gradient_kernel`.
    """
    first = tl.program_id(0) * KEYS
    group = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, KEYS)
    real = first + key < keys
    stride = tl.num_programs(1) * HEAD
    at = first.to(tl.int64) * stride + group * HEAD
    k = load_rows(k_pointer + at, key, stride, real, HEAD, WIDTH, True)
    v = load_rows(v_pointer + at, key, stride, real, HEAD, WIDTH, True)
    begin = first // BLOCK * (BLOCK * SHARING)
    end = ((tl.minimum(first + KEYS, keys) - 1) // BLOCK + 1) * (BLOCK * SHARING)
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, WIDTH], tl.float32)
    q_pointer += group * rows * HEAD
    do_pointer += group * rows * HEAD
    lse_pointer += group * rows
    delta_pointer += group * rows
    for step in range(tl.cdiv(end - begin, ROWS)):
        here = begin + step * ROWS
        q, do, lse, delta, present = _edge_rows(
            here, end, q_pointer, do_pointer, lse_pointer, delta_pointer, HEAD, WIDTH, ROWS
        )
        slot = (here + tl.arange(0, ROWS)) // SHARING
        both = present[:, None] & real[None, :]
        visible = tl.trans(own_visible(mask_pointer, slot, first + key, both, BLOCK))
        dk, dv = _key_gradients(dk, dv, k, v, q, do, lse, delta, visible, scale, True)
    store_rows(dk_pointer + at, key, stride, real, dk * scale, HEAD, WIDTH)
    store_rows(dv_pointer + at, key, stride, real, dv, HEAD, WIDTH)
