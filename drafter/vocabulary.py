"""Cross entropy and top-k against the frozen head, in tiles: [rows, vocabulary] logits never exist.

The head does not train, so the gradient of a row's cross entropy,
dCE/dh = multiplier * (sum_v p_v s_v W_v - s_gold W_gold) with s the slope of the soft cap, is known as soon
as the softmax is. It is accumulated in the forward pass like flash attention with the head as keys and as
values: two products with the head in all, and a backward pass that only scales [M, D] by the incoming
gradient. Every other loss on hard labels is a function of CE alone (p_gold = exp(-CE)), so autograd does the
rest.

Shape legend: M rows, V vocabulary (or its sampled part), D hidden, k candidates, m rows of a tile, v columns
of a tile, c chunks, w columns of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.frozen import FrozenHead, LogitScale
from drafter.gather import gathered_dot
from drafter.kernels import fused
from drafter.precision import cpu_products, cpu_products_are_rounded

ROW_TILE = 512
VOCABULARY_TILE = 2048
CHUNK_BYTES = 5 << 29  # 2.5 GiB: products in float32 and weights in half precision of a chunk of the kernels


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary that a loss sees.

    Attributes:
        table: [S, D] head rows.
        gold: int64 [M], row of `table` that holds each label.
        log_weights: float32 [S] added to logits in the partition sum, or None for the whole vocabulary.
    """

    table: Tensor
    gold: Tensor
    log_weights: Tensor | None


def full_vocabulary(labels_M: Tensor, head: FrozenHead) -> Vocabulary:
    return Vocabulary(head.head, labels_M, None)


def sampled_vocabulary(
    labels_M: Tensor, head: FrozenHead, extra: int, generator: torch.Generator | None = None
) -> Vocabulary:
    """Take the labels, the most frequent tokens and a uniform sample of the rest.

    Half of `extra` goes to `head.frequent_ids`, where there are any. Each of the n drawn from the remaining N
    tokens stands for N / n of them, so its logit gets log(N / n) in the partition sum.
    """
    size = len(head.head)
    frequent = labels_M.new_empty(0) if head.frequent_ids is None else head.frequent_ids[: extra // 2]
    certain = torch.zeros(size, dtype=torch.bool, device=labels_M.device)
    certain[labels_M] = True
    certain[frequent] = True
    pool = (~certain).nonzero()[:, 0]
    drawn = min(extra - len(frequent), len(pool))
    order = torch.randperm(
        len(pool), generator=generator, device=None if generator is None else generator.device
    )
    picked = pool[order[:drawn].to(pool.device)]
    log_weights = torch.zeros(size, device=labels_M.device)
    log_weights[picked] = torch.log(torch.tensor(len(pool) / max(drawn, 1)))
    certain[picked] = True
    ids = certain.nonzero()[:, 0]
    return Vocabulary(head.head[ids], torch.searchsorted(ids, labels_M), log_weights[ids])


def cross_entropy(
    hidden_MD: Tensor,
    vocabulary: Vocabulary,
    scale: LogitScale,
    *,
    row_tile: int = ROW_TILE,
    vocabulary_tile: int = VOCABULARY_TILE,
) -> tuple[Tensor, Tensor]:
    """Return CE [M], differentiable in the rows, and bool [M]: is the label the best token of `vocabulary`.

    Peak extra memory is [M, D] for the kept gradient and row_tile * vocabulary_tile for a tile, both float32
    or wider. The probability of the label is exp(-CE).
    """
    ce_M, best_M, _ = _CrossEntropy.apply(hidden_MD, vocabulary, scale, (row_tile, vocabulary_tile), 0)
    return ce_M, best_M


def cross_entropy_with_candidates(
    hidden_MD: Tensor,
    vocabulary: Vocabulary,
    scale: LogitScale,
    k: int,
    *,
    row_tile: int = ROW_TILE,
    vocabulary_tile: int = VOCABULARY_TILE,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`cross_entropy`, and `top_k` [M, k] of `vocabulary` where the same products give it, else None."""
    searched = k if fused(hidden_MD) else 0
    ce_M, best_M, ids_Mk = _CrossEntropy.apply(
        hidden_MD, vocabulary, scale, (row_tile, vocabulary_tile), searched
    )
    return ce_M, best_M, ids_Mk if searched else None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        vocabulary: Vocabulary,
        scale: LogitScale,
        tile_sizes: tuple[int, int],
        k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ids_Mk = torch.empty(len(hidden_MD), 0, dtype=torch.int64, device=hidden_MD.device)
        if fused(hidden_MD):
            return _CrossEntropy._fused(ctx, hidden_MD, vocabulary, scale, k)
        with torch.autocast(hidden_MD.device.type, enabled=False):
            wide = torch.promote_types(hidden_MD.dtype, torch.float32)
            differentiable = ctx.needs_input_grad[0]
            ce_M = torch.empty(len(hidden_MD), dtype=wide, device=hidden_MD.device)
            best_M = torch.empty(len(hidden_MD), dtype=torch.bool, device=hidden_MD.device)
            gradient_MD = torch.empty(
                hidden_MD.shape if differentiable else (0,), dtype=wide, device=ce_M.device
            )
            for rows in tiles(len(hidden_MD), tile_sizes[0]):
                tile = _RowTile(hidden_MD[rows].to(wide), vocabulary.gold[rows], scale)
                for columns in tiles(len(vocabulary.table), tile_sizes[1]):
                    weights = None if vocabulary.log_weights is None else vocabulary.log_weights[columns]
                    tile.add(vocabulary.table[columns], columns.start, weights, differentiable=differentiable)
                ce_M[rows], best_M[rows] = tile.cross_entropy(), tile.gold_is_best()
                if differentiable:
                    gradient_MD[rows] = tile.gradient(vocabulary.table)
        ctx.save_for_backward(gradient_MD)
        ctx.dtype = hidden_MD.dtype
        ctx.mark_non_differentiable(best_M, ids_Mk)
        return ce_M, best_M, ids_Mk

    @staticmethod
    def _fused(
        ctx: Any, hidden_MD: Tensor, vocabulary: Vocabulary, scale: LogitScale, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from drafter.kernels.vocabulary import score

        with torch.autocast(hidden_MD.device.type, enabled=False):
            found = score(
                hidden_MD,
                vocabulary.table,
                vocabulary.gold,
                vocabulary.log_weights,
                scale.multiplier,
                scale.softcap,
                k=k,
                differentiable=ctx.needs_input_grad[0],
            )
        ctx.save_for_backward(found.gradient)
        ctx.dtype = hidden_MD.dtype
        ctx.mark_non_differentiable(found.best, found.candidates)
        return found.ce, found.best, found.candidates

    @staticmethod
    def backward(ctx: Any, grad_ce_M: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_MD,) = ctx.saved_tensors
        return (gradient_MD * grad_ce_M.unsqueeze(-1)).to(ctx.dtype), None, None, None, None


class _RowTile:
    """Online softmax of a few rows over the vocabulary, tile after tile."""

    def __init__(self, hidden_mD: Tensor, gold_m: Tensor, scale: LogitScale) -> None:
        self.rows_mD, self.gold_m, self.scale = hidden_mD * scale.multiplier, gold_m, scale
        self.maximum_m = hidden_mD.new_full((len(gold_m),), float("-inf"))
        self.best_m = self.maximum_m.clone()
        self.total_m = torch.zeros_like(self.maximum_m)
        self.gold_logit_m = torch.zeros_like(self.maximum_m)
        self.sum_mD = torch.zeros_like(hidden_mD)

    def add(
        self, table_vD: Tensor, start: int, log_weights_v: Tensor | None, *, differentiable: bool
    ) -> None:
        logits_mv, slope_mv = product(self.rows_mD, table_vD.T), None
        cap = self.scale.softcap
        if cap is not None:
            curve_mv = logits_mv.div_(cap).tanh_()
            slope_mv = 1 - curve_mv.square() if differentiable else None
            logits_mv = curve_mv.mul_(cap)
        inside_m = (self.gold_m >= start) & (self.gold_m < start + len(table_vD))
        local_m = (self.gold_m - start).clamp(0, len(table_vD) - 1)
        found_m = logits_mv.gather(1, local_m.unsqueeze(1)).squeeze(1)
        self.gold_logit_m = torch.where(inside_m, found_m, self.gold_logit_m)
        peak_m = logits_mv.amax(1)
        self.best_m = torch.maximum(self.best_m, peak_m)
        if log_weights_v is not None:
            peak_m = logits_mv.add_(log_weights_v).amax(1)
        maximum_m = torch.maximum(self.maximum_m, peak_m)
        decay_m = (self.maximum_m - maximum_m).exp_()
        mass_mv = logits_mv.sub_(maximum_m.unsqueeze(1)).exp_()
        self.total_m.mul_(decay_m).add_(mass_mv.sum(1))
        self.maximum_m = maximum_m
        if differentiable:
            if slope_mv is not None:
                mass_mv.mul_(slope_mv)
            self.sum_mD.mul_(decay_m.unsqueeze(1)).add_(product(mass_mv, table_vD))

    def cross_entropy(self) -> Tensor:
        return self.maximum_m + self.total_m.log() - self.gold_logit_m

    def gold_is_best(self) -> Tensor:
        return self.gold_logit_m >= self.best_m

    def gradient(self, table: Tensor) -> Tensor:
        gold_rows_mD = table[self.gold_m].to(self.sum_mD.dtype)
        if self.scale.softcap is not None:
            gold_rows_mD = gold_rows_mD * (1 - (self.gold_logit_m / self.scale.softcap).square()).unsqueeze(1)
        return (self.sum_mD / self.total_m.unsqueeze(1) - gold_rows_mD) * self.scale.multiplier


@torch.no_grad()
def top_k(
    hidden_MD: Tensor,
    head: FrozenHead,
    k: int,
    *,
    row_tile: int = ROW_TILE,
    vocabulary_tile: int = VOCABULARY_TILE,
) -> Tensor:
    """Return int64 [M, k], the k best tokens of each row over the whole vocabulary, best first.

    A positive multiplier and the soft cap are monotone, so the products alone decide the order. Fewer rows
    than `row_tile` get wider tiles of as many products; where `head.product` exists they are as wide as the
    vocabulary. Where a CPU rounds operands to bfloat16, twice as many are searched with rounded products
    and ordered by exact ones.
    """
    tile_sizes = row_tile, vocabulary_tile
    with torch.autocast(hidden_MD.device.type, enabled=False):
        if head.product is not None:
            found = [largest(head.product(hidden_MD[rows]), k)[1] for rows in tiles(len(hidden_MD), row_tile)]
            return torch.cat([torch.empty(0, k, dtype=torch.int64, device=hidden_MD.device), *found])
        if not cpu_products_are_rounded(hidden_MD):
            wide = torch.promote_types(hidden_MD.dtype, torch.float32)
            return _search(hidden_MD.to(wide), head.head, k, tile_sizes)
        ids_Mn = _search(
            hidden_MD.to(torch.bfloat16), head.narrow_head, min(2 * k, len(head.head)), tile_sizes
        )
        with cpu_products("fp32"):
            exact_Mn = gathered_dot(hidden_MD, head.head, ids_Mn)
        return ids_Mn.gather(1, exact_Mn.topk(k, dim=1).indices)


def _search(hidden_MD: Tensor, table_VD: Tensor, k: int, tile_sizes: tuple[int, int]) -> Tensor:
    """`top_k` by products in the rows' dtype."""
    row_tile, vocabulary_tile = tile_sizes
    ids_Mk = torch.empty(len(hidden_MD), k, dtype=torch.int64, device=hidden_MD.device)
    for rows in tiles(len(hidden_MD), row_tile):
        hidden_mD = hidden_MD[rows]
        best = hidden_mD.new_empty(len(hidden_mD), 0)
        ids = ids_Mk.new_empty(len(hidden_mD), 0)
        for columns in tiles(len(table_VD), vocabulary_tile * row_tile // len(hidden_mD)):
            values, places = largest(product(hidden_mD, table_VD[columns].T), k)
            best, ids = torch.cat((best, values), 1), torch.cat((ids, places + columns.start), 1)
            best, places = best.topk(min(k, best.shape[1]), dim=1)
            ids = ids.gather(1, places)
        ids_Mk[rows] = ids
    return ids_Mk


def largest(values_mv: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row (all, where there are fewer), largest first, and their columns.

    The same as `torch.topk`, in one pass over the values: the k largest lie in the k chunks with the largest
    maxima, so only those chunks are sorted. Columns c, c + chunks, c + 2 * chunks, ... make up chunk c.
    """
    width = values_mv.shape[1]
    # chunks of sqrt(V / k) make the two things to sort equally long; the pass over them favours shorter ones
    chunk = math.isqrt(width // k) * 2 // 3
    chunks = width // max(chunk, 1)
    if chunk < 4 or chunks <= k:
        return values_mv.topk(min(k, width), dim=1)
    peaks_mc = values_mv[:, : chunk * chunks].unflatten(1, (chunk, chunks)).amax(1)
    chosen_mk = peaks_mc.topk(k, dim=1, sorted=False).indices
    steps_w = torch.arange(0, chunk * chunks, chunks, device=values_mv.device)
    columns_mn = (chosen_mk.unsqueeze(2) + steps_w).flatten(1)
    rest = torch.arange(chunk * chunks, width, device=values_mv.device)
    columns_mn = torch.cat((columns_mn, rest.expand(len(values_mv), -1)), 1)
    values_mk, order_mk = values_mv.gather(1, columns_mn).topk(k, dim=1)
    return values_mk, columns_mn.gather(1, order_mk)


def all_logits(hidden: Tensor, head: FrozenHead, scale: LogitScale) -> Tensor:
    """Return the logits [..., V] of all tokens for rows [..., D]: for a few rows."""
    if head.product is not None:
        return scale(head.product(hidden))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return scale(hidden.to(wide) @ head.head.to(wide).T)


def candidate_logits(hidden_MD: Tensor, head: FrozenHead, ids_Mk: Tensor, scale: LogitScale) -> Tensor:
    """Return the logits [M, k] of given tokens, differentiable in the rows."""
    return scale(gathered_dot(hidden_MD, head.head, ids_Mk))


def product(rows: Tensor, table: Tensor) -> Tensor:
    """Multiply in the table's half precision where tensor cores sum in float32, else in the rows' dtype."""
    if rows.is_cuda and table.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(rows.to(table.dtype), table, out_dtype=torch.float32)
    return rows @ table.to(rows.dtype)


def chunk_rows(rows: int, columns: int, element_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows of a chunk of `drafter.kernels.vocabulary`: equal chunks of whole tiles of 128 rows that
    `chunk_bytes` hold, at least one tile.
    """
    most = max(128, chunk_bytes // (columns * (4 + element_bytes)) // 128 * 128)
    chunks = -(-rows // most)
    return max(1, -(-rows // (128 * max(1, chunks))) * 128)


def tiles(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
