"""How a feature row becomes bytes: as it is in a plain dtype, or as e4m3 with a scale per row and tap.

An e4m3 row is `taps` bfloat16 scales, then taps * hidden e4m3 values (one blank byte behind an odd number of
them). A value is read as e4m3 * scale. The scale is the least power of two with which the largest value of
the row's tap stays within 448, the largest e4m3 number, so taps of very different size do not share a range,
and the product is exact in bfloat16.

Error of a value x of a tap whose largest magnitude in the row is m: e4m3 has 4 significant bits down to 2^-6
and steps of 2^-9 below, rounding is to nearest, and scale <= 2 m / 448, hence
|read - x| <= max(2^-4 |x|, 2^-9 m / 448).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FEATURES, LAST = "features", "last_hidden"  # families of rows: their folders and tensors have these names
_CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_E4M3_MAX = 448.0
_LEAST_EXPONENT = -126  # of a normal bfloat16 number


@dataclass(frozen=True)
class RowFormat:
    """Rows [T, taps * hidden] on disk.

    Attributes:
        tensor: name of the tensor in a part.
        stored: dtype of the values on disk.
        taps: groups of a row that have a scale of their own in e4m3.
        hidden: values of a group.
    """

    tensor: str
    stored: torch.dtype
    taps: int
    hidden: int

    @property
    def scaled(self) -> bool:
        return self.stored == torch.float8_e4m3fn

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.taps * self.hidden

    @property
    def dtype(self) -> torch.dtype:
        """Of rows as a reader gets them."""
        return torch.bfloat16 if self.scaled else self.stored

    @property
    def row_bytes(self) -> int:
        if self.scaled:
            return 2 * self.taps + self.width + self.width % 2
        return self.width * self.stored.itemsize

    def header_entry(self, rows: int) -> dict[str, object]:
        """Entry of the safetensors header for a part of `rows` rows."""
        shape = [rows, self.row_bytes if self.scaled else self.width]
        code = "U8" if self.scaled else _CODES[self.stored]
        return {"dtype": code, "shape": shape, "data_offsets": [0, rows * self.row_bytes]}

    def cast(self, rows_TW: Tensor) -> Tensor:
        """Rows in the dtype in which they are judged finite and packed."""
        return rows_TW.detach().to(torch.float32 if self.scaled else self.stored)

    def pack(self, rows_TW: Tensor) -> Tensor:
        """Finite rows of `cast`, [T, width], as uint8 [T, row_bytes] on the same device."""
        if not self.scaled:
            return rows_TW.contiguous().view(torch.uint8)
        rows_TLH = rows_TW.view(-1, self.taps, self.hidden)
        mantissa, exponent = torch.frexp(rows_TLH.abs().amax(dim=-1) / _E4M3_MAX)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=_LEAST_EXPONENT)
        scale_TL = torch.ldexp(torch.ones_like(mantissa), exponent)
        scaled = (rows_TLH / scale_TL[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        pieces = [
            scale_TL.to(torch.bfloat16).view(torch.uint8),
            scaled.flatten(1).view(torch.uint8),
        ]
        if self.width % 2:
            pieces.append(pieces[0].new_zeros(len(rows_TW), 1))
        return torch.cat(pieces, dim=1)

    def unpack(self, packed: Tensor) -> Tensor:
        """uint8 [T, row_bytes] in host memory as [T, width] of `dtype`."""
        if not self.scaled:
            return packed.view(self.stored)
        pairs = packed.contiguous().view(torch.uint16).numpy()
        # Two values a look-up: torch's own conversion from e4m3 is an order of magnitude slower on a CPU.
        values = torch.from_numpy(np.take(_pairs_of_values(), pairs[:, self.taps :], mode="clip"))
        rows = values.view(torch.bfloat16)[:, : self.width]
        scale_TL = torch.from_numpy(np.ascontiguousarray(pairs[:, : self.taps])).view(torch.bfloat16)
        return (rows.unflatten(1, (self.taps, self.hidden)).mul_(scale_TL[..., None])).flatten(1)


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite; two orders of magnitude faster than `isfinite` on a CPU."""
    if not values.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())  # NaN carries through


def row_formats(dtype: str, taps: int, hidden: int, *, last_hidden: bool) -> dict[str, RowFormat]:
    """Family of rows -> how they are stored.

    Last hidden states are never e4m3: its rounding would move the logits that are made from them.
    """
    features = RowFormat(FEATURES, DTYPES[dtype], taps, hidden)
    if not last_hidden:
        return {FEATURES: features}
    return {FEATURES: features, LAST: RowFormat(LAST, features.dtype, 1, hidden)}


@cache
def _pairs_of_values() -> np.ndarray:
    """int32 [65536]: the bits of two bfloat16 numbers for every pair of e4m3 bytes, little-endian."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    bits = every.view(torch.uint16).numpy().astype(np.uint32)
    pair = np.arange(1 << 16)
    return (bits[pair & 255] | (bits[pair >> 8] << 16)).view(np.int32)
