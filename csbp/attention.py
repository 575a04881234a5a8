"""Softmax attention in parts that add up exactly, each part over one contiguous range of context rows per
query.

For disjoint sets of keys the running triple (numerator, max, total) of a softmax merges without error, and
the backward pass of a part needs only its own keys, the output gradient and the final (delta, log-sum-exp).
So a rank may meet the context in any pieces and in any order (arXiv 2609.19242, Proposition 1).

Shape legend: A blocks, B rows of a block, H query heads, G key/value heads, M = H / G query heads that share
one key/value head, N = A·B·M packed query rows (block, slot, head of the group), T context rows, E head size.
Everything accumulates in fp32, or in float64 when the queries are float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from csbp.tiles import TILE_SIZES, KeyRanges, Tile
from drafter.attention import LayerMask


@dataclass
class SoftmaxState:
    """A softmax in progress: output = numerator / total, log-sum-exp = max + log(total).

    Attributes:
        numerator: [G, N, E], sum of exp(score - max) times values.
        max: [G, N], largest score so far.
        total: [G, N], sum of exp(score - max).
    """

    numerator: Tensor
    max: Tensor
    total: Tensor

    @classmethod
    def empty(cls, q_GNE: Tensor) -> SoftmaxState:
        numerator = torch.zeros_like(q_GNE, dtype=accumulator(q_GNE))
        # A finite floor, so that a row without visible keys gives exp(-inf - floor) = 0 and never a NaN.
        floor = torch.finfo(numerator.dtype).min / 4
        return cls(
            numerator, numerator.new_full(q_GNE.shape[:2], floor), numerator.new_zeros(q_GNE.shape[:2])
        )

    def merge(self, other: SoftmaxState) -> None:
        """Add the disjoint keys that `other` has seen."""
        top = torch.maximum(self.max, other.max)
        mine, theirs = torch.exp(self.max - top), torch.exp(other.max - top)
        self.numerator.mul_(mine[..., None]).add_(other.numerator * theirs[..., None])
        self.total.mul_(mine).add_(other.total * theirs)
        self.max.copy_(top)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return (output_GNE, lse_GN)."""
        return self.numerator / self.total[..., None], self.max + torch.log(self.total)


class Upstream(NamedTuple):
    """What the backward pass of any part needs to know of the finished softmax.

    Attributes:
        do: [G, N, E], gradient of the output.
        delta: [G, N], row sums of output gradient times final output.
        lse: [G, N], final log-sum-exp.
    """

    do: Tensor
    delta: Tensor
    lse: Tensor


class PartForward(Protocol):
    """Add the visible rows of one context part to `state`, in place."""

    def __call__(
        self, state: SoftmaxState, q_GNE: Tensor, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges
    ) -> None: ...


class PartBackward(Protocol):
    """Add one part's gradients to `dq_GNE`; return this part's (dk_TGE, dv_TGE) in the accumulator's type."""

    def __call__(
        self,
        dq_GNE: Tensor,
        q_GNE: Tensor,
        upstream: Upstream,
        k_TGE: Tensor,
        v_TGE: Tensor,
        ranges: KeyRanges,
    ) -> tuple[Tensor, Tensor]: ...


class OwnBlock(NamedTuple):
    """The blocks' own rows, which every block row meets besides the context.

    Attributes:
        k, v: [A, B, G, E].
        mask: bool [B, B], which slots (columns) of its own block a slot sees.
    """

    k: Tensor
    v: Tensor
    mask: Tensor


class Begin(Protocol):
    """Begin a softmax with the own blocks and one context part."""

    def __call__(
        self, q_GNE: Tensor, own: OwnBlock, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges
    ) -> SoftmaxState: ...


class BeginBackward(Protocol):
    """Add the gradients of what `Begin` met to `dq_GNE`; return (dk_ABGE, dv_ABGE, dk_TGE, dv_TGE)."""

    def __call__(
        self,
        dq_GNE: Tensor,
        q_GNE: Tensor,
        upstream: Upstream,
        own: OwnBlock,
        k_TGE: Tensor,
        v_TGE: Tensor,
        ranges: KeyRanges,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class Backend(NamedTuple):
    """One implementation of attention in parts; `csbp.backends` names those that exist."""

    forward: PartForward
    backward: PartBackward
    begin: Begin
    begin_backward: BeginBackward


def composed(forward: PartForward, backward: PartBackward) -> Backend:
    """A backend whose own blocks are met apart from the first context part."""

    def begin(q_GNE: Tensor, own: OwnBlock, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges) -> SoftmaxState:
        state = SoftmaxState.empty(q_GNE)
        own_block_forward(state, q_GNE, *own)
        forward(state, q_GNE, k_TGE, v_TGE, ranges)
        return state

    def begin_backward(
        dq_GNE: Tensor,
        q_GNE: Tensor,
        upstream: Upstream,
        own: OwnBlock,
        k_TGE: Tensor,
        v_TGE: Tensor,
        ranges: KeyRanges,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_own = own_block_backward(dq_GNE, q_GNE, upstream, *own)
        return *of_own, *backward(dq_GNE, q_GNE, upstream, k_TGE, v_TGE, ranges)

    return Backend(forward, backward, begin, begin_backward)


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def pack(x_ABHE: Tensor, groups: int) -> Tensor:
    """[A, B, H, E] -> contiguous [G, N, E]: the rows that share a key/value head become one matrix."""
    A, B, H, E = x_ABHE.shape
    split = x_ABHE.reshape(A * B, groups, H // groups, E)
    return split.permute(1, 0, 2, 3).reshape(groups, A * B * (H // groups), E).contiguous()


def unpack(x_GNE: Tensor, block_size: int, heads: int) -> Tensor:
    """The inverse of `pack`."""
    G, N, E = x_GNE.shape
    slots = N * G // heads
    rows = x_GNE.reshape(G, slots, heads // G, E).permute(1, 0, 2, 3)
    return rows.reshape(slots // block_size, block_size, heads, E)


def own_block_mask(mask: LayerMask, block_size: int, device: torch.device) -> Tensor:
    """Return bool [B, B]: slot p (row) may see slot k (column) of its own block."""
    slot = torch.arange(block_size, device=device)
    ahead = slot[None, :] - slot[:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if mask.causal:
        visible &= ahead <= 0
    if mask.window is not None:
        visible &= (-ahead < mask.window) & ((ahead < mask.window) | mask.causal)
    return visible


def _own_block_scores(q_GNE: Tensor, k_ABGE: Tensor, mask_BB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores [G·A, B·M, B] with their q and k in the same batched layout."""
    A, B, G, E = k_ABGE.shape
    q = q_GNE.to(accumulator(q_GNE)).reshape(G * A, -1, E) * E**-0.5
    k = k_ABGE.permute(2, 0, 1, 3).reshape(G * A, B, E).to(q.dtype)
    scores = torch.bmm(q, k.transpose(1, 2))
    scores.view(G * A, B, -1, B).masked_fill_(~mask_BB[:, None, :], float("-inf"))
    return scores, q, k


def own_block_forward(
    state: SoftmaxState, q_GNE: Tensor, k_ABGE: Tensor, v_ABGE: Tensor, mask_BB: Tensor
) -> None:
    """Add every block's own B rows to `state`, in place."""
    if k_ABGE.shape[0] == 0:
        return
    scores, q, _ = _own_block_scores(q_GNE, k_ABGE, mask_BB)
    v = v_ABGE.permute(2, 0, 1, 3).reshape(q.shape[0], -1, q.shape[2]).to(q.dtype)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    shape = q_GNE.shape
    state.merge(
        SoftmaxState(torch.bmm(weights, v).view(shape), top.view(shape[:2]), weights.sum(-1).view(shape[:2]))
    )


def own_block_backward(
    dq_GNE: Tensor, q_GNE: Tensor, upstream: Upstream, k_ABGE: Tensor, v_ABGE: Tensor, mask_BB: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the own-block part's gradient to `dq_GNE`; return (dk_ABGE, dv_ABGE)."""
    A, B, G, E = k_ABGE.shape
    if A == 0:
        return torch.zeros_like(k_ABGE), torch.zeros_like(v_ABGE)
    scores, q, k = _own_block_scores(q_GNE, k_ABGE, mask_BB)
    v = v_ABGE.permute(2, 0, 1, 3).reshape(G * A, B, E).to(q.dtype)
    do = upstream.do.to(q.dtype).reshape(G * A, -1, E)
    weights = torch.exp(scores - upstream.lse.reshape(G * A, -1, 1))
    ds = (torch.bmm(do, v.transpose(1, 2)) - upstream.delta.reshape(G * A, -1, 1)) * weights
    dq_GNE.add_(torch.bmm(ds, k).view(dq_GNE.shape), alpha=E**-0.5)
    dk, dv = torch.bmm(ds.transpose(1, 2), q), torch.bmm(weights.transpose(1, 2), do)
    return dk.view(G, A, B, E).permute(1, 2, 0, 3), dv.view(G, A, B, E).permute(1, 2, 0, 3)


class Scores:
    """Scores of one tile at a time, in scratch memory that all tiles of a part share."""

    def __init__(self, q_GNE: Tensor, k_TGE: Tensor, ranges: KeyRanges) -> None:
        self.q, self.k_TGE, self.ranges = q_GNE, k_TGE, ranges
        self.dtype = accumulator(q_GNE)
        self.per_block = q_GNE.shape[1] // max(1, ranges.hi.numel())
        self.scratch: dict[str, Tensor] = {}

    @property
    def tiles(self) -> list[Tile]:
        return self.ranges.tiles(self.per_block)

    def steps(self, tile: Tile) -> list[tuple[int, int]]:
        """Key ranges of `tile` whose scores fit the scratch bound, in nearly equal steps."""
        rows = self.q.shape[0] * self.per_block * (tile.last - tile.first)
        return even_steps(tile.lo, tile.hi, max(64, TILE_SIZES[self.q.device.type].scores // rows))

    def rows(self, tile: Tile) -> slice:
        return slice(tile.first * self.per_block, tile.last * self.per_block)

    def product(self, name: str, x_GnE: Tensor, y_GsE: Tensor) -> Tensor:
        """x·yᵀ in the scratch buffer `name`."""
        shape = (x_GnE.shape[0], x_GnE.shape[1], y_GsE.shape[1])
        size = shape[0] * shape[1] * shape[2]
        if name not in self.scratch or self.scratch[name].numel() < size:
            self.scratch[name] = x_GnE.new_empty(size)
        out = self.scratch[name][:size].view(shape)
        return torch.bmm(x_GnE, y_GsE.transpose(1, 2), out=out)

    def keys(self, rows_TGE: Tensor, lo: int, hi: int) -> Tensor:
        return rows_TGE[lo:hi].to(self.dtype).permute(1, 0, 2)

    def visible(self, tile: Tile, q_GnE: Tensor, k_GsE: Tensor, lo: int, hi: int) -> Tensor:
        """Scores [G, n, hi - lo] with -inf where a row does not see a key."""
        scores = self.product("scores", q_GnE, k_GsE)
        G, n, _ = scores.shape
        slots = self.ranges.lo.shape[1] * (tile.last - tile.first)
        # Keys left of all_lo and right of all_hi are hidden from some rows: only these edges are masked.
        for first, last in ((lo, min(hi, tile.all_lo)), (max(lo, tile.all_lo, tile.all_hi), hi)):
            if first >= last:
                continue
            edge = scores.view(G, slots, n // slots, hi - lo)[..., first - lo : last - lo]
            edge.masked_fill_(hidden(self.ranges, tile, first, last)[None, :, None], float("-inf"))
        return scores

    def meet(self, state: SoftmaxState, tile: Tile, v_TGE: Tensor, steps: Iterable[tuple[int, int]]) -> None:
        """Add ranges of keys of a tile to the rows of `state`."""
        rows = self.rows(tile)
        numerator, top, total = state.numerator[:, rows], state.max[:, rows], state.total[:, rows]
        q = self.q[:, rows].to(self.dtype) * self.q.shape[-1] ** -0.5
        for lo, hi in steps:
            scores = self.visible(tile, q, self.keys(self.k_TGE, lo, hi), lo, hi)
            new_top = torch.maximum(top, scores.amax(-1))
            weights = scores.sub_(new_top[..., None]).exp_()
            shrink = torch.exp(top - new_top)
            total.mul_(shrink).add_(weights.sum(-1))
            numerator.mul_(shrink[..., None]).add_(torch.bmm(weights, self.keys(v_TGE, lo, hi)))
            top.copy_(new_top)

    def gradients(
        self,
        sums: PartGradients,
        upstream: Upstream,
        tile: Tile,
        v_TGE: Tensor,
        steps: Iterable[tuple[int, int]],
    ) -> None:
        """Add the gradients of what `meet` does to `sums`."""
        rows, scale = self.rows(tile), self.q.shape[-1] ** -0.5
        q = self.q[:, rows].to(self.dtype) * scale
        do = upstream.do[:, rows].to(self.dtype)
        lse, delta = upstream.lse[:, rows, None], upstream.delta[:, rows, None]
        for lo, hi in steps:
            k = self.keys(self.k_TGE, lo, hi)
            weights = self.visible(tile, q, k, lo, hi).sub_(lse).exp_()
            _accumulate(sums.dv[lo:hi], weights, do)
            ds = self.product("ds", do, self.keys(v_TGE, lo, hi)).sub_(delta).mul_(weights)
            _accumulate(sums.dk[lo:hi], ds, q)
            sums.dq[:, rows].add_(torch.bmm(ds, k), alpha=scale)


class PartGradients(NamedTuple):
    """Sums of gradients in the accumulator's type: dq [G, N, E], dk and dv [T, G, E]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def even_steps(lo: int, hi: int, most: int) -> list[tuple[int, int]]:
    """Cut [lo, hi) into the fewest nearly equal steps of at most `most`."""
    count = -(-(hi - lo) // most)
    edges = [lo + (hi - lo) * i // count for i in range(count + 1)] if count else []
    return list(pairwise(edges))


def hidden(ranges: KeyRanges, tile: Tile, lo: int, hi: int) -> Tensor:
    """Return bool [slots, hi - lo]: the slots of a tile that do not see a key of [lo, hi)."""
    key = torch.arange(lo, hi, device=ranges.lo.device)
    bound_lo = ranges.lo[tile.first : tile.last, :, None]
    bound_hi = ranges.hi[tile.first : tile.last, None, None]
    return ((key < bound_lo) | (key >= bound_hi)).flatten(0, 1)


def part_forward(state: SoftmaxState, q_GNE: Tensor, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges) -> None:
    """Add the visible rows of one context part to `state`, in place.

    Args:
        state: the softmax of the same N rows so far.
        q_GNE: packed queries, unscaled.
        k_TGE: the part's keys, with norm and rotary angles.
        v_TGE: the part's values.
        ranges: the rows of the part that each block sees. Memory is bounded by a tile, never N x T.
    """
    scores = Scores(q_GNE, k_TGE, ranges)
    for tile in scores.tiles:
        scores.meet(state, tile, v_TGE, scores.steps(tile))


def part_backward(
    dq_GNE: Tensor, q_GNE: Tensor, upstream: Upstream, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges
) -> tuple[Tensor, Tensor]:
    """Add one part's gradients to `dq_GNE`; return this part's (dk_TGE, dv_TGE) in the accumulator's type.

    The weights are recomputed from the final log-sum-exp, so parts are independent of one another.
    """
    scores = Scores(q_GNE, k_TGE, ranges)
    zeros = (torch.zeros_like(x, dtype=scores.dtype) for x in (k_TGE, v_TGE))
    sums = PartGradients(dq_GNE, *zeros)
    for tile in scores.tiles:
        scores.gradients(sums, upstream, tile, v_TGE, scores.steps(tile))
    return sums.dk, sums.dv


def _accumulate(out_sGE: Tensor, x_Gns: Tensor, y_GnE: Tensor) -> None:
    """Add xᵀ·y, head by head, because a strided batch would be copied."""
    for g in range(x_Gns.shape[0]):
        out_sGE[:, g].addmm_(x_Gns[g].T, y_GnE[g])


TORCH = composed(part_forward, part_backward)
