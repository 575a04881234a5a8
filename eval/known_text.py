"""What a drafter proposes at given places of a text that is known, step by step as in decoding.

A text that an engine has written is read by the target once; every place where the engine drafted is then one
pass of the drafter. So the project's own drafts stand beside the engine's at the same places, whatever the
engine accepted, and a varied drafter costs no further pass of the target.

Shape legend: T tokens of a text, L output tokens, K drafts, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.cache import DraftCache, draft_hidden
from drafter.frozen import FrozenHead
from drafter.model import Drafter
from drafter.proposal import propose
from eval.target import Target


@dataclass(frozen=True)
class KnownText:
    """A prompt, what an engine answered, and what it drafted on the way.

    Attributes:
        prompt: token ids.
        output: token ids.
        drafts: (output tokens before the draft, drafted token ids), in order.
        features: layer -> [T, D], the layer's output at every token.
        odd_tokens: output tokens that are not the target's own choice by more than rounding.
    """

    prompt: list[int]
    output: list[int]
    drafts: list[tuple[int, list[int]]]
    features: dict[int, Tensor]
    odd_tokens: int

    def accepted(self, before: int, draft: Sequence[int]) -> int:
        """Drafts that the text goes on with."""
        follows = self.output[before : before + len(draft)]
        return next((i for i, (a, b) in enumerate(zip(draft, follows, strict=False)) if a != b), len(follows))


@torch.inference_mode()
def read_text(
    target: Target,
    prompt: Sequence[int],
    output: Sequence[int],
    drafts: Sequence[tuple[int, list[int]]],
    layers: Sequence[int],
    tie_bound: float,
) -> KnownText:
    """Run the target over a text, prompt in parts and output at once.

    Args:
        target: the drafter's.
        prompt: token ids.
        output: token ids.
        drafts: what an engine drafted.
        layers: decoder layers whose outputs to keep.
        tie_bound: logit distance within which two tokens are the same choice.
    """
    session = target.open(layers)
    rows: list[Tensor] = []
    logits_V = session.prefill(torch.tensor(prompt, device=target.device), rows.append)
    logits_LV, features = session.forward(torch.tensor(output, device=target.device))
    logits_LV = torch.cat([logits_V[None], logits_LV[:-1]]).float()
    chosen = logits_LV.gather(-1, torch.tensor(output, device=target.device)[:, None])[:, 0]
    odd = int((logits_LV.amax(-1) - chosen > tie_bound).sum())
    assert features is not None
    by_layer = torch.cat([*rows, features]).chunk(len(layers), dim=-1)
    kept = dict(zip(layers, by_layer, strict=True))
    return KnownText(list(prompt), list(output), list(drafts), kept, odd)


@torch.inference_mode()
def own_drafts(
    drafter: Drafter, head: FrozenHead, text: KnownText, *, taps: Sequence[int], block: int
) -> list[list[int]]:
    """The project's own greedy drafts at the places of `text.drafts`.

    Args:
        drafter: in the dtype to decode in.
        head: the target's tables.
        text: as read from the target.
        taps: layers whose features the drafter is given, in the order of its `fc`.
        block: rows of a block, anchor included.
    """
    ids = [*text.prompt, *text.output]
    features_TF = torch.cat([text.features[layer] for layer in taps], dim=-1)
    cache, found = DraftCache(drafter.config), []
    for before, _ in text.drafts:
        context = len(text.prompt) + before - 1
        anchor_1 = torch.tensor(ids[context : context + 1], device=features_TF.device)
        new_rows = features_TF[cache.length : context]
        hidden_1BD = draft_hidden(drafter, cache, new_rows, anchor_1, head, block_size=block)
        found.append(propose(drafter, hidden_1BD, anchor_1, head).ids[0].tolist())
    return found


def acceptance_length(texts: Sequence[KnownText], drafts: Sequence[Sequence[Sequence[int]]]) -> float:
    """1 + accepted drafts / places: what drafts at these places would have been worth."""
    accepted = [
        text.accepted(before, draft)
        for text, own in zip(texts, drafts, strict=True)
        for (before, _), draft in zip(text.drafts, own, strict=True)
    ]
    return 1 + sum(accepted) / len(accepted)


def agreement(text: KnownText, drafts: Sequence[Sequence[int]]) -> float:
    """Share of the engine's drafted tokens that are equal to `drafts`, one at each place."""
    pairs = [
        (theirs, ours)
        for (_, engine), own in zip(text.drafts, drafts, strict=True)
        for theirs, ours in zip(engine, own, strict=False)
    ]
    return sum(theirs == ours for theirs, ours in pairs) / len(pairs)
