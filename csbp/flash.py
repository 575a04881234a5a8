"""The backend `flash`: attention in parts by PyTorch's own FlashAttention kernels (arXiv 2307.08691).

They return the log-sum-exp, so a part merges like any other: an output is a softmax state whose sum is 1. On
a CPU the kernel takes a mask, so it meets every key. On a GPU it takes none: it meets the keys that all rows
of a tile see, and the masked edges of the tile are met by the plain form. It pays where tiles are dense.

Shape legend: as in `csbp.attention`; n rows of a tile, s keys of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from csbp.attention import (
    PartGradients,
    Scores,
    SoftmaxState,
    Upstream,
    accumulator,
    composed,
    even_steps,
    hidden,
)
from csbp.tiles import TILE_SIZES, KeyRanges, Tile, TileSizes

# On a CPU a tile of a few thousand rows keeps every core busy; a mask has one number a row and key, whatever
# the number of heads, so its bound is that of a tile of scores.
_CPU_TILES = TileSizes(scores=2**20, rows=1024, thin_rows=10, thin_keys=32, start=60_000)
HALF = (torch.bfloat16, torch.float16)
_ATEN = torch.ops.aten


def check(device_type: str, dtype: torch.dtype, head: int) -> None:
    """Refuse rows that the GPU's kernels do not take.

    Raises:
        ValueError: names the backend to use.
    """
    if device_type != "cpu" and (dtype not in HALF or head % 8 or head > 256):
        raise ValueError(
            "on a GPU the flash backend takes bfloat16 and float16 rows with heads of a multiple of 8 up to "
            f"256, found {dtype} and {head}; use the torch backend"
        )


def takes_masks(device: torch.device) -> bool:
    return device.type == "cpu"


class _Step(NamedTuple):
    """Keys [lo, hi) of a tile; `hidden` says that some row does not see some of them."""

    tile: Tile
    lo: int
    hi: int
    hidden: bool


class _Part:
    """The tiles of a part, cut into steps."""

    def __init__(self, q_GNE: Tensor, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges) -> None:
        check(q_GNE.device.type, q_GNE.dtype, q_GNE.shape[-1])
        self.q, self.k, self.v, self.ranges = q_GNE, k_TGE, v_TGE, ranges
        self.masks = takes_masks(q_GNE.device)
        self.plain = Scores(q_GNE, k_TGE, ranges)
        self.per_block = self.plain.per_block

    def steps(self) -> Iterator[_Step]:
        sizes, heads = _CPU_TILES, 1
        if not self.masks:  # a masked edge is a tile of scores of every head
            sizes, heads = TILE_SIZES[self.q.device.type], self.q.shape[0]
        for tile in self.ranges.tiles(self.per_block, sizes):
            begin, end = min(max(tile.all_lo, tile.lo), tile.hi), max(tile.lo, min(tile.all_hi, tile.hi))
            most = max(16, sizes.scores // (heads * self.per_block * (tile.last - tile.first)))
            if begin >= end or (self.masks and tile.hi - tile.lo <= most):
                # nothing is seen by all, or one masked step does not cost more than three
                edges, dense = [(tile.lo, tile.hi)], []
            else:
                edges, dense = [(tile.lo, begin), (end, tile.hi)], [(begin, end)]
            yield from (_Step(tile, lo, hi, False) for lo, hi in dense)
            for first, last in edges:
                yield from (_Step(tile, lo, hi, True) for lo, hi in even_steps(first, last, most))

    def operands(self, step: _Step) -> tuple[Tensor, Tensor, Tensor]:
        """[1, G, n, E], and twice [1, G, s, E]."""
        q, (k, v) = self.q[None, :, self.rows(step)], (x[step.lo : step.hi] for x in (self.k, self.v))
        return q, k.permute(1, 0, 2)[None].to(q.dtype), v.permute(1, 0, 2)[None].to(q.dtype)

    def rows(self, step: _Step) -> slice:
        return self.plain.rows(step.tile)

    def mask(self, step: _Step) -> tuple[Tensor | None, Tensor | None]:
        """-inf where a row does not see a key, [n, s], and the rows that see none, [n]."""
        if not step.hidden:
            return None, None
        unseen = hidden(self.ranges, step.tile, step.lo, step.hi)
        unseen = unseen.repeat_interleave(self.per_block // self.ranges.lo.shape[1], 0)
        bias = torch.zeros(unseen.shape, dtype=self.q.dtype, device=self.q.device)
        return bias.masked_fill_(unseen, float("-inf")), unseen.all(1)


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [1, G, n, E] and log-sum-exp float32 or wider [1, G, n]."""
    if q.device.type == "cpu":
        found: tuple[Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias
        )
        return found
    output, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False)
    return output, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of these keys, for the output and log-sum-exp of the whole softmax."""
    if q.device.type == "cpu":
        found: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, output, lse, 0.0, False, attn_mask=bias
        )
        return found
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout that there is not
    gradients: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_backward(
        do, q, k, v, output, lse, None, None, q.shape[2], k.shape[2], 0.0, False, none, none
    )
    return gradients


def part_forward(state: SoftmaxState, q_GNE: Tensor, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges) -> None:
    """See `csbp.attention.PartForward`."""
    part = _Part(q_GNE, k_TGE, v_TGE, ranges)
    for step in part.steps():
        rows = part.rows(step)
        if step.hidden and not part.masks:
            part.plain.meet(state, step.tile, v_TGE, [(step.lo, step.hi)])
            continue
        bias, blind = part.mask(step)
        (output,), (lse,) = _forward(*part.operands(step), bias)
        if blind is not None:  # such a row has output 0 and log-sum-exp 0
            lse = lse.masked_fill(blind, torch.finfo(lse.dtype).min / 4)
        whole = SoftmaxState(output.to(accumulator(q_GNE)), lse, torch.ones_like(lse))
        SoftmaxState(state.numerator[:, rows], state.max[:, rows], state.total[:, rows]).merge(whole)


def part_backward(
    dq_GNE: Tensor, q_GNE: Tensor, upstream: Upstream, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges
) -> tuple[Tensor, Tensor]:
    """See `csbp.attention.PartBackward`.

    The kernels ask for the output only to make delta, the row sum of output times its gradient. Delta is all
    that parts pass on, so they get the multiple of the gradient that has this delta.
    """
    part = _Part(q_GNE, k_TGE, v_TGE, ranges)
    zeros = (torch.zeros_like(x, dtype=accumulator(q_GNE)) for x in (k_TGE, v_TGE))
    sums = PartGradients(dq_GNE, *zeros)
    do_GNE = upstream.do.to(q_GNE.dtype)
    squares_GN = do_GNE.to(accumulator(q_GNE)).square().sum(-1)
    factor_GN = torch.where(squares_GN > 0, upstream.delta / squares_GN, 0.0)
    output_GNE = (do_GNE * factor_GN[..., None]).to(q_GNE.dtype)
    for step in part.steps():
        rows = part.rows(step)
        if step.hidden and not part.masks:
            part.plain.gradients(sums, upstream, step.tile, v_TGE, [(step.lo, step.hi)])
            continue
        bias, _ = part.mask(step)
        do, output, lse = (x[None, :, rows] for x in (do_GNE, output_GNE, upstream.lse))
        dq, dk, dv = _backward(do, *part.operands(step), output, lse.contiguous(), bias)
        sums.dq[:, rows].add_(dq[0])
        sums.dk[step.lo : step.hi].add_(dk[0].permute(1, 0, 2))
        sums.dv[step.lo : step.hi].add_(dv[0].permute(1, 0, 2))
    return sums.dk, sums.dv


FLASH = composed(part_forward, part_backward)
