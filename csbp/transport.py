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

from csbp.attention import Backend, SoftmaxState, Upstream, own_block_backward, own_block_forward
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
        self._wire.finish(self._works)
        self._sent = ()
        return self._got


class Wire:
    """Point-to-point messages and sums between the context ranks of one replica.

    Attributes:
        grid: who is where.
        sent: bytes that this rank has sent, by kind. K/V rows count together with their gradients;
            `gradients` are those of parameters; queries and partial outputs are `other`.
        waited: seconds spent blocked on peers.
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

    def finish(self, works: Sequence[dist.Work]) -> None:
        began = time.perf_counter()
        try:
            for work in works:
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
        k: [A, B, G, E], keys of the blocks' own rows.
        v: [A, B, G, E], values of the blocks' own rows.
        mask: bool [B, B], which slots of its own block a slot sees.
        rows_of_a_block: packed rows of one block, B·M; a rank without blocks needs it too.
        backend: the kernels of context parts.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    rows_of_a_block: int
    backend: Backend

    def own_forward(self, state: SoftmaxState) -> None:
        own_block_forward(state, self.q, self.k, self.v, self.mask)

    def own_backward(self, dq_GNE: Tensor, upstream: Upstream) -> tuple[Tensor, Tensor]:
        return own_block_backward(dq_GNE, self.q, upstream, self.k, self.v, self.mask)


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
