"""Joining the ranks of a run, adding numbers over them, and noticing that they do not belong together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from csbp.topology import Grid
from csbp.transport import WireError

TIMEOUT = timedelta(minutes=10)  # for a peer that hangs; one that dies is noticed at once
T = TypeVar("T")


class RanksError(RuntimeError):
    """Ranks cannot work together: they were given different runs, or a peer is gone."""


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


def ranks_of_this_machine() -> int:
    """How many ranks the launcher started here; torchrun and deepspeed name it differently."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return dist.get_world_size()


def from_first_rank(value: T) -> T:
    """Rank 0's value, on every rank."""
    if dist.get_world_size() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, 0)
    return held[0]


def require_same(facts: Mapping[str, Any]) -> None:
    """Check that every rank was started on the same run and sees the same files.

    Args:
        facts: by name; every rank gives the same names.

    Raises:
        RanksError: on every rank; names the first fact that differs.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return
    seen: list[dict[str, Any]] = [{} for _ in range(ranks)]
    dist.all_gather_object(seen, dict(facts))
    for rank, theirs in enumerate(seen):
        for name, value in seen[0].items():
            if theirs[name] != value:
                raise RanksError(
                    f"every rank must see the same {name}, but rank 0 sees {value!r} and rank {rank} sees "
                    f"{theirs[name]!r}. Start the same command on every node, with out, stores and target on "
                    "file systems that all nodes share"
                )


class LostPeerError(RanksError):
    """Another rank is gone, so this one cannot go on: a consequence, not the cause."""


@contextmanager
def peers_named() -> Iterator[None]:
    """Say in one way what backends say in many when a peer is gone.

    Raises:
        LostPeerError: in place of an error of gloo or NCCL.
    """
    try:
        yield
    except WireError:
        raise
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and "gloo" not in text.lower():
            raise
        raise LostPeerError(
            f"rank {dist.get_rank()} lost a peer: {text.splitlines()[0]}. Look at the log of the rank that "
            "ended first; the same command goes on from the newest checkpoint"
        ) from error


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
