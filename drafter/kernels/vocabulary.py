# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202 - arguments of kernels are pointers, which have no Python type
"""Cross entropy and exact top-k of the frozen head in two products and two passes over a chunk of rows.

A chunk's products with the whole head are made once, in float32, by the library's matrix product. One pass
finds each row's largest logit, its sum of exponentials, the label's logit and the largest product of every
segment of 64 columns. A second turns logits into the weights of the gradient, in half precision, for the
second product. The k best tokens lie in the k segments with the largest maxima: no product is needed there.

Legend: as in `drafter.vocabulary`; m rows of a chunk, V columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafter.kernels.launch import Launch
from drafter.vocabulary import CHUNK_BYTES, chunk_rows, product

LOG2_E = tl.constexpr(1.4426950408889634)
SEGMENT = 64  # columns with one maximum
COLUMNS = 4096  # of a step


@triton.jit
def _capped(product, softcap, SOFTCAP: tl.constexpr):
    """The soft cap's tanh(z / s), from exponentials of a number that is never positive; or z as it is."""
    if SOFTCAP:
        decay = tl.exp2(tl.abs(product) * (-2.0 * LOG2_E) / softcap)
        curve = (1.0 - decay) / (1.0 + decay)
        return tl.where(product < 0, -curve, curve)
    return product


@triton.jit
def statistics_kernel(
    products_pointer,
    gold_pointer,
    weights_pointer,
    top_pointer,
    total_pointer,
    gold_logit_pointer,
    best_pointer,
    segments_pointer,
    V,
    segments,
    softcap,
    SOFTCAP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """One row of float32 products [m, V] a program.

    Writes float32 [m] top (largest logit, log weight included), total (sum of exponentials less top),
    gold_logit and best (largest logit); with SEGMENTS also each segment's largest product, [m, segments].
    """
    row = tl.program_id(0).to(tl.int64)
    products_pointer += row * V
    column = tl.arange(0, COLUMNS)
    top = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for first in range(0, V, COLUMNS):
        inside = first + column < V
        product = tl.load(products_pointer + first + column, mask=inside, other=float("-inf"))
        if SEGMENTS:
            maxima = tl.max(tl.reshape(product, [COLUMNS // SEGMENT, SEGMENT]), 1)
            segment = first // SEGMENT + tl.arange(0, COLUMNS // SEGMENT)
            tl.store(segments_pointer + row * segments + segment, maxima, mask=segment < segments)
        logit = _capped(product, softcap, SOFTCAP)
        if SOFTCAP:
            logit = tl.where(inside, logit * softcap, float("-inf"))
        best = tl.maximum(best, tl.max(logit, 0))
        if WEIGHTED:
            logit += tl.load(weights_pointer + first + column, mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(logit, 0))
        total = total * tl.exp2((top - new_top) * LOG2_E) + tl.sum(tl.exp2((logit - new_top) * LOG2_E), 0)
        top = new_top
    gold = tl.load(products_pointer + tl.load(gold_pointer + row))
    gold = _capped(gold, softcap, SOFTCAP)
    if SOFTCAP:
        gold = gold * softcap
    tl.store(top_pointer + row, top)
    tl.store(total_pointer + row, total)
    tl.store(best_pointer + row, best)
    tl.store(gold_logit_pointer + row, gold)


@triton.jit
def weights_kernel(
    products_pointer,
    log_weights_pointer,
    top_pointer,
    out_pointer,
    V,
    softcap,
    SOFTCAP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """exp(logit - top) times the slope of the soft cap, [m, V] in `out`'s type. Axes: row, step of columns.

    The largest one is 1 exactly, so a row whose label is nearly certain keeps its small gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < V
    product = tl.load(products_pointer + row * V + column, mask=inside, other=0.0)
    curve = _capped(product, softcap, SOFTCAP)
    logit = curve
    if SOFTCAP:
        logit = curve * softcap
    if WEIGHTED:
        logit += tl.load(log_weights_pointer + column, mask=inside, other=0.0)
    weight = tl.exp2((logit - tl.load(top_pointer + row)) * LOG2_E)
    if SOFTCAP:
        weight *= 1.0 - curve * curve
    tl.store(out_pointer + row * V + column, weight, mask=inside)


class Statistics(NamedTuple):
    """float32 [m] each, and the maxima of segments [m, segments] of products."""

    top: Tensor
    total: Tensor
    gold_logit: Tensor
    best: Tensor
    segments: Tensor


def empty_statistics(products_mV: Tensor, *, segments: bool) -> Statistics:
    rows, columns = products_mV.shape
    width = -(-columns // SEGMENT) if segments else 0
    top, total, gold_logit, best = products_mV.new_empty(4, rows)
    return Statistics(top, total, gold_logit, best, products_mV.new_empty(rows, width))


def statistics_launch(
    found: Statistics,
    products_mV: Tensor,
    gold_m: Tensor,
    log_weights_V: Tensor | None,
    softcap: float | None,
) -> Launch:
    """Fill `found` from the float32 products of a chunk, which `softcap` turns into logits."""
    rows, columns = products_mV.shape
    options = {
        "SOFTCAP": softcap is not None,
        "WEIGHTED": log_weights_V is not None,
        "SEGMENTS": found.segments.shape[1] > 0,
        "COLUMNS": COLUMNS,
        "SEGMENT": SEGMENT,
        "num_warps": 8,
        "num_stages": 3,
    }
    arguments = (
        *(products_mV, gold_m, products_mV if log_weights_V is None else log_weights_V),
        *(found.top, found.total, found.gold_logit, found.best, found.segments),
        *(columns, found.segments.shape[1], 1.0 if softcap is None else softcap),
    )
    return Launch(statistics_kernel, (rows,), arguments, options)


def weights_launch(
    out_mV: Tensor, products_mV: Tensor, top_m: Tensor, log_weights_V: Tensor | None, softcap: float | None
) -> Launch:
    """Write the weights of the second product."""
    rows, columns = products_mV.shape
    options = {
        "SOFTCAP": softcap is not None,
        "WEIGHTED": log_weights_V is not None,
        "COLUMNS": COLUMNS,
        "num_warps": 8,
        "num_stages": 1,
    }
    arguments = (
        *(products_mV, products_mV if log_weights_V is None else log_weights_V, top_m, out_mV),
        *(columns, 1.0 if softcap is None else softcap),
    )
    return Launch(weights_kernel, (rows, -(-columns // COLUMNS)), arguments, options)


def best_tokens(products_mV: Tensor, segments_mS: Tensor, k: int) -> Tensor:
    """int64 [m, k]: columns of the k largest products, largest first.

    Args:
        products_mV: float32.
        segments_mS: the largest of every SEGMENT products.
        k: at most V.
    """
    columns = products_mV.shape[1]
    chosen_mk = segments_mS.topk(min(k, segments_mS.shape[1]), dim=1, sorted=False).indices
    inside = torch.arange(SEGMENT, device=products_mV.device)
    column_mn = (chosen_mk[:, :, None] * SEGMENT + inside).flatten(1)
    values_mn = products_mV.gather(1, column_mn.clamp(max=columns - 1))
    values_mn.masked_fill_(column_mn >= columns, float("-inf"))
    return column_mn.gather(1, values_mn.topk(k, dim=1).indices)


class Scored(NamedTuple):
    """Attributes:
    ce: float32 [M].
    best: bool [M], the label is the best token.
    gradient: float32 [M, D] of CE by the rows, or [0] where it was not asked for.
    candidates: int64 [M, k], the k best tokens, best first.
    """

    ce: Tensor
    best: Tensor
    gradient: Tensor
    candidates: Tensor


def score(
    hidden_MD: Tensor,
    table_VD: Tensor,
    gold_M: Tensor,
    log_weights_V: Tensor | None,
    multiplier: float,
    softcap: float | None,
    *,
    k: int,
    differentiable: bool,
    chunk_bytes: int = CHUNK_BYTES,
) -> Scored:
    """Cross entropy of rows with the whole table, its gradient, and the k best tokens.

    Args:
        hidden_MD: final-normed states.
        table_VD: the frozen head.
        gold_M: int64, row of the table that is the label.
        log_weights_V: added to logits in the partition sum, or None.
        multiplier: from a product to a logit.
        softcap: of logits, or None.
        k: 0 for no candidates.
        differentiable: make the gradient.
        chunk_bytes: what the largest chunk may take.
    """
    (rows, width), columns = hidden_MD.shape, len(table_VD)
    ce = torch.empty(rows, dtype=torch.float32, device=hidden_MD.device)
    gradient = ce.new_empty((rows, width) if differentiable else 0)
    best = torch.empty(rows, dtype=torch.bool, device=ce.device)
    candidates = torch.empty(rows, k, dtype=torch.int64, device=ce.device)
    half = table_VD.dtype if table_VD.element_size() == 2 and hidden_MD.is_cuda else torch.float32
    step = chunk_rows(rows, columns, half.itemsize, chunk_bytes)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        products = product(hidden_MD[part].float() * multiplier, table_VD.T)
        found = empty_statistics(products, segments=k > 0)
        statistics_launch(found, products, gold_M[part], log_weights_V, softcap).run()
        ce[part] = found.top + found.total.log() - found.gold_logit
        best[part] = found.gold_logit >= found.best
        if k:
            candidates[part] = best_tokens(products, found.segments, k)
        if differentiable:
            weights = torch.empty(products.shape, dtype=half, device=ce.device)
            weights_launch(weights, products, found.top, log_weights_V, softcap).run()
            gold = table_VD[gold_M[part]].float()
            if softcap is not None:
                gold *= (1 - (found.gold_logit / softcap).square()).unsqueeze(1)
            sums = product(weights, table_VD).div_(found.total.unsqueeze(1))
            gradient[part] = sums.sub_(gold).mul_(multiplier)
    return Scored(ce, best, gradient, candidates)
