# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202 - arguments of kernels are pointers and tiles, which have no Python type
"""The forward pass of block attention: a program holds a tile of rows and meets the keys that the tile sees.

Products take the rows' own type and accumulate in float32; maxima, sums and weights are float32. Exponentials
are powers of two, so log2(e) is folded into the scale. Legend: as in `csbp.kernels.pieces`.
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
    product,
    store_rows,
    visible_runs,
    whole_tile,
)


@triton.jit
def _meet(numerator, top, total, q, k, v, visible, factor, MASKED: tl.constexpr):
    """Add keys to a running softmax; `top` is a finite power of two, so hidden scores weigh exactly 0."""
    scores = product(q, tl.trans(k))
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    numerator = numerator * shrink[:, None] + product(weights.to(v.dtype), v)
    return numerator, new_top, total


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    lo_pointer,
    hi_pointer,
    own_k_pointer,
    own_v_pointer,
    own_mask_pointer,
    numerator_pointer,
    top_pointer,
    total_pointer,
    rows,
    k_stride,
    v_stride,
    scale,
    floor,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
):
    """Softmax sums of a tile of rows over the keys it sees. Program axes: tile of rows, group.

    q is [G, N, E]; k and v are [T, G, E] with `k_stride` and `v_stride` elements between keys; lo and hi are
    int32 [A·B] and [A]. Numerator, top and total are float32 [G, N, E], [G, N] and [G, N]. With OWN they are
    begun (`floor` is what top is before any key, natural logarithm) and the own block's keys are met first:
    own k and v are [A, B, G, E], the mask [B, B] bytes. Otherwise they are read and go on. SHARING is M,
    `rows` N.
    """
    # Later tiles see more under full attention: the longest programs start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    group = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    real = first + row < rows
    slot = (first + row) // SHARING
    lo = tl.load(lo_pointer + slot, mask=real, other=0)
    hi = tl.load(hi_pointer + slot // BLOCK, mask=real, other=0)
    start = group * rows + first
    q = load_rows(q_pointer + start * HEAD, row, HEAD, real, HEAD, WIDTH, True)
    factor = scale * LOG2_E

    if OWN:
        top = tl.zeros([ROWS], tl.float32) + floor * LOG2_E
        total = tl.zeros([ROWS], tl.float32)
        numerator = tl.zeros([ROWS, WIDTH], tl.float32)
        own_begin, own_end = own_range(first, rows, SHARING, BLOCK, ROWS)
        for step in tl.range(tl.cdiv(own_end - own_begin, OWN_KEYS), num_stages=1):
            here = own_begin + step * OWN_KEYS
            k, v, visible = own_tile(
                here, own_end, slot, real, group, own_k_pointer, own_v_pointer, own_mask_pointer,
                HEAD, WIDTH, BLOCK, OWN_KEYS,
            )  # fmt: skip
            numerator, top, total = _meet(numerator, top, total, q, k, v, visible, factor, True)
    else:
        top = tl.load(top_pointer + start + row, mask=real, other=0.0) * LOG2_E
        total = tl.load(total_pointer + start + row, mask=real, other=0.0)
        numerator = load_rows(numerator_pointer + start * HEAD, row, HEAD, real, HEAD, WIDTH, True)

    begin, end, left, middle, steps, right = visible_runs(lo, hi, real, KEYS, WHOLE)
    k_pointer += group * HEAD
    v_pointer += group * HEAD
    if WHOLE:
        for step in range(steps):
            k, v = whole_tile(
                middle + step * KEYS, k_pointer, v_pointer, k_stride, v_stride, HEAD, WIDTH, KEYS
            )
            numerator, top, total = _meet(numerator, top, total, q, k, v, None, factor, False)
    for step in tl.range(left + right, num_stages=EDGE_STAGES):
        here = edge_start(step, begin, left, middle + steps * KEYS, KEYS)
        k, v, visible = edge_tile(
            here, end, lo, hi, k_pointer, v_pointer, k_stride, v_stride, HEAD, WIDTH, KEYS
        )
        numerator, top, total = _meet(numerator, top, total, q, k, v, visible, factor, True)

    tl.store(top_pointer + start + row, top / LOG2_E, mask=real)
    tl.store(total_pointer + start + row, total, mask=real)
    store_rows(numerator_pointer + start * HEAD, row, HEAD, real, numerator, HEAD, WIDTH)
