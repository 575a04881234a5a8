"""What a drafter is trained for: hard-label losses per slot, the selector's loss, and sums to report.

Slot j of a block with its anchor at token a predicts token a + j; slot 0 is the anchor and predicts nothing.
Everything returned is a sum over slots, never a mean, so that micro-batches and ranks add up to the same
step.

Shape legend: A blocks, B rows of a block, K = B - 1 slots, D hidden, M supervised slots in a row, k
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from drafter.frozen import FrozenHead
from drafter.model import Drafter
from drafter.vocabulary import (
    ROW_TILE,
    VOCABULARY_TILE,
    LogitScale,
    candidate_logits,
    cross_entropy,
    full_vocabulary,
    sampled_vocabulary,
    top_k,
)

_PUBLISHED_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


class ObjectiveConfig(BaseModel):
    """Losses and weights of one training run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Literal["ce", "tv", "lambda"] = Field(
        "ce",
        description="Slot loss on hard labels: cross entropy, total variation 1 - p, or "
        "l * CE + (1 - l) * TV with l = lambda_scale * exp(-lambda_decay * p) (arXiv 2602.23881).",
    )
    lambda_scale: float = Field(1.0, ge=0, le=1, description="Largest share of cross entropy in 'lambda'.")
    lambda_decay: float = Field(3.0, ge=0, description="How fast 'lambda' moves from CE to TV as p grows.")
    weights: Literal["exponential", "dpace"] = Field(
        "exponential",
        description="Slot weights: exp(-(j - 1) / gamma) (arXiv 2602.06036), or D-PACE, the expected "
        "remaining accepted length that slot j decides (arXiv 2605.18810).",
    )
    gamma: float | None = Field(
        None,
        gt=0,
        description="Decay of exponential weights; default 7, 5, 4 for blocks of 16, 10, 8, else B / 2.",
    )
    dpace_alpha: float = Field(0.5, ge=0, le=1, description="Smoothing of D-PACE's probabilities.")
    selector_weight: float = Field(1.0, ge=0, description="Weight of the selector's cross entropy.")
    selector_start_step: int = Field(
        0, ge=0, description="Optimizer step at which the selector's loss starts."
    )
    selector_ramp_steps: int = Field(
        0, ge=0, description="Steps over which its weight rises to its full size."
    )
    selector_blocks_fraction: float = Field(
        1.0, gt=0, le=1, description="Share of blocks that the selector's loss sees; its sum is rescaled."
    )
    vocabulary_sample: int = Field(
        0,
        ge=0,
        description="0: cross entropy over the whole vocabulary. Otherwise over the labels and this many "
        "other tokens; the draw then depends on how blocks are spread over micro-batches and ranks.",
    )
    row_tile: int = Field(ROW_TILE, ge=1, description="Rows of a tile of logits; bounds memory.")
    vocabulary_tile: int = Field(
        VOCABULARY_TILE, ge=1, description="Tokens of a tile of logits; bounds memory."
    )

    def selector_factor(self, step: int) -> float:
        """Weight of the selector's loss at an optimizer step (0-based)."""
        if step < self.selector_start_step:
            return 0.0
        done = (step - self.selector_start_step + 1) / max(1, self.selector_ramp_steps)
        return self.selector_weight * min(1.0, done)


@dataclass
class LossSums:
    """One micro-step's sums.

    Attributes:
        loss: differentiable scalar, sum over slots of weight * loss, plus the selector's part.
        metrics: detached float64 sums, scalars or [K], always with the same keys and shapes for one drafter,
            so that they can be added over micro-batches and ranks:
            blocks; slots, the supervised slots; loss, unary_loss, selector_loss as trained on; ce and
            gold_probability, unweighted; top1_hits of top1_slots, where the best token of the whole
            vocabulary is known; sample_top1_hits, best within the vocabulary of the loss; unary_run of
            run_blocks, leading hits of blocks whose slots all have a known best token; and on blocks seen
            by the selector recall_hits (label among the candidates), selector_hits (label chosen after
            the true predecessor) and candidate_top1_hits (label is the first candidate), each of
            recall_slots.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def slot_weights(
    objective: ObjectiveConfig, block_size: int, gold_probability_AK: Tensor, supervised_AK: Tensor
) -> Tensor:
    """Return detached weights [A, K], zero on unsupervised slots."""
    if objective.weights == "exponential":
        gamma = objective.gamma or _PUBLISHED_GAMMA.get(block_size, block_size / 2)
        slots_K = torch.arange(block_size - 1, device=supervised_AK.device, dtype=gold_probability_AK.dtype)
        return torch.exp(-slots_K / gamma) * supervised_AK
    alpha = objective.dpace_alpha
    smoothed_AK = (1 - alpha) * gold_probability_AK.detach() + alpha
    prefix_AK = smoothed_AK.masked_fill(~supervised_AK, 1.0).cumprod(1) * supervised_AK
    return prefix_AK.flip(1).cumsum(1).flip(1) * supervised_AK


def block_loss(
    drafter: Drafter,
    hidden_ABD: Tensor,
    labels_AK: Tensor,
    supervised_AK: Tensor,
    anchor_ids_A: Tensor,
    head: FrozenHead,
    objective: ObjectiveConfig,
    step: int,
    generator: torch.Generator | None = None,
) -> LossSums:
    """Sum the losses of blocks.

    Args:
        drafter: for its scale of logits and its selector.
        hidden_ABD: final-normed states of all block rows, from `Drafter.forward`; A may be 0.
        labels_AK: int64, token a + j for slot j; ignored where not supervised.
        supervised_AK: bool, slots that count.
        anchor_ids_A: int64, the token at each anchor.
        head: the target's frozen tables.
        objective: losses and weights.
        step: 0-based optimizer step, for the selector's warm-up.
        generator: draws the blocks that the selector sees and the sampled vocabulary.
    """
    scale = LogitScale.of(drafter.config)
    # unsupervised labels may be padding; they are never scored, but a slot may follow one
    labels_AK = labels_AK.clamp(0, len(head.head) - 1)
    labels_M = labels_AK[supervised_AK]
    sampled = 0 < objective.vocabulary_sample < len(head.head)
    vocabulary = (
        sampled_vocabulary(labels_M, head, objective.vocabulary_sample, generator)
        if sampled
        else full_vocabulary(labels_M, head)
    )
    ce_M, best_M = cross_entropy(
        hidden_ABD[:, 1:][supervised_AK],
        vocabulary,
        scale,
        row_tile=objective.row_tile,
        vocabulary_tile=objective.vocabulary_tile,
    )
    gold_M = torch.exp(-ce_M)
    weights_AK = slot_weights(
        objective, hidden_ABD.shape[1], _spread(gold_M.detach(), supervised_AK), supervised_AK
    )
    unary_loss = (weights_AK[supervised_AK] * _slot_loss(objective, ce_M, gold_M)).sum()

    factor = 0.0 if drafter.candidate_selector is None else objective.selector_factor(step)
    chosen_A = _choose_blocks(hidden_ABD, objective.selector_blocks_fraction if factor else 0.0, generator)
    seen_AK = supervised_AK & chosen_A.unsqueeze(1)
    predecessors_AK = torch.cat((anchor_ids_A.unsqueeze(1), labels_AK[:, :-1]), 1)
    selector = _selector_sums(
        drafter, hidden_ABD, predecessors_AK, labels_AK, seen_AK, weights_AK, head, objective
    )
    selector_loss = selector.loss * (factor * len(chosen_A) / max(1, int(chosen_A.sum())))
    loss = unary_loss + selector_loss

    best_AK = _spread(best_M, supervised_AK)
    known_AK, top1_AK = (seen_AK, selector.first) if sampled else (supervised_AK, best_AK)
    whole_A = known_AK[:, 0] & (known_AK == supervised_AK).all(1)
    metrics = {
        "blocks": torch.tensor(len(hidden_ABD)),
        "slots": supervised_AK.sum(0),
        "loss": loss,
        "unary_loss": unary_loss,
        "selector_loss": selector_loss,
        "ce": ce_M.sum(dtype=torch.float64),
        "gold_probability": gold_M.sum(dtype=torch.float64),
        "sample_top1_hits": best_AK.sum(0),
        "top1_hits": top1_AK.sum(0),
        "top1_slots": known_AK.sum(0),
        "unary_run": leading_run(top1_AK)[whole_A].sum(),
        "run_blocks": whole_A.sum(),
        "recall_slots": seen_AK.sum(0),
        "recall_hits": selector.recalled.sum(0),
        "selector_hits": selector.chosen.sum(0),
        "candidate_top1_hits": selector.first.sum(0),
    }
    return LossSums(loss, {name: value.detach().double() for name, value in metrics.items()})


def leading_run(hits_AK: Tensor) -> Tensor:
    """Return int64 [A], the hits of each block before its first miss."""
    return hits_AK.long().cumprod(1).sum(1)


def _slot_loss(objective: ObjectiveConfig, ce_M: Tensor, gold_M: Tensor) -> Tensor:
    if objective.loss == "ce":
        return ce_M
    if objective.loss == "tv":
        return 1 - gold_M
    share_M = objective.lambda_scale * torch.exp(-objective.lambda_decay * gold_M.detach())
    return share_M * ce_M + (1 - share_M) * (1 - gold_M)


@dataclass
class _SelectorSums:
    """The selector on the seen slots: its loss and, as bool [A, K], where the label was recalled, was chosen
    after the true predecessor, and was the first candidate.
    """

    loss: Tensor
    recalled: Tensor
    chosen: Tensor
    first: Tensor


def _selector_sums(
    drafter: Drafter,
    hidden_ABD: Tensor,
    predecessors_AK: Tensor,
    labels_AK: Tensor,
    seen_AK: Tensor,
    weights_AK: Tensor,
    head: FrozenHead,
    objective: ObjectiveConfig,
) -> _SelectorSums:
    """Sum the cross entropy over the candidates, given the true predecessor, where one is the label."""
    nothing_AK = torch.zeros_like(seen_AK)
    if drafter.candidate_selector is None:
        return _SelectorSums(hidden_ABD.new_zeros(()), nothing_AK, nothing_AK, nothing_AK)
    # a rank without blocks still has to give every parameter a gradient, of zero
    loss = hidden_ABD.new_zeros(()) + sum(
        0.0 * weight.sum() for weight in drafter.candidate_selector.parameters()
    )
    if not seen_AK.any():
        return _SelectorSums(loss, nothing_AK, nothing_AK, nothing_AK)
    rows_MD, labels_M = hidden_ABD[:, 1:][seen_AK], labels_AK[seen_AK]
    candidates_Mk = top_k(
        rows_MD.detach(),
        head,
        drafter.config.selector_top_k,
        row_tile=objective.row_tile,
        vocabulary_tile=objective.vocabulary_tile,
    )
    match_Mk = candidates_Mk == labels_M.unsqueeze(1)
    recalled_M = match_Mk.any(1)
    candidates_Nk, place_N = candidates_Mk[recalled_M], match_Mk[recalled_M].int().argmax(1)
    rows_ND = rows_MD[recalled_M]
    unary_Nk = candidate_logits(rows_ND, head, candidates_Nk, LogitScale.of(drafter.config))
    scores_Nk = drafter.candidate_selector.scores(
        predecessors_AK[seen_AK][recalled_M], rows_ND, candidates_Nk, unary_Nk, head
    )
    wide = torch.promote_types(scores_Nk.dtype, torch.float32)
    ce_N = F.cross_entropy(scores_Nk.to(wide), place_N, reduction="none")
    loss = loss + (weights_AK[seen_AK][recalled_M] * ce_N).sum()
    chosen_M = recalled_M.clone()
    chosen_M[recalled_M] = scores_Nk.argmax(1) == place_N
    return _SelectorSums(
        loss, _spread(recalled_M, seen_AK), _spread(chosen_M, seen_AK), _spread(match_Mk[:, 0], seen_AK)
    )


def _choose_blocks(hidden_ABD: Tensor, fraction: float, generator: torch.Generator | None) -> Tensor:
    """Return bool [A], the blocks that the selector sees: at least one unless the share is zero."""
    blocks = len(hidden_ABD)
    chosen_A = torch.zeros(blocks, dtype=torch.bool, device=hidden_ABD.device)
    if fraction == 1.0:
        return ~chosen_A
    if fraction > 0.0 and blocks:
        device = None if generator is None else generator.device
        order = torch.randperm(blocks, generator=generator, device=device).to(chosen_A.device)
        chosen_A[order[: max(1, round(fraction * blocks))]] = True
    return chosen_A


def _spread(values_M: Tensor, mask_AK: Tensor) -> Tensor:
    """Put the values of the masked slots back at their places, zero elsewhere."""
    spread_AK = values_M.new_zeros(mask_AK.shape)
    spread_AK[mask_AK] = values_M
    return spread_AK
