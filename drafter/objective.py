"""What a drafter is trained for: a loss per slot, the selector's loss, and sums to report.

A slot is compared with the token that the target produced, or with the target's own distribution of it
(`drafter.distribution`), made from its stored last hidden state.

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
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from drafter.distribution import Distances, TargetStates, distances
from drafter.frozen import FrozenHead, LogitScale
from drafter.model import Drafter
from drafter.vocabulary import (
    ROW_TILE,
    VOCABULARY_TILE,
    candidate_logits,
    cross_entropy_with_candidates,
    full_vocabulary,
    sampled_vocabulary,
    top_k,
)

_PUBLISHED_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


class ObjectiveConfig(BaseModel):
    """Losses and weights of one training run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Literal["ce", "tv", "lambda", "kl", "target_tv", "lk"] = Field(
        "ce",
        description="Slot loss. On the target's token, of probability p in the draft: 'ce', cross entropy; "
        "'tv', total variation 1 - p; 'lambda', l * CE + (1 - l) * TV with l = lambda_scale * "
        "exp(-lambda_decay * p). On the target's distribution, from last hidden states (`capture "
        "--last-hidden`): 'kl', KL(target || draft); 'target_tv', total variation 1 - overlap, the chance "
        "that sampling rejects the draft; 'lk', l * KL + (1 - l) * TV with the overlap in place of p (arXiv "
        "2602.23881).",
    )
    lambda_scale: float = Field(
        1.0, ge=0, le=1, description="Largest share of cross entropy in 'lambda', of KL in 'lk'."
    )
    lambda_decay: float = Field(
        3.0, ge=0, description="How fast 'lambda' and 'lk' move to total variation as drafts get better."
    )
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

    @model_validator(mode="after")
    def _whole_distribution(self) -> ObjectiveConfig:
        if self.on_distribution and self.vocabulary_sample:
            raise ValueError(
                f"loss {self.loss} compares whole distributions, vocabulary_sample {self.vocabulary_sample} "
                "scores a part of the vocabulary; set it to 0"
            )
        return self

    @property
    def on_distribution(self) -> bool:
        """Whether slots are compared with the target's distribution; `block_loss` then needs its states."""
        return self.loss in ("kl", "target_tv", "lk")

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
    target: TargetStates | None = None,
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
        target: states [U, D] and rows int64 [A, K], where the objective is on the target's distribution.
    """
    scale = LogitScale.of(drafter.config)
    # unsupervised labels may be padding; they are never scored, but a slot may follow one
    labels_AK = labels_AK.clamp(0, len(head.head) - 1)
    labels_M = labels_AK[supervised_AK]
    sampled = 0 < objective.vocabulary_sample < len(head.head)
    factor = 0.0 if drafter.candidate_selector is None else objective.selector_factor(step)
    slots = _score_slots(
        objective,
        hidden_ABD[:, 1:][supervised_AK],
        labels_M,
        head,
        scale,
        generator,
        target,
        supervised_AK,
        drafter.config.selector_top_k if factor and not sampled else 0,
    )
    gold_M = torch.exp(-slots.ce)
    weights_AK = slot_weights(
        objective, hidden_ABD.shape[1], _spread(gold_M.detach(), supervised_AK), supervised_AK
    )
    unary_loss = (weights_AK[supervised_AK] * slots.loss).sum()

    chosen_A = _choose_blocks(hidden_ABD, objective.selector_blocks_fraction if factor else 0.0, generator)
    seen_AK = supervised_AK & chosen_A.unsqueeze(1)
    predecessors_AK = torch.cat((anchor_ids_A.unsqueeze(1), labels_AK[:, :-1]), 1)
    candidates = None if slots.candidates is None else slots.candidates[seen_AK[supervised_AK]]
    selector = _selector_sums(
        drafter, hidden_ABD, predecessors_AK, labels_AK, seen_AK, weights_AK, head, objective, candidates
    )
    selector_loss = selector.loss * (factor * len(chosen_A) / max(1, int(chosen_A.sum())))
    loss = unary_loss + selector_loss

    best_AK = _spread(slots.best, supervised_AK)
    known_AK, top1_AK = (seen_AK, selector.first) if sampled else (supervised_AK, best_AK)
    whole_A = known_AK[:, 0] & (known_AK == supervised_AK).all(1)
    metrics = {
        "blocks": torch.tensor(len(hidden_ABD)),
        "slots": supervised_AK.sum(0),
        "loss": loss,
        "unary_loss": unary_loss,
        "selector_loss": selector_loss,
        "ce": slots.ce.sum(dtype=torch.float64),
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
        **{name: value.sum(dtype=torch.float64) for name, value in slots.further.items()},
    }
    return LossSums(loss, {name: value.detach().double() for name, value in metrics.items()})


def leading_run(hits_AK: Tensor) -> Tensor:
    """Return int64 [A], the hits of each block before its first miss."""
    return hits_AK.long().cumprod(1).sum(1)


@dataclass
class _Slots:
    """Supervised slots [M]: loss, cross entropy of the label, whether it is the draft's best token, figures
    to report beside, and the best tokens [M, k] where they came with the rest.
    """

    loss: Tensor
    ce: Tensor
    best: Tensor
    further: dict[str, Tensor]
    candidates: Tensor | None = None


def _score_slots(
    objective: ObjectiveConfig,
    rows_MD: Tensor,
    labels_M: Tensor,
    head: FrozenHead,
    scale: LogitScale,
    generator: torch.Generator | None,
    target: TargetStates | None,
    supervised_AK: Tensor,
    k: int,
) -> _Slots:
    row_tile, vocabulary_tile = objective.row_tile, objective.vocabulary_tile
    if objective.on_distribution:
        assert target is not None
        found = distances(
            rows_MD,
            labels_M,
            TargetStates(target.states, target.rows[supervised_AK]),
            head,
            scale,
            kl=objective.loss != "target_tv",
            tv=objective.loss != "kl",
            row_tile=row_tile,
            vocabulary_tile=vocabulary_tile,
        )
        further = {"kl": found.kl, "target_ce": found.target_ce}
        if found.tv is not None:
            further["overlap"] = 1 - found.tv
        return _Slots(_distribution_loss(objective, found), found.ce, found.best, further)
    sampled = 0 < objective.vocabulary_sample < len(head.head)
    vocabulary = (
        sampled_vocabulary(labels_M, head, objective.vocabulary_sample, generator)
        if sampled
        else full_vocabulary(labels_M, head)
    )
    ce_M, best_M, candidates_Mk = cross_entropy_with_candidates(
        rows_MD, vocabulary, scale, k, row_tile=row_tile, vocabulary_tile=vocabulary_tile
    )
    return _Slots(_label_loss(objective, ce_M), ce_M, best_M, {}, candidates_Mk)


def _label_loss(objective: ObjectiveConfig, ce_M: Tensor) -> Tensor:
    if objective.loss == "ce":
        return ce_M
    gold_M = torch.exp(-ce_M)
    if objective.loss == "tv":
        return 1 - gold_M
    share_M = objective.lambda_scale * torch.exp(-objective.lambda_decay * gold_M.detach())
    return share_M * ce_M + (1 - share_M) * (1 - gold_M)


def _distribution_loss(objective: ObjectiveConfig, found: Distances) -> Tensor:
    if found.tv is None:
        return found.kl
    if objective.loss == "target_tv":
        return found.tv
    share_M = objective.lambda_scale * torch.exp(-objective.lambda_decay * (1 - found.tv.detach()))
    return share_M * found.kl + (1 - share_M) * found.tv


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
    candidates_Mk: Tensor | None,
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
    if candidates_Mk is None:
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
