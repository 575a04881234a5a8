"""How large a tile each attention kernel takes, by head size, width of an element and spread of the blocks.

Chosen to avoid spills and to make every product a `wgmma` when compiled for sm_90. How fast they are has to
be measured (`benchmarks/gpu_step.py`).
"""

from __future__ import annotations

from typing import NamedTuple

WIDTHS = (64, 128, 256)
ROWS = (64, 128)


class Tile(NamedTuple):
    """Attributes:
    rows: packed query rows of a tile.
    keys: keys of a tile.
    warps: of a program.
    stages: tiles of the inner loop that are in flight or in use.
    """

    rows: int
    keys: int
    warps: int
    stages: int


class TileSizes(NamedTuple):
    """Tiles of the four kernels.

    Attributes:
        own_keys: step through own-block keys in the first two.
        whole: tiles that are visible as a whole have a loop of their own, without a mask.
    """

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    own_gradient: Tile
    own_keys: int
    whole: bool = True


# Sums of 256 columns leave registers for one loop and narrow steps.
_WIDEST = TileSizes(
    Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2), Tile(16, 64, 8, 2), 16, whole=False
)
# Half precision, by (width of the head, rows of a query tile). Blocks that stand far apart take tiles of 64
# rows: a tile of 128 would meet mostly keys that only some of its rows see.
_HALF = {
    (64, 128): TileSizes(
        Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(64, 64, 4, 2), 32
    ),
    (64, 64): TileSizes(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 128, 8, 3), Tile(64, 64, 4, 2), 32),
    (128, 128): TileSizes(
        Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(32, 64, 4, 2), 32
    ),
    (128, 64): TileSizes(Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 128, 8, 2), Tile(32, 64, 4, 2), 32),
    (256, 128): _WIDEST,
    (256, 64): _WIDEST,
}


def _small(tile: Tile) -> TileSizes:
    return TileSizes(tile, tile, tile, tile, own_keys=16, whole=False)


# Float32 products run without tensor cores: small tiles, because operands live in registers.
_FLOAT = {
    64: _small(Tile(32, 32, 4, 2)),
    128: _small(Tile(32, 32, 8, 2))._replace(forward=Tile(16, 16, 8, 2)),
    256: _small(Tile(16, 16, 4, 2)),
}


def padded_width(head_size: int) -> int:
    """Columns of a tile: the head size, rounded up to a power of two.

    Raises:
        ValueError: beyond 256, where a tile of keys and values no longer fits the chip.
    """
    for width in WIDTHS:
        if head_size <= width:
            return width
    raise ValueError(
        f"expected a head size of at most {WIDTHS[-1]}, found {head_size}; use the torch backend"
    )


def tile_sizes(head_size: int, element_bytes: int, rows: int) -> TileSizes:
    """Tiles for rows of `element_bytes` an element; `rows` is one of `ROWS`."""
    width = padded_width(head_size)
    return _HALF[width, rows] if element_bytes == 2 else _FLOAT[width]
