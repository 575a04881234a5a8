"""From hidden states to drafts, exactly as engines do it, and how far such drafts get on known text.

Shape legend: A blocks, B rows of a block, K drafted slots, D hidden, V vocabulary, k candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.frozen import FrozenHead, LogitScale
from drafter.model import Drafter
from drafter.objective import leading_run
from drafter.vocabulary import all_logits, candidate_logits, top_k

_SCORED_CANDIDATES = 16  # of a DFlash slot, when a draft is to be told how sure it is


@dataclass
class Proposal:
    """Drafts of some blocks.

    Attributes:
        ids: int64 [A, K], the drafts.
        candidates: int64 [A, K, k], the tokens that `probabilities` are of, best unary logit first; None in
            DFlash, whose proposal is over the whole vocabulary in order.
        probabilities: [A, K, k] in DFlash2 and [A, K, V] in DFlash, what each draft was drawn from given the
            drafts before it; None at temperature 0, where each draft has probability one.
        scores: [A, K, 2], log-probabilities of each draft among its slot's candidates: by the selector's
            scores and by unary logits (the same twice in DFlash); None unless asked for.
    """

    ids: Tensor
    candidates: Tensor | None = None
    probabilities: Tensor | None = None
    scores: Tensor | None = None


@torch.no_grad()
def propose(
    drafter: Drafter,
    hidden_ABD: Tensor,
    anchor_ids_A: Tensor,
    head: FrozenHead,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    *,
    scored: bool = False,
) -> Proposal:
    """Draft slots 1 .. B - 1 of each block.

    DFlash takes or draws each slot alone. DFlash2 walks from the anchor over each slot's candidates,
    greedily or by drawing from softmax(score / temperature), the previous draft being the next
    predecessor.

    Args:
        drafter: gives the scale of logits and the selector.
        hidden_ABD: final-normed states of the block rows, the anchor's row first.
        anchor_ids_A: int64, the token at each anchor.
        head: the target's frozen tables.
        temperature: 0 for the best token.
        generator: source of randomness.
        scored: also tell how sure each draft is, at temperature 0; nothing may be done with a drawn draft
            because of what it is.
    """
    rows_AKD = hidden_ABD[:, 1:]
    if drafter.candidate_selector is not None:
        scored = scored and temperature <= 0
        return _walk(drafter, rows_AKD, anchor_ids_A, head, temperature, generator, scored=scored)
    if temperature <= 0:
        return _best(drafter, rows_AKD, head, scored=scored)
    logits_AKV = all_logits(rows_AKD, head, LogitScale.of(drafter.config))
    probabilities = torch.softmax(logits_AKV / temperature, -1)
    return Proposal(_draw(probabilities, generator), None, probabilities)


def _best(drafter: Drafter, rows_AKD: Tensor, head: FrozenHead, *, scored: bool) -> Proposal:
    shape, flat = rows_AKD.shape[:2], rows_AKD.flatten(0, 1)
    if not scored:
        return Proposal(top_k(flat, head, 1).view(shape))
    candidates = top_k(flat, head, _SCORED_CANDIDATES)
    logits = candidate_logits(flat, head, candidates, LogitScale.of(drafter.config))
    score_AK = logits.log_softmax(-1)[:, 0].view(shape)
    return Proposal(candidates[:, 0].view(shape), scores=score_AK.unsqueeze(-1).expand(*shape, 2))


def _walk(
    drafter: Drafter,
    rows_AKD: Tensor,
    anchor_ids_A: Tensor,
    head: FrozenHead,
    temperature: float,
    generator: torch.Generator | None,
    *,
    scored: bool,
) -> Proposal:
    assert drafter.candidate_selector is not None
    shape = (*rows_AKD.shape[:2], drafter.config.selector_top_k)
    flat = rows_AKD.flatten(0, 1)
    candidates = top_k(flat, head, shape[2])
    unary_AKk = candidate_logits(flat, head, candidates, LogitScale.of(drafter.config)).view(shape)
    candidates_AKk = candidates.view(shape)
    previous_A, path, drawn_from, sure = anchor_ids_A, [], [], []
    for slot in range(shape[1]):
        candidates_Ak = candidates_AKk[:, slot]
        scores_Ak = drafter.candidate_selector.scores(
            previous_A, rows_AKD[:, slot], candidates_Ak, unary_AKk[:, slot], head
        )
        if temperature > 0:
            drawn_from.append(torch.softmax(scores_Ak / temperature, -1))
            place_A = _draw(drawn_from[-1], generator)
        else:
            place_A = scores_Ak.argmax(-1)
        previous_A = candidates_Ak.gather(1, place_A.unsqueeze(1)).squeeze(1)
        path.append(previous_A)
        if scored:
            both_2Ak = torch.stack([scores_Ak, unary_AKk[:, slot].to(scores_Ak.dtype)]).log_softmax(-1)
            sure.append(both_2Ak.gather(2, place_A.expand(2, -1).unsqueeze(2)).squeeze(2).T)
    ids = torch.stack(path, 1)
    return Proposal(
        ids,
        candidates_AKk,
        torch.stack(drawn_from, 1) if drawn_from else None,
        torch.stack(sure, 1) if sure else None,
    )


def _draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])


@torch.no_grad()
def walk_metrics(
    drafter: Drafter,
    hidden_ABD: Tensor,
    anchor_ids_A: Tensor,
    labels_AK: Tensor,
    supervised_AK: Tensor,
    head: FrozenHead,
) -> dict[str, Tensor]:
    """Compare greedy drafts with known text; float64 sums that add over batches and ranks.

    Keys: walk_blocks, blocks whose first slot is supervised; walk_run, drafts before each block's first
    miss or first unsupervised slot; walk_prefix_hits [K] of walk_prefix_slots [K], blocks whose first j
    drafts all hit, of those whose first j slots are all supervised; walk_hits [K] and recall_hits [K] of
    walk_slots [K], slots whose draft is the label and whose candidates hold it (in DFlash the draft is
    the only candidate); unary_run, as walk_run with the best unary token in place of the selector's
    choice.
    """
    proposal = propose(drafter, hidden_ABD, anchor_ids_A, head)
    hits_AK = (proposal.ids == labels_AK) & supervised_AK
    if proposal.candidates is None:
        recalled_AK, unary_AK = hits_AK, hits_AK
    else:
        match_AKk = (proposal.candidates == labels_AK.unsqueeze(-1)) & supervised_AK.unsqueeze(-1)
        recalled_AK, unary_AK = match_AKk.any(-1), match_AKk[..., 0]
    sums = {
        "walk_blocks": supervised_AK[:, 0].sum(),
        "walk_run": leading_run(hits_AK).sum(),
        "unary_run": leading_run(unary_AK).sum(),
        "walk_prefix_hits": hits_AK.long().cumprod(1).sum(0),
        "walk_prefix_slots": supervised_AK.long().cumprod(1).sum(0),
        "walk_hits": hits_AK.sum(0),
        "walk_slots": supervised_AK.sum(0),
        "recall_hits": recalled_AK.sum(0),
    }
    return {name: value.double() for name, value in sums.items()}
