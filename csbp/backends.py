"""The implementations of attention in parts by name, and which of them a step takes.

The plain one, `torch`, is the specification; others are tested against it and imported when asked for.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal, get_args

import torch

from csbp.attention import TORCH, Backend

BackendName = Literal["torch", "flash", "triton"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
_HALF = (torch.bfloat16, torch.float16)


class BackendError(ValueError):
    """A backend cannot run here."""


def load_backend(name: str) -> Backend:
    """The backend that a name of `BACKENDS` stands for.

    Raises:
        BackendError: no backend has this name, or its library is not installed.
    """
    if name == "torch":
        return TORCH
    if name not in BACKENDS:
        raise BackendError(f"expected an attention backend among {BACKENDS}, found {name!r}")
    if name == "flash":
        from csbp.flash import FLASH

        return FLASH
    if not _has_triton():
        raise BackendError("attention backend triton needs the package triton; install it, or take torch")
    from csbp.kernels.launch import TRITON

    return TRITON


def choose_backend(
    asked: BackendName | Literal["auto"], device: torch.device, dtype: torch.dtype
) -> tuple[BackendName, str]:
    """The backend of a run, and why it is not the fast one (empty if it is, or if it was asked for).

    Args:
        asked: a name is taken as it is.
        device: where the step runs.
        dtype: of queries, keys and values.
    """
    if asked != "auto":
        return asked, ""
    if device.type != "cuda":
        return "torch", f"the step runs on {device.type}, kernels need a GPU"
    if dtype not in _HALF:
        return "torch", f"rows are {dtype}, tensor cores need half precision (precision: bf16)"
    if not _has_triton():
        return "torch", "the package triton is not installed"
    return "triton", ""


def fix_order_of_sums() -> None:
    """Let this process use only operations whose results do not depend on the order of parallel sums.

    To be called before the first product on a GPU, which reads the workspace setting. The kernels of
    `csbp.kernels` never depend on it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
