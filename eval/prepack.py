"""Linear layers whose weight is also kept in a layout that suits a few rows, for verify steps on a CPU.

`F.linear` on 4 to 8 rows takes 1.5 to 3 times a one-row step because it walks the weight in its stored order.
A copy that oneDNN reordered for 8 rows makes 8 rows cost 1.2 to 1.6 times one row; for a small matrix, where
entering oneDNN costs as much as the product, a transposed copy does. One row stays with `F.linear`, which is
as fast as or faster than either, so plain decoding runs on its own best kernel too.

The price is a second copy of every such weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS_HINT = 8
_MAX_ROWS = 32
_MIN_WEIGHTS = 1 << 16  # below this there is nothing to gain
_MIN_PACKED = 1 << 19  # from here on oneDNN's layout is the faster one


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed kernels exist for this device and dtype."""
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and dtype in {torch.float32, torch.bfloat16}
    )


class PackedWeight:
    """A weight [O, I] and its copy in the layout for a few rows."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._plain_OI = weight_OI
        self._transposed_IO: Tensor | None = None
        self._packed: Tensor | None = None
        if weight_OI.numel() < _MIN_PACKED and weight_OI.dtype == torch.float32:
            self._transposed_IO = weight_OI.detach().T.contiguous()
        else:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _ROWS_HINT)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., I] -> [..., O]."""
        rows = x.numel() // x.shape[-1]
        if not 1 < rows <= _MAX_ROWS:
            return F.linear(x, self._plain_OI, bias)
        if self._transposed_IO is not None:
            product = x @ self._transposed_IO
            return product if bias is None else product + bias
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.contiguous(), self._packed, bias, "none", [], ""
        )
        return result


class PackedLinear(nn.Module):
    """Drop-in for `nn.Linear` at inference; `weight` and `bias` stay the same parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product = PackedWeight(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self._product(x, self.bias)


def prepack_linears(module: nn.Module) -> int:
    """Replace every large `nn.Linear` below `module`; returns how many were replaced."""
    replaced = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.numel() >= _MIN_WEIGHTS:
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced
