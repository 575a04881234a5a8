"""The rank grid: the one place that knows ranks and process groups.

A world of N ranks is R replicas of P context ranks. Ranks of one replica are neighbours in the world's order,
so they share a node when a replica fits on one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist


class TopologyError(ValueError):
    """The ranks cannot be arranged as asked."""


@dataclass(frozen=True)
class Grid:
    """Where this rank stands.

    Attributes:
        world: N, ranks altogether.
        rank: this rank in the world, 0 <= rank < N.
        context_ranks: P, ranks that share the sequences of one replica.
        context_group: process group of this replica's ranks; None for the whole world and for one rank alone.
        timeout: how long a rank waits for a peer before it raises.
    """

    world: int = 1
    rank: int = 0
    context_ranks: int = 1
    context_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    timeout: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        """Refuse a grid that does not tile the world."""
        if self.context_ranks < 1 or self.world % self.context_ranks:
            divisors = [p for p in range(1, self.world + 1) if self.world % p == 0]
            raise TopologyError(
                f"context_ranks must divide the world of {self.world} ranks, found {self.context_ranks}; "
                f"choose one of {divisors}"
            )
        if not 0 <= self.rank < self.world:
            raise TopologyError(f"rank must lie in [0, {self.world}), found {self.rank}")

    @property
    def replicas(self) -> int:
        return self.world // self.context_ranks

    @property
    def replica(self) -> int:
        return self.rank // self.context_ranks

    @property
    def context_rank(self) -> int:
        return self.rank % self.context_ranks

    def peer(self, context_rank: int) -> int:
        """World rank of a context rank of this replica; indices wrap around the ring."""
        return self.replica * self.context_ranks + context_rank % self.context_ranks

    @classmethod
    def single(cls) -> Grid:
        """One rank, no process group."""
        return cls()

    @classmethod
    def from_environment(cls, context_ranks: int, *, timeout: timedelta = timedelta(minutes=10)) -> Grid:
        """Join the world that the launcher describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

        Uses the process group that exists, or starts one (nccl with a GPU, gloo without). Every rank of the
        world must call this at the same point, because groups are made together.

        Raises:
            TopologyError: `context_ranks` does not divide the world.
        """
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return cls(context_ranks=context_ranks, timeout=timeout)
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timeout)
        world, rank = dist.get_world_size(), dist.get_rank()
        grid = cls(world, rank, context_ranks, timeout=timeout)
        if context_ranks in (1, world):
            return grid
        groups = [
            dist.new_group(list(range(first, first + context_ranks)), timeout=timeout)
            for first in range(0, world, context_ranks)
        ]
        return cls(world, rank, context_ranks, groups[grid.replica], timeout)
