"""Candidate selector of DFlash2: which of a slot's k candidates follows best from the token before it.

score(p, c) = unary(c) + sum_r A[p]_r * (Hm h)_r * C[c]_r, with A and C two [V, r] codebooks. They are free
parameters, or products of the target's frozen embedding rows with two trained [r, D] projections: the second
form has no row that training never touches, needs 2 r D parameters instead of 2 V r, and exports to the
first.

Shape legend: R slots in a row, D hidden, V vocabulary, r rank, k candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.config import DrafterConfig
from drafter.frozen import FrozenHead
from drafter.gather import gathered_dot

_STD = 0.02


class CandidateSelector(nn.Module):
    """Adds zero to every score until it is trained: C (or its projection) starts at zero."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.low_rank = config.selector_parametrisation == "low_rank"
        width = config.hidden_size if self.low_rank else config.selector_rank
        rows = config.selector_rank if self.low_rank else config.vocab_size
        predecessor = nn.Parameter(torch.empty(rows, width))
        successor = nn.Parameter(torch.empty(rows, width))
        if self.low_rank:
            self.predecessor_projection, self.successor_projection = predecessor, successor
        else:
            self.predecessor_codebook, self.successor_codebook = predecessor, successor
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.hidden_projection.weight, std=_STD)
        if self.low_rank:
            # rows of A then have unit variance, whatever the scale of the target's embedding
            nn.init.normal_(self.predecessor_projection, std=self.predecessor_projection.shape[1] ** -0.5)
            nn.init.zeros_(self.successor_projection)
        else:
            nn.init.normal_(self.predecessor_codebook, std=_STD)
            nn.init.zeros_(self.successor_codebook)

    def scores(
        self,
        predecessor_ids_R: Tensor,
        hidden_RD: Tensor,
        candidates_Rk: Tensor,
        unary_Rk: Tensor,
        head: FrozenHead,
    ) -> Tensor:
        """Score candidates [R, k] of R slots whose previous token is known; `unary_Rk` are final logits."""
        projected_Rr = self.hidden_projection(hidden_RD)
        if self.low_rank:
            rows_RD = self._embedding_rows(predecessor_ids_R, head).to(hidden_RD.dtype)
            edge_Rr = nn.functional.linear(rows_RD, self.predecessor_projection) * projected_Rr
            # C[c] . edge = e_c . (projection^T edge): one [D] product per candidate instead of a projection
            query_RD = (edge_Rr @ self.successor_projection) / head.embedding_rms
            return unary_Rk + gathered_dot(query_RD, head.embedding, candidates_Rk)
        edge_Rr = self.predecessor_codebook[predecessor_ids_R] * projected_Rr
        return unary_Rk + torch.einsum("Rr,Rkr->Rk", edge_Rr, self.successor_codebook[candidates_Rk])

    def codebooks(self, head: FrozenHead | None) -> tuple[Tensor, Tensor]:
        """Return both codebooks [V, r] as released checkpoints hold them; `head` is needed when low-rank."""
        if not self.low_rank:
            return self.predecessor_codebook, self.successor_codebook
        if head is None:
            raise ValueError("a low-rank selector needs the target's embedding to make its codebooks")
        dtype = self.predecessor_projection.dtype
        tables = []
        for projection in (self.predecessor_projection, self.successor_projection):
            rows = [part.to(dtype) @ projection.T / head.embedding_rms for part in head.embedding.split(8192)]
            tables.append(torch.cat(rows))
        return tables[0], tables[1]

    def _embedding_rows(self, ids: Tensor, head: FrozenHead) -> Tensor:
        return head.embedding[ids] / head.embedding_rms
