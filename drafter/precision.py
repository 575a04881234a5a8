"""What `precision` means on a device.

`bf16` on a GPU is autocast: products take bfloat16 copies of their operands and hand bfloat16 rows on. On a
CPU the rows stay float32 and oneDNN rounds the operands of each product on the way in: sums and results are
float32, nothing but products loses digits, and a core with AMX is several times faster than in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Dtype of the rows that a step computes, and of the frozen tables they are multiplied with."""
    return torch.bfloat16 if precision == "bf16" and device.type == "cuda" else torch.float32


def cpu_products_are_rounded(x: torch.Tensor) -> bool:
    """Whether products of rows like `x` round their operands on this CPU."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return x.device.type == "cpu" and x.dtype == torch.float32 and matmul.fp32_precision == "bf16"


@contextmanager
def cpu_products(precision: Precision) -> Iterator[None]:
    """For a while, float32 products on a CPU round their operands to bfloat16, or do not.

    A training run rounds them; inside it attention does not, because rounding makes small products of ever
    other shapes, like those of its tiles, slower.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if precision == "bf16" else "none"
    try:
        yield
    finally:
        matmul.fp32_precision = before
