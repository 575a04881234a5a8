"""Fused kernels of the drafter's element-wise work, and when they are taken.

Each does in one or two passes over memory what its plain twin does in many. The twin stands where the kernel
is called from and is the specification. On a GPU kernels are taken if Triton is there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["auto", "never", "always"]
_mode: Mode = "auto"


def fused(x: Tensor) -> bool:
    """Whether rows like `x` go through the kernels. Float64 never does: it is there to check against."""
    if _mode == "never" or x.dtype == torch.float64 or not x.numel():
        return False
    return _mode == "always" or (x.is_cuda and has_triton())


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def set_mode(mode: Mode) -> None:
    """`auto` takes kernels on a GPU; `always` is for Triton's interpreter; both leave float64 alone."""
    global _mode  # noqa: PLW0603  one switch for a process: modules hold no options of their own
    _mode = mode


@contextmanager
def mode(name: Mode) -> Iterator[None]:
    """`set_mode` for a while."""
    before = _mode
    set_mode(name)
    try:
        yield
    finally:
        set_mode(before)
