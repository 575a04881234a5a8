"""Sets of rows of the context axis as sorted ranges: the arithmetic of who reads, projects and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSet:
    """Disjoint, ascending, non-touching ranges [start, stop) of axis rows.

    Attributes:
        starts: int64 [n].
        stops: int64 [n].
    """

    starts: Tensor
    stops: Tensor

    @classmethod
    def union_of(cls, starts: Tensor, stops: Tensor) -> RowSet:
        """The union of any ranges [start, stop); empty ones do not count."""
        keep = starts < stops
        starts, order = torch.sort(starts[keep], stable=True)
        stops = stops[keep][order]
        if starts.numel() == 0:
            return cls(starts, stops)
        reach = torch.cummax(stops, 0).values
        opens = torch.ones_like(starts, dtype=torch.bool)
        opens[1:] = starts[1:] > reach[:-1]
        closes = torch.ones_like(opens)
        closes[:-1] = opens[1:]
        return cls(starts[opens], reach[closes])

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]]) -> RowSet:
        table = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 2)
        return cls.union_of(table[:, 0], table[:, 1])

    def __len__(self) -> int:
        return int((self.stops - self.starts).sum())

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))

    def rank_of(self, axis: Tensor) -> Tensor:
        """int64, same shape: how many member rows lie before each axis index."""
        ends = torch.cumsum(self.stops - self.starts, 0)
        if ends.numel() == 0:
            return torch.zeros_like(axis)
        held = torch.searchsorted(self.starts, axis.contiguous(), right=True) - 1
        inside = held.clamp(min=0)
        before = ends[inside] - (self.stops - self.starts)[inside]
        within = torch.minimum(axis, self.stops[inside]) - self.starts[inside]
        return torch.where(held < 0, 0, before + within)

    def indices(self) -> Tensor:
        """int64 [len(self)]: the axis index of every member row, ascending."""
        sizes = self.stops - self.starts
        ends = torch.cumsum(sizes, 0)
        return torch.arange(len(self)) + torch.repeat_interleave(self.starts - (ends - sizes), sizes)

    def within(self, whole: RowSet) -> Tensor | None:
        """Positions of this set's rows among the rows of `whole`, a superset; None when both are the same."""
        if len(self) == len(whole):
            return None
        return whole.rank_of(self.indices())

    def intersection(self, other: RowSet) -> RowSet:
        edges = torch.unique(torch.cat([self.starts, self.stops, other.starts, other.stops]))
        if edges.numel() < 2:
            return RowSet.of([])
        lo, hi = edges[:-1], edges[1:]
        both = (self.rank_of(hi) - self.rank_of(lo) > 0) & (other.rank_of(hi) - other.rank_of(lo) > 0)
        return RowSet.union_of(lo[both], hi[both])

    def overlap(self, other: RowSet) -> int:
        """How many rows both hold."""
        return int((self.rank_of(other.stops) - self.rank_of(other.starts)).sum())

    def union(self, other: RowSet) -> RowSet:
        return RowSet.union_of(torch.cat([self.starts, other.starts]), torch.cat([self.stops, other.stops]))

    def members(self, first: int, last: int) -> RowSet:
        """The member rows numbered [first, last) in ascending order."""
        ends = torch.cumsum(self.stops - self.starts, 0)
        begins = ends - (self.stops - self.starts)
        lo = self.starts + (first - begins).clamp(min=0)
        hi = self.stops - (ends - last).clamp(min=0)
        return RowSet.union_of(lo, hi)
