"""A trained drafter inside the speculative loop.

Shape legend: T context rows, R new rows, F feature width, D hidden size, K drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from drafter.cache import DraftCache, draft_hidden
from drafter.config import DrafterConfig
from drafter.frozen import FrozenHead
from drafter.model import Drafter
from drafter.proposal import propose
from eval.batch_drafter import BatchBlockDrafter
from eval.draft_length import DraftLength
from eval.errors import EvalError
from eval.sampling import Draft, Sampling


class BlockDrafter:
    """DFlash v1 or v2: one parallel pass over a block that reads the target's features.

    The prompt's context keys and values are computed while the prompt is read, so they count as prefill; a
    step projects only the rows that the last verify added.

    Attributes:
        length: cuts greedy drafts that are not worth verifying; None keeps all.
    """

    def __init__(
        self,
        model: Drafter,
        head: FrozenHead,
        *,
        name: str,
        block: int | None = None,
        length: DraftLength | None = None,
    ) -> None:
        config = model.config
        self.name = name
        self.taps = tuple(config.target_layer_ids)
        self.block = config.block_size if block is None else block
        if not 2 <= self.block <= config.block_size:
            raise EvalError(
                f"block is {self.block}, but drafter {name} was trained with {config.block_size} rows: take "
                f"2 to {config.block_size} (a shorter block than trained works, a longer one does not)"
            )
        self.length = length
        self._model = model.eval()
        self._head = head
        self._sampling = Sampling()
        self._generator: torch.Generator | None = None
        self._cache = DraftCache(config)
        self._pending_RF = head.embedding.new_empty(0, config.feature_width)

    def start(self, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator | None) -> None:  # noqa: ARG002 the prompt comes as features
        """Empty the context."""
        self._sampling, self._generator = sampling, generator
        self._cache = DraftCache(self._model.config)
        self._pending_RF = self._pending_RF[:0]

    def prefill(self, features_RF: Tensor) -> None:
        """Project the prompt's rows into the context, by a pass over the shortest block there is."""
        anchor = torch.zeros(1, dtype=torch.int64, device=features_RF.device)
        draft_hidden(self._model, self._cache, features_RF, anchor, self._head, block_size=1)

    def observe(self, emitted: Sequence[int], features_RF: Tensor | None) -> None:  # noqa: ARG002 tokens come back as features
        """Keep the verified rows for the next draft."""
        if features_RF is not None:
            self._pending_RF = features_RF

    def draft(self, anchor: Tensor, count: int) -> Draft:
        """Propose `count` tokens or fewer; only the temperature of the request is applied to the proposal."""
        hidden_1BD = draft_hidden(
            self._model, self._cache, self._pending_RF, anchor, self._head, block_size=count + 1
        )
        self._pending_RF = self._pending_RF[:0]
        temperature = max(self._sampling.temperature, 0.0)
        proposal = propose(
            self._model,
            hidden_1BD,
            anchor,
            self._head,
            temperature,
            self._generator,
            scored=self.length is not None,
        )
        if self.length is not None and proposal.scores is not None:
            count = self.length.choose(proposal.scores[0])
        ids = proposal.ids[0, :count]
        if proposal.probabilities is None:
            return Draft(ids)
        candidates = None if proposal.candidates is None else proposal.candidates[0, :count]
        return Draft(ids, proposal.probabilities[0, :count], candidates)

    def batched(self, slots: int, sampling: Sampling, generator: torch.Generator | None) -> BatchBlockDrafter:
        """The same drafter for several sequences at once."""
        return BatchBlockDrafter(
            self._model, self._head, block=self.block, slots=slots, sampling=sampling, generator=generator
        )


def read_config(directory: Path) -> DrafterConfig:
    """The config of a drafter on disk, without its weights.

    Raises:
        EvalError: no config.json there.
        ConfigError: one that is not a drafter's.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise EvalError(
            f"expected a drafter's config.json in {directory}, found none; give its export folder"
        )
    return DrafterConfig.from_dict(json.loads(path.read_text()))


def without_dflash2(model: Drafter) -> Drafter:
    """The same weights as DFlash v1: convolutions and selector left out.

    Raises:
        EvalError: the drafter is a v1 already.
    """
    if model.config.version == 1:
        raise EvalError("the drafter is DFlash v1 already; leave the baseline `v1` out")
    plain = Drafter(replace(model.config, version=1)).to(model.norm.weight.device, model.norm.weight.dtype)
    state = model.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    return plain
