"""Joining the ranks of a run and adding numbers over them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from csbp.topology import Grid

TIMEOUT = timedelta(minutes=10)  # for a peer that hangs; one that dies is noticed at once


def join_ranks() -> torch.device:
    """Join the ranks that a launcher started (torchrun, deepspeed); returns this rank's device.

    Without a launcher there is one rank, in a process group of its own because DeepSpeed needs one.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    return device


def add_over_ranks(values: Mapping[str, float], grid: Grid, device: torch.device) -> dict[str, float]:
    """Sum of each value over all ranks, in float64; every rank gives the same names."""
    sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    return {name: float(value) for name, value in add_tensors_over_ranks(sums, grid, device).items()}


def add_tensors_over_ranks(
    values: Mapping[str, Tensor], grid: Grid, device: torch.device
) -> dict[str, Tensor]:
    """Sum of each float64 tensor over all ranks, in one reduction; ranks give the same names and shapes."""
    if grid.world == 1 or not values:
        return dict(values)
    names = sorted(values)
    flat = torch.cat([values[name].reshape(-1).to(device) for name in names])
    dist.all_reduce(flat)
    parts = flat.split([values[name].numel() for name in names])
    return {name: part.view(values[name].shape) for name, part in zip(names, parts, strict=True)}


def barrier(grid: Grid) -> None:
    """Wait for every rank."""
    if grid.world > 1:
        dist.barrier()
