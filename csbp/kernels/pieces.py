# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201 - arguments of kernels are pointers and tiles, which have no Python type
"""What the attention kernels share: tiles of rows and keys, and who sees what in them.

A tile meets first the keys (or rows) of which all is visible to all, without a mask, and then what is left at
both edges. Without WHOLE, where two loops do not fit a thread's registers, everything is an edge. Offsets of
tiles are int64, those inside a tile int32: no tensor is too large.

Legend: a slot is a row of a block before packing; M packed rows, one a query head of the group, share it.
N packed rows, T keys, A blocks of B slots, G groups, E head size (HEAD; WIDTH is the power of two above).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(1 << 30)  # beyond every key


@triton.jit
def load_rows(pointer, row, stride, valid, HEAD: tl.constexpr, WIDTH: tl.constexpr, GUARD: tl.constexpr):
    """[len(row), WIDTH] from `pointer`; zero where not `valid` (if GUARD) and beyond HEAD columns."""
    column = tl.arange(0, WIDTH)
    where = pointer + row[:, None] * stride + column[None, :]
    if GUARD and HEAD != WIDTH:
        return tl.load(where, mask=valid[:, None] & (column[None, :] < HEAD), other=0.0)
    if GUARD:
        return tl.load(where, mask=valid[:, None], other=0.0)
    if HEAD != WIDTH:
        return tl.load(where, mask=column[None, :] < HEAD, other=0.0)
    return tl.load(where)


@triton.jit
def store_rows(pointer, row, stride, valid, value, HEAD: tl.constexpr, WIDTH: tl.constexpr):
    """The opposite of `load_rows`."""
    column = tl.arange(0, WIDTH)
    where = pointer + row[:, None] * stride + column[None, :]
    tl.store(where, value, mask=valid[:, None] & (column[None, :] < HEAD))


@triton.jit
def product(x, y):
    """x·y in float32; float32 operands are not rounded to tf32."""
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def product_less(x, y, less_row):
    """x·y - less_row. Starting the sums from it needs no registers of its own for a vector over columns."""
    shape: tl.constexpr = [x.shape[0], y.shape[1]]
    return tl.dot(x, y, tl.broadcast_to(-less_row[None, :], shape), input_precision="ieee")


@triton.jit
def three_runs(begin, whole_begin, whole_end, end, STEP: tl.constexpr, WHOLE: tl.constexpr):
    """Cut [begin, end) in steps: edges before and after a run that lies inside [whole_begin, whole_end).

    Returns the number of left edge steps, start and number of the whole steps, number of right edge steps.
    """
    if not WHOLE:
        whole_begin, whole_end = end, end
    left = tl.cdiv(tl.maximum(tl.minimum(whole_begin, end) - begin, 0), STEP)
    middle = begin + left * STEP
    steps = tl.maximum(whole_end - middle, 0) // STEP
    right = tl.cdiv(tl.maximum(end - (middle + steps * STEP), 0), STEP)
    return left, middle, steps, right


@triton.jit
def edge_start(step, begin, left, after, STEP: tl.constexpr):
    """Where an edge step starts: the left ones from `begin`, then the right ones from `after`."""
    return tl.where(step < left, begin + step * STEP, after + (step - left) * STEP)


@triton.jit
def visible_runs(lo, hi, real, KEYS: tl.constexpr, WHOLE: tl.constexpr):
    """The keys that rows with ranges [lo, hi) see: begin and end, and what `three_runs` says of them."""
    some = real & (lo < hi)
    begin, end = tl.min(tl.where(some, lo, FAR)), tl.max(tl.where(some, hi, 0))
    whole_begin, whole_end = tl.max(tl.where(real, lo, 0)), tl.min(tl.where(real, hi, FAR))
    left, middle, steps, right = three_runs(begin, whole_begin, whole_end, end, KEYS, WHOLE)
    return begin, end, left, middle, steps, right


@triton.jit
def whole_tile(
    here,
    k_pointer,
    v_pointer,
    k_stride,
    v_stride,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Keys and values [here, here + KEYS), all of them present."""
    key = tl.arange(0, KEYS)
    far = here.to(tl.int64)
    k = load_rows(k_pointer + far * k_stride, key, k_stride, None, HEAD, WIDTH, False)
    v = load_rows(v_pointer + far * v_stride, key, v_stride, None, HEAD, WIDTH, False)
    return k, v


@triton.jit
def edge_tile(
    here,
    end,
    lo,
    hi,
    k_pointer,
    v_pointer,
    k_stride,
    v_stride,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Keys and values from `here` to `end` at most, and which of the rows with ranges [lo, hi) see them."""
    key = tl.arange(0, KEYS)
    present = here + key < end
    far = here.to(tl.int64)
    k = load_rows(k_pointer + far * k_stride, key, k_stride, present, HEAD, WIDTH, True)
    v = load_rows(v_pointer + far * v_stride, key, v_stride, present, HEAD, WIDTH, True)
    visible = (here + key[None, :] >= lo[:, None]) & (here + key[None, :] < hi[:, None])
    return k, v, visible


@triton.jit
def own_range(first, rows, SHARING: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Slots [begin, end) of the blocks that have rows in the tile that starts at `first`."""
    last_slot = (tl.minimum(first + ROWS, rows) - 1) // SHARING
    return (first // SHARING) // BLOCK * BLOCK, (last_slot // BLOCK + 1) * BLOCK


@triton.jit
def own_visible(mask_pointer, slot, key, valid, BLOCK: tl.constexpr):
    """[len(slot), len(key)]: may a slot see a slot of its own block; both are numbered through all blocks."""
    same = (slot[:, None] // BLOCK == key[None, :] // BLOCK) & valid
    seen = tl.load(mask_pointer + (slot[:, None] % BLOCK) * BLOCK + key[None, :] % BLOCK, mask=same, other=0)
    return same & (seen != 0)


@triton.jit
def own_tile(
    here,
    end,
    slot,
    real,
    group,
    k_pointer,
    v_pointer,
    mask_pointer,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Own-block keys and values from slot `here` to `end` at most, and which of the rows see them."""
    key = tl.arange(0, KEYS)
    present = here + key < end
    groups = tl.num_programs(1)
    where = (here.to(tl.int64) * groups + group) * HEAD
    k = load_rows(k_pointer + where, key, groups * HEAD, present, HEAD, WIDTH, True)
    v = load_rows(v_pointer + where, key, groups * HEAD, present, HEAD, WIDTH, True)
    return k, v, own_visible(mask_pointer, slot, here + key, real[:, None] & present[None, :], BLOCK)
