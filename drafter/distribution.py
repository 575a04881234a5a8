"""Distance of a draft's distribution q from the target's own p, in tiles: no [rows, vocabulary] tensor.

p is made from the target's stored last hidden state by its own norm and head, beside q, tile by tile. With z
the draft's logits, s the slope of their soft cap, W the head and S the tokens with q < p:

    KL(p || q) = sum_v p (log p - log q)              dKL/dz_v = q_v - p_v
    TV(p, q)   = 1 - sum_v min(p_v, q_v)              dTV/dz_v = q_v (Q_S - [v in S]),  Q_S = sum_S q

(1 - TV is the chance that speculative sampling accepts the draft.) The head does not train, so the gradient
of a row is its sum of dL/dz_v s_v W_v, accumulated in the forward pass with the softmaxes, as
`drafter.vocabulary` does. S is known only once both softmaxes are, so TV takes a second pass over the head.
Products with the head a row: KL 4, TV 6, both 7.

Shape legend: M rows, V vocabulary, D hidden, U stored states, m rows of a tile, v columns of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafter.frozen import FrozenHead, LogitScale, TargetOutput
from drafter.vocabulary import ROW_TILE, VOCABULARY_TILE, product, tiles


class TargetStates(NamedTuple):
    """The target's states before its final norm [U, D], and for every label the row [...] of its own."""

    states: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Distances:
    """Per row, [M].

    Attributes:
        kl: differentiable if asked for.
        tv: the same; None if it was not asked for.
        ce: cross entropy of the label under the draft.
        target_ce: cross entropy of the label under the target's own distribution.
        best: bool, the label is the draft's best token.
    """

    kl: Tensor
    tv: Tensor | None
    ce: Tensor
    target_ce: Tensor
    best: Tensor


def distances(
    hidden_MD: Tensor,
    labels_M: Tensor,
    target: TargetStates,
    head: FrozenHead,
    scale: LogitScale,
    *,
    kl: bool,
    tv: bool,
    row_tile: int = ROW_TILE,
    vocabulary_tile: int = VOCABULARY_TILE,
) -> Distances:
    """Compare drafts with the target's own distribution.

    Peak extra memory is [M, D] for every kept gradient and a few times row_tile * vocabulary_tile, in float32
    or wider.

    Args:
        hidden_MD: final-normed states of the draft's rows.
        labels_M: int64, the token that the target produced.
        target: states of the target, with M rows.
        head: the target's tables; `head.output` must be there.
        scale: of the draft's logits.
        kl: make the gradient of the KL divergence.
        tv: make the total variation and its gradient.
        row_tile: rows m of a tile.
        vocabulary_tile: columns v of a tile.
    """
    assert head.output is not None
    problem = _Problem(head.head, scale, head.output, labels_M, target, kl, tv, row_tile, vocabulary_tile)
    found = _Distances.apply(hidden_MD, problem)
    kl_M, tv_M, ce_M, target_ce_M, best_M = found
    return Distances(kl_M, tv_M if tv else None, ce_M, target_ce_M, best_M)


class _Problem(NamedTuple):
    table: Tensor
    scale: LogitScale
    output: TargetOutput
    labels: Tensor
    target: TargetStates
    kl: bool
    tv: bool
    row_tile: int
    vocabulary_tile: int


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, problem: _Problem) -> tuple[Tensor, ...]:
        count, wide = len(hidden_MD), torch.promote_types(hidden_MD.dtype, torch.float32)
        needed = ctx.needs_input_grad[0]
        figures = [torch.empty(count, dtype=wide, device=hidden_MD.device) for _ in range(4)]
        best_M = torch.empty(count, dtype=torch.bool, device=hidden_MD.device)
        kept = [
            torch.empty(hidden_MD.shape if needed and asked else (0,), dtype=wide, device=hidden_MD.device)
            for asked in (problem.kl, problem.tv)
        ]
        with torch.autocast(hidden_MD.device.type, enabled=False):
            for rows in tiles(count, problem.row_tile):
                tile = _RowTile(hidden_MD[rows].to(wide), problem, rows, needed)
                tile.first_pass()
                if problem.tv:
                    tile.second_pass()
                for whole, part in zip((*figures, best_M), tile.figures(), strict=True):
                    whole[rows] = part
                for whole, gradient in zip(kept, tile.gradients(), strict=True):
                    if whole.numel():
                        whole[rows] = gradient
        ctx.save_for_backward(*kept)
        ctx.dtype, ctx.asked = hidden_MD.dtype, (problem.kl, problem.tv)
        constant = [x for x, asked in zip(figures, (*ctx.asked, False, False), strict=True) if not asked]
        ctx.mark_non_differentiable(*constant, best_M)
        return (*figures, best_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = [
            kept_MD * gradient_M.unsqueeze(1)
            for kept_MD, gradient_M, asked in zip(ctx.saved_tensors, gradients, ctx.asked, strict=False)
            if asked
        ]
        total_MD = parts[0] if len(parts) == 1 else torch.add(*parts)
        return total_MD.to(ctx.dtype), None


class _Softmax:
    """A softmax in progress; its statistics are float64, since they are one number a row."""

    def __init__(self, like_m: Tensor) -> None:
        self.maximum_m = torch.full_like(like_m, float("-inf"), dtype=torch.float64)
        self.total_m = torch.zeros_like(self.maximum_m)

    def take(self, logits_mv: Tensor) -> tuple[Tensor, Tensor]:
        """Add a tile; returns its exponentials, in its place, and the factor on what was added before."""
        maximum_m = torch.maximum(self.maximum_m, logits_mv.amax(1))
        decay_m = (self.maximum_m - maximum_m).exp()
        mass_mv = logits_mv.sub_(maximum_m.to(logits_mv.dtype).unsqueeze(1)).exp_()
        self.total_m.mul_(decay_m).add_(mass_mv.sum(1))
        self.maximum_m = maximum_m
        return mass_mv, decay_m

    def probabilities(self, logits_mv: Tensor) -> Tensor:
        """Of a tile, in place, once all tiles were taken."""
        mass_mv = logits_mv.sub_(self.maximum_m.to(logits_mv.dtype).unsqueeze(1)).exp_()
        return mass_mv.div_(self.total_m.to(logits_mv.dtype).unsqueeze(1))

    @property
    def lse_m(self) -> Tensor:
        return self.maximum_m + self.total_m.log()


class _RowTile:
    """A few rows over the whole vocabulary, tile after tile."""

    def __init__(self, hidden_mD: Tensor, problem: _Problem, rows: slice, differentiable: bool) -> None:
        self.problem, self.labels_m = problem, problem.labels[rows]
        self.dtype = hidden_mD.dtype
        states_mD = problem.target.states[problem.target.rows[rows]]
        self.target_mD = problem.output.normed(states_mD, self.dtype) * problem.output.scale.multiplier
        self.rows_mD = hidden_mD * problem.scale.multiplier
        like_m = hidden_mD.new_empty(len(hidden_mD))
        self.draft, self.target = _Softmax(like_m), _Softmax(like_m)
        self.best_m = torch.full_like(like_m, float("-inf"))
        self.gold_m, self.target_gold_m = torch.zeros_like(like_m), torch.zeros_like(like_m)
        self.cross_m = torch.zeros_like(self.draft.total_m)
        self.overlap_m, self.lower_m = torch.zeros_like(self.cross_m), torch.zeros_like(self.cross_m)
        self.kl = differentiable and problem.kl
        self.tv = differentiable and problem.tv
        zero_mD = torch.zeros_like(hidden_mD)
        self.draft_sum_mD = zero_mD.clone() if self.kl or self.tv else zero_mD
        self.target_sum_mD = zero_mD.clone() if self.kl else zero_mD
        self.lower_sum_mD = zero_mD.clone() if self.tv else zero_mD

    def first_pass(self) -> None:
        """Both softmaxes, sum p (t - z), and the sums of q s W and p s W."""
        for columns in tiles(len(self.problem.table), self.problem.vocabulary_tile):
            table_vD = self.problem.table[columns]
            z_mv, slope_mv, t_mv = self._logits(table_vD)
            self._labels(z_mv, t_mv, columns.start)
            gap_mv = t_mv - z_mv
            p_mv, decay_m = self.target.take(t_mv)
            self.cross_m.mul_(decay_m).add_(gap_mv.mul_(p_mv).sum(1))
            if self.kl:
                self._add(self.target_sum_mD, p_mv, slope_mv, table_vD, decay_m)
            q_mv, decay_m = self.draft.take(z_mv)
            if self.kl or self.tv:
                self._add(self.draft_sum_mD, q_mv, slope_mv, table_vD, decay_m)

    def second_pass(self) -> None:
        """Sum min(p, q), and over the tokens with q < p the sums of q and q s W."""
        for columns in tiles(len(self.problem.table), self.problem.vocabulary_tile):
            table_vD = self.problem.table[columns]
            z_mv, slope_mv, t_mv = self._logits(table_vD)
            q_mv, p_mv = self.draft.probabilities(z_mv), self.target.probabilities(t_mv)
            below_mv = q_mv < p_mv
            self.overlap_m.add_(torch.minimum(q_mv, p_mv, out=p_mv).sum(1))
            q_mv.mul_(below_mv)
            self.lower_m.add_(q_mv.sum(1))
            if self.tv:
                self._add(self.lower_sum_mD, q_mv, slope_mv, table_vD, None)

    def figures(self) -> tuple[Tensor, ...]:
        """kl, tv, ce, target_ce, best."""
        draft, target = self.draft.lse_m, self.target.lse_m
        kl_m = self.cross_m / self.target.total_m + draft - target
        return (
            kl_m,
            1 - self.overlap_m,
            draft - self.gold_m,
            target - self.target_gold_m,
            self.gold_m >= self.best_m,
        )

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of kl and of tv, each [m, D]."""
        multiplier = self.problem.scale.multiplier
        mean_q_mD = self.draft_sum_mD / self.draft.total_m.to(self.dtype).unsqueeze(1)
        mean_p_mD = self.target_sum_mD / self.target.total_m.to(self.dtype).unsqueeze(1)
        lower_m1 = self.lower_m.to(self.dtype).unsqueeze(1)
        return (mean_q_mD - mean_p_mD) * multiplier, (lower_m1 * mean_q_mD - self.lower_sum_mD) * multiplier

    def _logits(self, table_vD: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """The draft's logits, the slope of their soft cap, and the target's logits, each [m, v]."""
        z_mv, slope_mv = product(self.rows_mD, table_vD.T), None
        if self.problem.scale.softcap is not None:
            cap = self.problem.scale.softcap
            curve_mv = z_mv.div_(cap).tanh_()
            slope_mv = 1 - curve_mv.square()
            z_mv = curve_mv.mul_(cap)
        t_mv = product(self.target_mD, table_vD.T)
        if self.problem.output.scale.softcap is not None:
            cap = self.problem.output.scale.softcap
            t_mv = t_mv.div_(cap).tanh_().mul_(cap)
        return z_mv, slope_mv, t_mv

    def _labels(self, z_mv: Tensor, t_mv: Tensor, start: int) -> None:
        inside_m = (self.labels_m >= start) & (self.labels_m < start + z_mv.shape[1])
        local_m1 = (self.labels_m - start).clamp(0, z_mv.shape[1] - 1).unsqueeze(1)
        self.gold_m = torch.where(inside_m, z_mv.gather(1, local_m1).squeeze(1), self.gold_m)
        self.target_gold_m = torch.where(inside_m, t_mv.gather(1, local_m1).squeeze(1), self.target_gold_m)
        self.best_m = torch.maximum(self.best_m, z_mv.amax(1))

    def _add(
        self,
        sum_mD: Tensor,
        mass_mv: Tensor,
        slope_mv: Tensor | None,
        table_vD: Tensor,
        decay_m: Tensor | None,
    ) -> None:
        """Add mass s W to a sum whose earlier part is to be multiplied by `decay_m`."""
        if slope_mv is not None:
            mass_mv = mass_mv * slope_mv
        if decay_m is not None:
            sum_mD.mul_(decay_m.to(self.dtype).unsqueeze(1))
        sum_mD.add_(product(mass_mv, table_vD))
