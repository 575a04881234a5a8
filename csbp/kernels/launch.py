"""The Triton backend: from tensors and key ranges to launches.

Nothing here waits for the device: which keys a tile meets is read by the kernels, and which blocks see a tile
of keys is searched on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from csbp.attention import Backend, OwnBlock, SoftmaxState, Upstream
from csbp.kernels.backward import key_gradient_kernel, own_gradient_kernel, query_gradient_kernel
from csbp.kernels.forward import forward_kernel
from csbp.kernels.tile_sizes import ROWS, Tile, TileSizes, padded_width, tile_sizes
from csbp.tiles import KeyRanges
from drafter.kernels.launch import Launch

HALF = (torch.bfloat16, torch.float16)
NARROW_GAIN = 0.8  # a narrow tile must save this much of the scores: its products reach less of the peak


class _Shape(NamedTuple):
    """What all launches of one part share."""

    groups: int
    rows: int
    head: int
    sharing: int
    block: int
    sizes: TileSizes

    @classmethod
    def of(cls, q_GNE: Tensor, ranges: KeyRanges) -> _Shape:
        groups, rows, head = q_GNE.shape
        blocks, block = ranges.lo.shape
        sharing = max(1, rows // max(1, blocks * block))
        wide = _scores(ranges, ROWS[1], sharing)
        narrow = _scores(ranges, ROWS[0], sharing)
        tile_rows = ROWS[0] if narrow < NARROW_GAIN * wide else ROWS[1]
        return cls(groups, rows, head, sharing, block, tile_sizes(head, q_GNE.element_size(), tile_rows))

    def options(self, tile: Tile) -> dict[str, Any]:
        return {
            "HEAD": self.head,
            "WIDTH": padded_width(self.head),
            "SHARING": self.sharing,
            "BLOCK": self.block,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def edges(self, tile: Tile) -> dict[str, Any]:
        """Edge steps are few beside whole ones, unless every step is one: only then they overlap."""
        return {"WHOLE": self.sizes.whole, "EDGE_STAGES": 1 if self.sizes.whole else tile.stages}

    def over_rows(self, tile: Tile) -> tuple[int, int]:
        return -(-self.rows // tile.rows), self.groups

    @property
    def scale(self) -> float:
        return float(self.head**-0.5)


def _scores(ranges: KeyRanges, rows: int, sharing: int) -> int:
    """Scores that tiles of `rows` packed rows meet, hidden ones included."""
    lo, hi = ranges.on_host
    if not hi.numel():
        return 0
    # Blocks whose first rows share a tile; a tile that begins inside a block is counted with the tile before.
    tile = torch.arange(hi.numel()) * (lo.shape[1] * sharing) // rows
    edges = torch.searchsorted(tile, torch.arange(int(tile[-1]) + 2))
    return int((rows * (hi[edges[1:] - 1] - lo[edges[:-1].clamp(max=len(hi) - 1), 0]).clamp(min=0)).sum())


def _bounds(ranges: KeyRanges) -> tuple[Tensor, Tensor]:
    """int32 [A·B] and [A] on the device: what each slot sees."""

    def make() -> tuple[Tensor, Tensor]:
        return ranges.lo.to(torch.int32).contiguous().view(-1), ranges.hi.to(torch.int32).contiguous()

    return ranges.keep("int32", make)


def visitors(ranges: KeyRanges, keys: int, tile: int) -> Tensor:
    """int32 [4, tiles]: which blocks see some key of each tile, and which see all, as two ranges of blocks.

    Both bounds ascend with the blocks: a block sees some of the keys [first, last) unless its range ends by
    `first` or begins at `last` or later, and all if it begins by `first` and does not end before `last`.
    """

    def make() -> Tensor:
        lo, hi = ranges.lo, ranges.hi
        first = torch.arange(0, keys, tile, device=hi.device)
        last = (first + tile).clamp(max=keys)
        opening, closing = lo[:, 0].contiguous(), lo[:, -1].contiguous()
        found = [
            torch.searchsorted(hi, first, right=True),
            torch.searchsorted(hi, last),
            torch.searchsorted(closing, first, right=True),
            torch.searchsorted(opening, last),
        ]
        return torch.stack(found).to(torch.int32)

    return ranges.keep(("visitors", keys, tile), make)


def forward_launch(
    state: SoftmaxState, q_GNE: Tensor, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges, own: OwnBlock | None
) -> Launch:
    """The launch that adds a part's keys to `state`, or with `own` begins it with the own block's keys."""
    shape = _Shape.of(q_GNE, ranges)
    tile = shape.sizes.forward
    k, v = _dense(k_TGE), _dense(v_TGE)
    arguments = (
        *(q_GNE, k, v, *_bounds(ranges), *_own_arguments(own, q_GNE)),
        *(state.numerator, state.max, state.total),
        *(shape.rows, k.stride(0), v.stride(0), shape.scale, torch.finfo(torch.float32).min / 4),
    )
    options = {
        **shape.options(tile),
        **shape.edges(tile),
        "OWN": own is not None,
        "OWN_KEYS": shape.sizes.own_keys,
    }
    return Launch(forward_kernel, shape.over_rows(tile), arguments, options)


def query_gradient_launches(
    dq_GNE: Tensor,
    q_GNE: Tensor,
    upstream: Upstream,
    k_TGE: Tensor,
    v_TGE: Tensor,
    ranges: KeyRanges,
    own: OwnBlock | None,
) -> list[Launch]:
    """Launches that add a part's share, and with `own` the own block's, to `dq_GNE`.

    One launch for both, unless registers do not hold what both loops need.
    """
    shape = _Shape.of(q_GNE, ranges)
    tile = shape.sizes.query_gradient
    k, v = _dense(k_TGE), _dense(v_TGE)
    arguments = (
        *(q_GNE, k, v, *_bounds(ranges), *_own_arguments(own, q_GNE)),
        *(upstream.do, upstream.lse, upstream.delta, dq_GNE),
        *(shape.rows, k.stride(0), v.stride(0), shape.scale),
    )
    options = {**shape.options(tile), **shape.edges(tile), "OWN_KEYS": shape.sizes.own_keys}
    if own is None:
        passes = [(False, True)]
    else:
        passes = [(True, True)] if shape.sizes.whole else [(True, False), (False, True)]
    return [
        Launch(query_gradient_kernel, shape.over_rows(tile), arguments, {**options, "OWN": a, "PART": b})
        for a, b in passes
    ]


def key_gradient_launch(
    dk_TGE: Tensor,
    dv_TGE: Tensor,
    q_GNE: Tensor,
    upstream: Upstream,
    k_TGE: Tensor,
    v_TGE: Tensor,
    ranges: KeyRanges,
) -> Launch:
    """The launch that writes dk and dv of all keys of a part."""
    shape = _Shape.of(q_GNE, ranges)
    tile = shape.sizes.key_gradient
    k, v = _dense(k_TGE), _dense(v_TGE)
    tiles = -(-len(k) // tile.keys)
    arguments = (
        *(q_GNE, k, v, *_bounds(ranges), visitors(ranges, len(k), tile.keys)),
        *(upstream.do, upstream.lse, upstream.delta, dk_TGE, dv_TGE),
        *(shape.rows, len(k), tiles, k.stride(0), v.stride(0), shape.scale),
    )
    options = shape.options(tile) | shape.edges(tile)
    return Launch(key_gradient_kernel, (tiles, shape.groups), arguments, options)


def own_gradient_launch(
    dk_ABGE: Tensor, dv_ABGE: Tensor, q_GNE: Tensor, upstream: Upstream, own: OwnBlock, ranges: KeyRanges
) -> Launch:
    """The launch that writes dk and dv of the blocks' own rows."""
    shape = _Shape.of(q_GNE, ranges)
    tile = shape.sizes.own_gradient
    keys = own.k.shape[0] * own.k.shape[1]
    arguments = (
        *(q_GNE, own.k.contiguous(), own.v.contiguous(), own.mask.view(torch.uint8)),
        *(upstream.do, upstream.lse, upstream.delta, dk_ABGE, dv_ABGE),
        *(shape.rows, keys, shape.scale),
    )
    return Launch(own_gradient_kernel, (-(-keys // tile.keys), shape.groups), arguments, shape.options(tile))


def part_forward(state: SoftmaxState, q_GNE: Tensor, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges) -> None:
    """See `csbp.attention.PartForward`."""
    _check(q_GNE)
    if len(k_TGE):
        forward_launch(state, q_GNE, k_TGE, v_TGE, ranges, None).run()


def part_backward(
    dq_GNE: Tensor, q_GNE: Tensor, upstream: Upstream, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges
) -> tuple[Tensor, Tensor]:
    """See `csbp.attention.PartBackward`."""
    _check(q_GNE)
    upstream = _prepared(upstream, q_GNE)
    if len(k_TGE):
        for launch in query_gradient_launches(dq_GNE, q_GNE, upstream, k_TGE, v_TGE, ranges, None):
            launch.run()
    found = _two_like(k_TGE)
    key_gradient_launch(*found, q_GNE, upstream, k_TGE, v_TGE, ranges).run()
    return found


def begin(q_GNE: Tensor, own: OwnBlock, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges) -> SoftmaxState:
    """See `csbp.attention.Begin`; one launch."""
    _check(q_GNE)
    numerator = torch.empty(q_GNE.shape, dtype=torch.float32, device=q_GNE.device)
    state = SoftmaxState(
        numerator, numerator.new_empty(q_GNE.shape[:2]), numerator.new_empty(q_GNE.shape[:2])
    )
    forward_launch(state, q_GNE, k_TGE, v_TGE, ranges, own).run()
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
    """See `csbp.attention.BeginBackward`."""
    _check(q_GNE)
    upstream = _prepared(upstream, q_GNE)
    for launch in query_gradient_launches(dq_GNE, q_GNE, upstream, k_TGE, v_TGE, ranges, own):
        launch.run()
    of_own = _two_like(own.k)
    own_gradient_launch(*of_own, q_GNE, upstream, own, ranges).run()
    of_part = _two_like(k_TGE)
    key_gradient_launch(*of_part, q_GNE, upstream, k_TGE, v_TGE, ranges).run()
    return *of_own, *of_part


def _two_like(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    return first, second


def _own_arguments(own: OwnBlock | None, q_GNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if own is None:
        return q_GNE, q_GNE, q_GNE
    return own.k.contiguous(), own.v.contiguous(), own.mask.view(torch.uint8)


def _prepared(upstream: Upstream, q_GNE: Tensor) -> Upstream:
    """The output gradient in the rows' type, because products are; a query ring brings it in float32."""
    return Upstream(
        upstream.do.to(q_GNE.dtype).contiguous(), upstream.delta.contiguous(), upstream.lse.contiguous()
    )


def _dense(rows_TGE: Tensor) -> Tensor:
    """Rows whose groups and columns lie side by side, with any gap whose sum over a tile is an int32."""
    dense = rows_TGE.stride(2) == 1 and rows_TGE.stride(1) == rows_TGE.shape[2]
    return rows_TGE if dense and rows_TGE.stride(0) <= 2**22 else rows_TGE.contiguous()


def _check(q_GNE: Tensor) -> None:
    if q_GNE.dtype not in (*HALF, torch.float32):
        raise ValueError(
            f"the triton backend takes bfloat16, float16 and float32 rows, found {q_GNE.dtype}; use the "
            "torch backend"
        )


TRITON = Backend(part_forward, part_backward, begin, begin_backward)
