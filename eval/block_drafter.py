"""A trained drafter inside the speculative loop.

Shape legend: T context rows, R new rows, F feature width, D hidden size, K drafts, A = 1 block, B rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.cache import DraftCache
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.proposal import propose
from eval.errors import EvalError
from eval.sampling import Draft, Sampling


class BlockDrafter:
    """DFlash v1 or v2: one parallel pass over a block that reads the target's features.

    The prompt's context keys and values are computed while the prompt is read, so they count as prefill; a
    step projects only the rows that the last verify added.
    """

    def __init__(self, model: Drafter, head: FrozenHead, *, name: str, block: int | None = None) -> None:
        config = model.config
        self.name = name
        self.taps = tuple(config.target_layer_ids)
        self.block = config.block_size if block is None else block
        if not 2 <= self.block <= config.block_size:
            raise EvalError(
                f"block is {self.block}, but drafter {name} was trained with {config.block_size} rows: "
                f"choose 2 to {config.block_size} (a shorter block than trained works, a longer one does not)"
            )
        self._model = model
        self._head = head
        self._sampling = Sampling()
        self._generator: torch.Generator | None = None
        self._cache = DraftCache(config)
        self._pending_RF: Tensor | None = None

    def start(self, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator | None) -> None:  # noqa: ARG002 the prompt comes as features
        """Empty the context."""
        self._sampling, self._generator = sampling, generator
        self._cache = DraftCache(self._model.config)
        self._pending_RF = None

    def prefill(self, features_RF: Tensor) -> None:
        """Project the prompt's rows into the context."""
        nothing_ABD = features_RF.new_empty(0, self.block, self._model.config.hidden_size)
        self._run(
            features_RF, nothing_ABD, torch.empty(0, self.block, dtype=torch.int64, device=features_RF.device)
        )

    def observe(self, emitted: Sequence[int], features_RF: Tensor | None) -> None:  # noqa: ARG002 tokens come back as features
        """Keep the verified rows for the next draft."""
        self._pending_RF = features_RF

    def draft(self, anchor: Tensor, count: int) -> Draft:
        """Propose `count` tokens; only the temperature of the request is applied to the proposal."""
        config = self._model.config
        rows = 0 if self._pending_RF is None else self._pending_RF.shape[0]
        position = self._cache.length + rows
        blocks_ABD = embed_blocks(self._head, config, anchor, count + 1)
        positions_AB = torch.arange(position, position + count + 1, device=anchor.device)[None]
        features_RF = self._pending_RF
        if features_RF is None:
            features_RF = blocks_ABD.new_empty(0, config.feature_width)
        hidden_ABD = self._run(features_RF, blocks_ABD, positions_AB)
        proposal = propose(
            self._model, hidden_ABD, anchor, self._head, self._sampling.temperature, self._generator
        )
        if proposal.probabilities_AKk is None:
            return Draft(proposal.ids_AK[0])
        candidates = proposal.candidates_AKk
        return Draft(
            proposal.ids_AK[0], proposal.probabilities_AKk[0], None if candidates is None else candidates[0]
        )

    def _run(self, features_RF: Tensor, blocks_ABD: Tensor, positions_AB: Tensor) -> Tensor:
        context_RD = self._model.fuse(features_RF)
        start = self._cache.length
        positions_R = torch.arange(start, start + features_RF.shape[0], device=features_RF.device)
        hidden: Tensor = self._model(context_RD, positions_R, blocks_ABD, positions_AB, self._cache)
        return hidden
