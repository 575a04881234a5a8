"""A trained drafter for several sequences at once: one pass over all blocks, one product with the head.

Shape legend: A sequences of a pass, T new context rows of all of them, n context rows looked at, B rows of
the longest block, R rows of a verify step, F feature width, H query heads, G key/value heads, r = H / G query
heads per key head, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.attention import LayerMask
from drafter.config import DrafterConfig
from drafter.dense import mask_allows
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.proposal import propose
from eval.sampling import Drafts, Sampling

_SPARE = 256  # rows between two growths of a buffer


class RaggedContext:
    """`BlockAttention` for one block a sequence, each after a context of its own length.

    Place p of a slot holds position p of its sequence; a block's rows follow its context and are overwritten
    by what the target accepts. `drafter.cache.DraftCache` does the same for one sequence.
    """

    def __init__(self, config: DrafterConfig, slots: int) -> None:
        self.lengths = [0] * slots
        self._slots = slots
        self._masks = config.layer_masks
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * len(self._masks)

    def begin(self, slots: range, new: Sequence[int], rows: Sequence[int], device: torch.device) -> None:
        """Announce a pass over `slots`: each one's new context rows, and the rows of its own block."""
        counts_A = torch.tensor(new, device=device)
        before_A = torch.tensor([self.lengths[slot] for slot in slots], device=device)
        for slot, count in zip(slots, new, strict=True):
            self.lengths[slot] += count
        self._range = slice(slots.start, slots.stop)
        total = sum(new)
        first_A = counts_A.cumsum(0) - counts_A
        row_T = torch.arange(len(slots), device=device).repeat_interleave(counts_A, output_size=total)
        self.context_T = torch.arange(total, device=device) - first_A[row_T] + before_A[row_T]
        self._slot_T = row_T + slots.start
        lengths_A = before_A + counts_A
        self.block_AB = lengths_A[:, None] + torch.arange(max(rows), device=device)
        self._slots_A1 = torch.arange(slots.start, slots.stop, device=device)[:, None]
        self._end_A = lengths_A + torch.tensor(rows, device=device)
        self._shortest = min(self.lengths[slot] for slot in slots)
        self._longest = max(self.lengths[slot] for slot in slots) + max(rows)
        self._visible: dict[LayerMask, Tensor] = {}

    def context_rows(self, layer: int) -> Tensor | None:
        """Rows of a long prompt that a sliding layer looks back at; steps have few rows and keep them all."""
        window, total = self._masks[layer].window, len(self.context_T)
        if window is None or len(self.block_AB) > 1 or total < window:
            return None
        return torch.arange(total - (window - 1), total, device=self.context_T.device)

    def __call__(
        self,
        layer: int,
        q_ABHE: Tensor,
        k_block_ABGE: Tensor,
        v_block_ABGE: Tensor,
        k_context_TGE: Tensor,
        v_context_TGE: Tensor,
    ) -> Tensor:
        A, B, H, E = q_ABHE.shape
        G = k_block_ABGE.shape[2]
        low, views = self._first_visible(layer), []
        kept = self.context_rows(layer)
        slot_T, place_T = (t if kept is None else t[kept] for t in (self._slot_T, self.context_T))
        for buffer, context, block in zip(
            self._reserve(layer, k_block_ABGE),
            (k_context_TGE, v_context_TGE),
            (k_block_ABGE, v_block_ABGE),
            strict=True,
        ):
            buffer[slot_T, :, place_T] = context
            buffer[self._slots_A1, :, self.block_AB] = block
            views.append(buffer[self._range, :, low : self._longest])
        k_AGnE, v_AGnE = views
        q_AGrE = q_ABHE.view(A, B, G, -1, E).permute(0, 2, 3, 1, 4).reshape(A, G, -1, E)
        scores = (q_AGrE @ k_AGnE.mT).to(torch.promote_types(q_ABHE.dtype, torch.float32)) * E**-0.5
        hidden_ABn = ~self._visible_to(layer, low)
        scores = scores.view(A, G, -1, B, scores.shape[-1]).masked_fill(hidden_ABn[:, None, None], -torch.inf)
        mixed = scores.softmax(-1).to(v_AGnE.dtype).flatten(2, 3) @ v_AGnE
        return mixed.view(A, G, -1, B, E).permute(0, 3, 1, 2, 4).reshape(A, B, H, E)

    def select(self, slots: Sequence[int]) -> None:
        """Let only the sequences of these slots go on, in slots 0, 1, and so on (`eval.batch.compacted`)."""
        self.lengths = [self.lengths[slot] for slot in slots]
        for place, slot in enumerate(slots):
            if slot != place:
                for buffer in (buffer for pair in self._buffers for buffer in pair or ()):
                    buffer[place, :, : self.lengths[place]] = buffer[slot, :, : self.lengths[place]]

    def _first_visible(self, layer: int) -> int:
        window = self._masks[layer].window
        return 0 if window is None else max(0, self._shortest - (window - 1))

    def _visible_to(self, layer: int, low: int) -> Tensor:
        """Bool [A, B, n]: layers of one mask share it."""
        mask = self._masks[layer]
        if mask not in self._visible:
            key_n = torch.arange(low, self._longest, device=self.block_AB.device)
            allowed_ABn = mask_allows(mask, self.block_AB[..., None], key_n)
            self._visible[mask] = allowed_ABn & (key_n < self._end_A[:, None, None])
        return self._visible[mask]

    def _reserve(self, layer: int, like_ABGE: Tensor) -> tuple[Tensor, Tensor]:
        old = self._buffers[layer]
        if old is not None and old[0].shape[2] >= self._longest:
            return old
        capacity = max(self._longest + _SPARE, self._longest * 5 // 4)
        shape = (self._slots, like_ABGE.shape[2], capacity, like_ABGE.shape[3])
        # Zeros: a place that was never written is multiplied by a weight of zero, and 0 x NaN is NaN.
        fresh = (like_ABGE.new_zeros(shape), like_ABGE.new_zeros(shape))
        for new, buffer in zip(fresh, old or (), strict=False):
            new[:, :, : buffer.shape[2]] = buffer
        self._buffers[layer] = fresh
        return fresh


class BatchBlockDrafter:
    """`eval.block_drafter.BlockDrafter` for several sequences; see `eval.batch.BatchDrafter`."""

    def __init__(
        self,
        model: Drafter,
        head: FrozenHead,
        *,
        block: int,
        slots: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> None:
        self.taps = tuple(model.config.target_layer_ids)
        self.block = block
        self._model, self._head = model, head
        self._sampling, self._generator = sampling, generator
        self._context = RaggedContext(model.config, slots)
        self._new: list[int] = []
        self._pending_TF = head.embedding.new_empty(0, model.config.feature_width)

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """Empty a slot; its prompt comes as features."""
        del prompt
        self._context.lengths[slot] = 0

    def prefill(self, slot: int, features_RF: Tensor) -> None:
        """Project the prompt's rows into the context, by a pass over the shortest block there is."""
        anchor_1 = torch.zeros(1, dtype=torch.int64, device=features_RF.device)
        self._pass(range(slot, slot + 1), [len(features_RF)], [1], features_RF, anchor_1)

    def observe(self, emitted: Sequence[Sequence[int]], features_NRF: Tensor | None) -> None:
        """Keep the verified rows for the next draft."""
        if features_NRF is None:
            self._new = [0] * len(emitted)
            return
        self._new = [len(tokens) for tokens in emitted]
        self._pending_TF = torch.cat(
            [rows[:count] for rows, count in zip(features_NRF, self._new, strict=True)]
        )

    def draft(self, anchors_N: Tensor, counts: Sequence[int]) -> Drafts:
        """Propose `counts[i]` tokens after anchor i; only the temperature of the request is applied."""
        rows = [count + 1 for count in counts]
        hidden_NBD = self._pass(range(len(counts)), self._new, rows, self._pending_TF, anchors_N)
        temperature = max(self._sampling.temperature, 0.0)
        found = propose(self._model, hidden_NBD, anchors_N, self._head, temperature, self._generator)
        return Drafts(found.ids, counts, found.probabilities, found.candidates)

    def select(self, slots: Sequence[int]) -> None:
        """Let only the sequences of these slots go on, with the rows that wait for their next draft."""
        waiting = self._pending_TF.split(self._new)
        self._new = [self._new[slot] for slot in slots]
        self._pending_TF = torch.cat([self._pending_TF[:0], *(waiting[slot] for slot in slots)])
        self._context.select(slots)

    @torch.no_grad()
    def _pass(
        self, slots: range, new: Sequence[int], rows: Sequence[int], features_TF: Tensor, anchors_A: Tensor
    ) -> Tensor:
        model, context = self._model, self._context
        context.begin(slots, new, rows, anchors_A.device)
        hidden_ABD: Tensor = model(
            model.fuse(features_TF),
            context.context_T,
            embed_blocks(self._head, model.config, anchors_A, max(rows)),
            context.block_AB,
            context,
        )
        return hidden_ABD
