"""The wire, and the one signature that every way of bringing context and blocks together has.

Every byte that `csbp` sends passes through one `Wire`, which counts it by kind where the collective is
called.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from csbp.attention import Backend, OwnBlock, SoftmaxState, Upstream
from csbp.tiles import KeyRanges
from csbp.topology import Grid

Kind = Literal["context_kv", "block_kv", "gradients", "other"]
KINDS: tuple[Kind, ...] = ("context_kv", "block_kv", "gradients", "other")


class WireError(RuntimeError):
    """A peer did not answer: it died, or its program took another path."""


class Pending:
    """Messages in flight; `wait` returns what was received."""

    def __init__(
        self, wire: Wire, works: Sequence[dist.Work], sent: Sequence[Tensor], got: list[Tensor]
    ) -> None:
        self._wire, self._works, self._sent, self._got = wire, works, sent, got

    def wait(self) -> list[Tensor]:
        """Block until every message arrived and every buffer may be reused."""
        self._wire.finish(self._works, on_gpu=any(x.is_cuda for x in (*self._sent, *self._got)))
        self._sent = ()
        return self._got


class Wire:
    """Point-to-point messages and sums between the context ranks of one replica.

    Attributes:
        grid: who is where.
        sent: bytes that this rank has sent, by kind. K/V rows count together with their gradients;
            `gradients` are those of parameters; queries and partial outputs are `other`.
        waited: seconds that this process was blocked on peers; on a GPU the stream waits in its place.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.sent: Counter[Kind] = Counter()
        self.waited = 0.0

    def sent_by_kind(self) -> dict[str, int]:
        """Bytes that this rank has sent, every kind named."""
        return {kind: self.sent[kind] for kind in KINDS}

    def post(
        self,
        sends: Sequence[tuple[int, Tensor, Kind]],
        receives: Sequence[tuple[int, tuple[int, ...], Tensor]],
    ) -> Pending:
        """Start messages to and from context ranks and return at once.

        Args:
            sends: (context rank, tensor, kind). Empty tensors are not sent.
            receives: (context rank, shape, a tensor whose dtype and device the message has). Both ends know
                the shapes from the plan, so empty messages are skipped on both.
        """
        operations, held = [], []
        for peer, tensor, kind in sends:
            if tensor.numel():
                held.append(tensor.contiguous())
                self.sent[kind] += tensor.numel() * tensor.element_size()
                operations.append(
                    dist.P2POp(dist.isend, held[-1], self.grid.peer(peer), self.grid.context_group)
                )
        got = [like.new_empty(shape) for _, shape, like in receives]
        operations += [
            dist.P2POp(dist.irecv, tensor, self.grid.peer(peer), self.grid.context_group)
            for (peer, _, _), tensor in zip(receives, got, strict=True)
            if tensor.numel()
        ]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._broken(error) from error
        return Pending(self, works, held, got)

    def finish(self, works: Sequence[dist.Work], *, on_gpu: bool = False) -> None:
        """Wait for messages. On a GPU the current stream waits, and this process goes on.

        There a time limit would hold the process until rows are here, and the GPU would run out of work. The
        process group's own watchdog ends a run whose peer is lost.
        """
        began = time.perf_counter()
        try:
            for work in works:
                if on_gpu:
                    work.wait()
                else:
                    work.wait(self.grid.timeout)
        except RuntimeError as error:
            raise self._broken(error) from error
        finally:
            self.waited += time.perf_counter() - began

    def add_up(self, tensor: Tensor, kind: Kind, group: dist.ProcessGroup | None = None) -> Tensor:
        """Sum `tensor` over `group` (default: the world) in place. Counts a ring all-reduce's bytes."""
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        if ranks == 1:
            return tensor
        began = time.perf_counter()
        try:
            dist.all_reduce(tensor, group=group)
        except RuntimeError as error:
            raise self._broken(error) from error
        self.waited += time.perf_counter() - began
        self.sent[kind] += 2 * (ranks - 1) * tensor.numel() * tensor.element_size() // ranks
        return tensor

    def _broken(self, error: RuntimeError) -> WireError:
        return WireError(
            f"expected every context rank of replica {self.grid.replica} to take part within "
            f"{self.grid.timeout}, but rank {self.grid.rank} lost a peer: {error}. "
            "Look at the log of the rank that ended first"
        )


@dataclass(frozen=True)
class BlockRows:
    """The block side of one attention call.

    Attributes:
        q: [G, N, E], packed queries of this rank's blocks, unscaled.
        own: keys and values of the blocks' own rows.
        rows_of_a_block: packed rows of one block, B·M; a rank without blocks needs it too.
        backend: the kernels.
    """

    q: Tensor
    own: OwnBlock
    rows_of_a_block: int
    backend: Backend

    def begin(self, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges) -> SoftmaxState:
        """Meet the own blocks and a first context part."""
        return self.backend.begin(self.q, self.own, k_TGE, v_TGE, ranges)

    def begin_backward(
        self, dq_GNE: Tensor, upstream: Upstream, k_TGE: Tensor, v_TGE: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Add to `dq_GNE`; return (dk_ABGE, dv_ABGE, dk_TGE, dv_TGE)."""
        return self.backend.begin_backward(dq_GNE, self.q, upstream, self.own, k_TGE, v_TGE, ranges)


class Gradients(NamedTuple):
    """Shapes as in `BlockRows`; dk and dv [T, G, E] are those of this rank's context rows."""

    dq: Tensor
    dk_block: Tensor
    dv_block: Tensor
    dk: Tensor
    dv: Tensor


class Route(Protocol):
    """One layer's way of bringing blocks and context together; knows sizes and ranges from the plan."""

    def forward(
        self, wire: Wire, rows: BlockRows, k_TGE: Tensor, v_TGE: Tensor
    ) -> tuple[SoftmaxState, list[Tensor]]:
        """Return the finished sums of this rank's blocks and the tensors to keep for the backward pass."""
        ...

    def backward(
        self,
        wire: Wire,
        rows: BlockRows,
        upstream: Upstream,
        k_TGE: Tensor,
        v_TGE: Tensor,
        kept: list[Tensor],
    ) -> Gradients:
        """Return gradients of this rank's queries, own-block rows and context rows (summed over ranks)."""
        ...
