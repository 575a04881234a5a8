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

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafter.attention import LayerMask

# Bounds of one tile of scores: 2**18 fp32 scores are 1 MiB, so the two tiles of the backward pass fit the
# second-level cache of a core.
TILE_SCORES = 2**18
TILE_ROWS = 192
# What a tile costs beyond its n x s scores, in scores: n rows cost like THIN_ROWS more, s keys like THIN_KEYS
# more (rescaling the sums), and every tile START_SCORES (measured in fp32 with E = 64 on one AVX-512 core).
THIN_ROWS = 10
THIN_KEYS = 32
START_SCORES = 6_000


class Tile(NamedTuple):
    """Blocks [first, last) over keys [lo, hi); every row of them sees all keys of [all_lo, all_hi)."""

    first: int
    last: int
    lo: int
    hi: int
    all_lo: int
    all_hi: int


@dataclass(frozen=True)
class KeyRanges:
    """Which of T keys the rows of A blocks see: slot j of block a sees [lo[a, j], hi[a]).

    Both bounds must not decrease with a (blocks ascend along the axis), which keeps neighbours' ranges close.

    Attributes:
        lo_AB: int64 [A, B].
        hi_A: int64 [A].
    """

    lo_AB: Tensor
    hi_A: Tensor
    _tiles: dict[int, list[Tile]] = field(default_factory=dict, repr=False, compare=False)

    def tiles(self, rows: int) -> list[Tile]:
        """Rectangles that cover what is visible, thick enough for matrix products and nearly free of waste.

        Computed once for blocks of `rows` packed rows: the layers of a step share their ranges.
        """
        if rows not in self._tiles:
            lo, last_lo, hi = self.lo_AB[:, 0].tolist(), self.lo_AB[:, -1].tolist(), self.hi_A.tolist()
            cells = _merge(_cells(lo, hi), rows)
            self._tiles[rows] = [tile for cell in cells for tile in _split(cell, rows, lo, last_lo, hi)]
        return self._tiles[rows]


class _Cell(NamedTuple):
    """Keys [lo, hi) and blocks [first, last) that see at least some of them; `seen` counts visible pairs."""

    lo: int
    hi: int
    first: int
    last: int
    seen: int


def _cells(lo: list[int], hi: list[int]) -> list[_Cell]:
    """Cut the keys where a range begins or ends; between cuts the same neighbouring blocks see every key."""
    edges = sorted({*lo, *hi})
    cells = []
    for k0, k1 in pairwise(edges):
        first, last = bisect_right(hi, k0), bisect_right(lo, k0)
        if first < last:
            cells.append(_Cell(k0, k1, first, last, (last - first) * (k1 - k0)))
    return cells


def _merge(cells: list[_Cell], rows: int) -> list[_Cell]:
    """Join neighbours while a joint cell wastes fewer scores than a tile costs beside its scores."""
    merged: list[_Cell] = []
    for cell in cells:
        if merged:
            before = merged[-1]
            joint = _Cell(before.lo, cell.hi, before.first, cell.last, before.seen + cell.seen)
            n = rows * (joint.last - joint.first)
            chunks = -(-n // TILE_ROWS)
            waste = n * (joint.hi - joint.lo) - rows * joint.seen
            if waste <= THIN_KEYS * (n + THIN_ROWS * chunks) + START_SCORES * chunks:
                merged[-1] = joint
                continue
        merged.append(cell)
    return merged


def _split(cell: _Cell, rows: int, lo: list[int], last_lo: list[int], hi: list[int]) -> list[Tile]:
    """Cut a cell's blocks into tiles of about TILE_ROWS rows, each with only the keys that its blocks see."""
    count = min(cell.last - cell.first, -(-(cell.last - cell.first) * rows // TILE_ROWS))
    edges = [cell.first + (cell.last - cell.first) * i // count for i in range(count + 1)]
    tiles = []
    for first, last in pairwise(edges):
        k0, k1 = max(cell.lo, lo[first]), min(cell.hi, hi[last - 1])
        if k0 < k1:
            tiles.append(Tile(first, last, k0, k1, last_lo[last - 1], hi[first]))
    return tiles


@dataclass
class SoftmaxState:
    """A softmax in progress: output = numerator / total, log-sum-exp = max + log(total)."""

    numerator_GNE: Tensor
    max_GN: Tensor
    total_GN: Tensor

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
        top = torch.maximum(self.max_GN, other.max_GN)
        mine, theirs = torch.exp(self.max_GN - top), torch.exp(other.max_GN - top)
        self.numerator_GNE.mul_(mine[..., None]).add_(other.numerator_GNE * theirs[..., None])
        self.total_GN.mul_(mine).add_(other.total_GN * theirs)
        self.max_GN.copy_(top)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return (output_GNE, lse_GN)."""
        return self.numerator_GNE / self.total_GN[..., None], self.max_GN + torch.log(self.total_GN)


class Upstream(NamedTuple):
    """What the backward pass of any part needs to know of the finished softmax.

    delta is the row sum of output gradient times final output; lse the final log-sum-exp.
    """

    do_GNE: Tensor
    delta_GN: Tensor
    lse_GN: Tensor


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


class Backend(NamedTuple):
    forward: PartForward
    backward: PartBackward


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def pack(x_ABHE: Tensor, groups: int) -> Tensor:
    """[A, B, H, E] -> contiguous [G, N, E]: the rows that share a key/value head become one matrix."""
    A, B, H, E = x_ABHE.shape
    split = x_ABHE.reshape(A * B, groups, H // groups, E)
    return split.permute(1, 0, 2, 3).reshape(groups, A * B * (H // groups), E)


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
    do = upstream.do_GNE.to(q.dtype).reshape(G * A, -1, E)
    weights = torch.exp(scores - upstream.lse_GN.reshape(G * A, -1, 1))
    ds = (torch.bmm(do, v.transpose(1, 2)) - upstream.delta_GN.reshape(G * A, -1, 1)) * weights
    dq_GNE.add_(torch.bmm(ds, k).view(dq_GNE.shape), alpha=E**-0.5)
    dk, dv = torch.bmm(ds.transpose(1, 2), q), torch.bmm(weights.transpose(1, 2), do)
    return dk.view(G, A, B, E).permute(1, 2, 0, 3), dv.view(G, A, B, E).permute(1, 2, 0, 3)


class _Scores:
    """Scores of one tile at a time, in scratch memory that all tiles of a part share."""

    def __init__(self, q_GNE: Tensor, k_TGE: Tensor, ranges: KeyRanges) -> None:
        self.q_GNE, self.k_TGE, self.ranges = q_GNE, k_TGE, ranges
        self.dtype = accumulator(q_GNE)
        self.per_block = q_GNE.shape[1] // max(1, ranges.hi_A.numel())
        self.tiles = ranges.tiles(self.per_block)
        self.scratch: dict[str, Tensor] = {}

    def steps(self, tile: Tile) -> list[tuple[int, int]]:
        """Key ranges of `tile` whose scores fit the scratch bound, in nearly equal steps."""
        rows = self.q_GNE.shape[0] * self.per_block * (tile.last - tile.first)
        keys = max(64, TILE_SCORES // rows)
        count = -(-(tile.hi - tile.lo) // keys)
        edges = [tile.lo + (tile.hi - tile.lo) * i // count for i in range(count + 1)]
        return list(pairwise(edges))

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
        slots = self.ranges.lo_AB.shape[1] * (tile.last - tile.first)
        # Keys left of all_lo and right of all_hi are hidden from some rows: only these edges are masked.
        for first, last in ((lo, min(hi, tile.all_lo)), (max(lo, tile.all_lo, tile.all_hi), hi)):
            if first >= last:
                continue
            key = torch.arange(first, last, device=scores.device)
            bound_lo = self.ranges.lo_AB[tile.first : tile.last, :, None]
            bound_hi = self.ranges.hi_A[tile.first : tile.last, None, None]
            hidden = ((key < bound_lo) | (key >= bound_hi)).view(1, slots, 1, last - first)
            edge = scores.view(G, slots, n // slots, hi - lo)[..., first - lo : last - lo]
            edge.masked_fill_(hidden, float("-inf"))
        return scores


def part_forward(state: SoftmaxState, q_GNE: Tensor, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges) -> None:
    """Add the visible rows of one context part to `state`, in place.

    Args:
        state: the softmax of the same N rows so far.
        q_GNE: packed queries, unscaled.
        k_TGE: the part's keys, with norm and rotary angles.
        v_TGE: the part's values.
        ranges: the rows of the part that each block sees. Memory is bounded by TILE_SCORES, never by N x T.
    """
    tiles = _Scores(q_GNE, k_TGE, ranges)
    for tile in tiles.tiles:
        rows = tiles.rows(tile)
        q = q_GNE[:, rows].to(tiles.dtype) * q_GNE.shape[-1] ** -0.5
        numerator, top, total = state.numerator_GNE[:, rows], state.max_GN[:, rows], state.total_GN[:, rows]
        for lo, hi in tiles.steps(tile):
            scores = tiles.visible(tile, q, tiles.keys(k_TGE, lo, hi), lo, hi)
            new_top = torch.maximum(top, scores.amax(-1))
            weights = scores.sub_(new_top[..., None]).exp_()
            shrink = torch.exp(top - new_top)
            total.mul_(shrink).add_(weights.sum(-1))
            numerator.mul_(shrink[..., None]).add_(torch.bmm(weights, tiles.keys(v_TGE, lo, hi)))
            top.copy_(new_top)


def part_backward(
    dq_GNE: Tensor, q_GNE: Tensor, upstream: Upstream, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges
) -> tuple[Tensor, Tensor]:
    """Add one part's gradients to `dq_GNE`; return this part's (dk_TGE, dv_TGE) in the accumulator's type.

    The weights are recomputed from the final log-sum-exp, so parts are independent of one another.
    """
    tiles = _Scores(q_GNE, k_TGE, ranges)
    scale = q_GNE.shape[-1] ** -0.5
    dk_TGE = torch.zeros_like(k_TGE, dtype=tiles.dtype)
    dv_TGE = torch.zeros_like(v_TGE, dtype=tiles.dtype)
    for tile in tiles.tiles:
        rows = tiles.rows(tile)
        q = q_GNE[:, rows].to(tiles.dtype) * scale
        do = upstream.do_GNE[:, rows].to(tiles.dtype)
        lse, delta = upstream.lse_GN[:, rows, None], upstream.delta_GN[:, rows, None]
        for lo, hi in tiles.steps(tile):
            k = tiles.keys(k_TGE, lo, hi)
            weights = tiles.visible(tile, q, k, lo, hi).sub_(lse).exp_()
            _accumulate(dv_TGE[lo:hi], weights, do)
            ds = tiles.product("ds", do, tiles.keys(v_TGE, lo, hi)).sub_(delta).mul_(weights)
            _accumulate(dk_TGE[lo:hi], ds, q)
            dq_GNE[:, rows].add_(torch.bmm(ds, k), alpha=scale)
    return dk_TGE, dv_TGE


def _accumulate(out_sGE: Tensor, x_Gns: Tensor, y_GnE: Tensor) -> None:
    """Add xᵀ·y, head by head, because a strided batch would be copied."""
    for g in range(x_Gns.shape[0]):
        out_sGE[:, g].addmm_(x_Gns[g].T, y_GnE[g])


BACKENDS = {"torch": Backend(part_forward, part_backward)}
