"""Small tensors of a plan to the device, without anybody waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor; to a GPU through page-locked memory, in the order of the current stream.

    A copy from ordinary memory would first wait until the GPU has done what was asked of it so far.
    """
    if torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
