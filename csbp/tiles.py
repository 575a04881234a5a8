"""Which keys the blocks of a rank see, cut into rectangles that matrix products like.

Blocks ascend along the axis, so what they see is a band: with every next block both ends of its range move
right or stay. Cutting the keys wherever a range begins or ends gives rectangles without waste; the small ones
are joined as long as that wastes less than starting another product costs. So work follows the windows, or
the triangle under full attention, and never the length of the axis.

Shape legend: A blocks, B rows of a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from csbp.upload import upload

Kept = TypeVar("Kept")


class TileSizes(NamedTuple):
    """How large a tile of scores may be, and what it costs beyond its n x s scores, in scores.

    Attributes:
        scores: largest tile, all key/value heads together; what bounds memory.
        rows: about how many packed rows a tile has at most.
        thin_rows: n rows cost like n + thin_rows.
        thin_keys: s keys cost like s + thin_keys, because sums are rescaled for every tile.
        start: cost of starting a tile.
    """

    scores: int
    rows: int
    thin_rows: int
    thin_keys: int
    start: int


# On CPU the two tiles of the backward pass fit the second-level cache of a core (measured in fp32 with E = 64
# under AVX-512). On a GPU a tile has to fill the device: a few dozen launches of 64 MiB of scores each.
TILE_SIZES = {
    "cpu": TileSizes(2**18, 192, 10, 32, 6_000),
    "cuda": TileSizes(2**24, 4096, 64, 128, 2**21),
}


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
        lo: int64 [A, B].
        hi: int64 [A].
        on_host: the same two on the CPU, so that a plan for a GPU never has to ask it.
    """

    lo: Tensor
    hi: Tensor
    on_host: tuple[Tensor, Tensor] = field(default=None, repr=False, compare=False)  # type: ignore[assignment]
    _kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.on_host is None:
            object.__setattr__(self, "on_host", (self.lo.cpu(), self.hi.cpu()))

    def to(self, device: torch.device | str) -> KeyRanges:
        """The same ranges on `device`, whose copy is not waited for."""
        lo, hi = self.on_host
        return KeyRanges(upload(lo, device), upload(hi, device), self.on_host)

    def keep(self, name: object, make: Callable[[], Kept]) -> Kept:
        """What `make` makes of these ranges, made once: the layers of a step share their ranges."""
        if name not in self._kept:
            self._kept[name] = make()
        found: Kept = self._kept[name]
        return found

    def tiles(self, rows: int, sizes: TileSizes | None = None) -> list[Tile]:
        """Rectangles that cover what is visible, thick enough for matrix products and nearly free of waste.

        Args:
            rows: packed rows of a block.
            sizes: by default those of the plain backend on this device.
        """
        sizes = sizes or TILE_SIZES[self.lo.device.type]
        return self.keep(("tiles", rows, sizes), lambda: self._make_tiles(rows, sizes))

    def _make_tiles(self, rows: int, sizes: TileSizes) -> list[Tile]:
        first, hi = self.on_host
        lo, last_lo = first[:, 0].tolist(), first[:, -1].tolist()
        cells = _merge(_cells(lo, hi.tolist()), rows, sizes)
        return [tile for cell in cells for tile in _split(cell, rows, sizes.rows, lo, last_lo, hi.tolist())]


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


def _merge(cells: list[_Cell], rows: int, sizes: TileSizes) -> list[_Cell]:
    """Join neighbours while a joint cell wastes fewer scores than a tile costs beside its scores."""
    merged: list[_Cell] = []
    for cell in cells:
        if merged:
            before = merged[-1]
            joint = _Cell(before.lo, cell.hi, before.first, cell.last, before.seen + cell.seen)
            n = rows * (joint.last - joint.first)
            chunks = -(-n // sizes.rows)
            waste = n * (joint.hi - joint.lo) - rows * joint.seen
            if waste <= sizes.thin_keys * (n + sizes.thin_rows * chunks) + sizes.start * chunks:
                merged[-1] = joint
                continue
        merged.append(cell)
    return merged


def _split(cell: _Cell, rows: int, most: int, lo: list[int], last_lo: list[int], hi: list[int]) -> list[Tile]:
    """Cut a cell's blocks into tiles of about `most` rows, each with only the keys that its blocks see."""
    count = min(cell.last - cell.first, -(-(cell.last - cell.first) * rows // most))
    edges = [cell.first + (cell.last - cell.first) * i // count for i in range(count + 1)]
    tiles = []
    for first, last in pairwise(edges):
        k0, k1 = max(cell.lo, lo[first]), min(cell.hi, hi[last - 1])
        if k0 < k1:
            tiles.append(Tile(first, last, k0, k1, last_lo[last - 1], hi[first]))
    return tiles
