"""The target's cache and forwards for sequences of different lengths.

A row of the cache is a slot, and place p of a slot holds position p of its sequence. A step writes each
sequence's new rows at its own length; what lies behind a sequence's length is left over from rejected
drafts or from a longer neighbour, and no query may see it, because a query sees no later position.

Shape legend: N sequences, R rows of a step, L longest context, G key/value heads, E head size, V vocabulary,
F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from eval.errors import EvalError
from eval.target import Observe, Target

_SPARE = 256  # rows between two growths of the cache
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class Places:
    """Where the next update of every layer goes, and how far its result reaches."""

    def __init__(self) -> None:
        self.slots_N1 = self.places_NR = torch.empty(0, dtype=torch.int64)
        self.rows = self.length = 0


class RaggedLayer(DynamicLayer):
    """One layer of all slots; windows are a matter of masks, so every position is kept."""

    def __init__(self, slots: int, places: Places) -> None:
        super().__init__()
        self._slots = slots
        self._places = places
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write [N, G, R, E] keys and values to their places; return those up to L, [N, G, L, E]."""
        where = self._places
        keys, values = self._reserve(key_states, where.length)
        keys[where.slots_N1, :, where.places_NR] = key_states.transpose(1, 2)
        values[where.slots_N1, :, where.places_NR] = value_states.transpose(1, 2)
        return keys[: where.rows, :, : where.length], values[: where.rows, :, : where.length]

    def fill(self, slot: int, layer: DynamicLayer, length: int) -> None:
        """Take over the last rows of a single sequence's layer (a sliding one keeps only its window)."""
        assert layer.keys is not None
        assert layer.values is not None
        keys, values = self._reserve(layer.keys, length)
        kept = layer.keys.shape[-2]
        keys[slot, :, length - kept : length] = layer.keys[0]
        values[slot, :, length - kept : length] = layer.values[0]

    def move(self, source: int, slot: int, length: int) -> None:
        for buffer in (self._keys, self._values):
            assert buffer is not None
            buffer[slot, :, :length] = buffer[source, :, :length]

    def _reserve(self, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None or self._keys.shape[-2] < length:
            heads, size = like.shape[1], like.shape[3]
            capacity = max(length + _SPARE, length * 5 // 4)
            # Zeros: a place that was never written is multiplied by a weight of zero, and 0 x NaN is NaN.
            grown = [like.new_zeros(self._slots, heads, capacity, size) for _ in range(2)]
            for fresh, old in zip(grown, (self._keys, self._values), strict=True):
                if old is not None:
                    fresh[:, :, : old.shape[-2]] = old
            self._keys, self._values = grown
        return self._keys, self._values


class BatchSession:
    """The caches of N sequences and the forwards that fill them."""

    def __init__(self, target: Target, taps: Sequence[int], *, slots: int) -> None:
        self._target = target
        self._taps = tuple(taps)
        self._lengths = [0] * slots
        self._places = Places()
        template = DynamicCache(config=target.config)
        self._kinds = _layer_kinds(target, template.layers)
        self._windows = dict(
            zip(
                self._kinds,
                (getattr(layer, "sliding_window", None) for layer in template.layers),
                strict=True,
            )
        )
        self._cache = template
        self._cache.layers = [RaggedLayer(slots, self._places) for _ in self._kinds]

    def admit(self, slot: int, ids_T: Tensor, observe: Observe) -> Tensor:
        """Read a prompt into a slot; features go to `observe`; returns the last position's logits, [V]."""
        session = self._target.open(self._taps)
        logits_V = session.prefill(ids_T, observe)
        self._lengths[slot] = len(ids_T)
        for layer, single in zip(self._cache.layers, session.layers, strict=True):
            layer.fill(slot, single, len(ids_T))
        return logits_V

    def forward(self, ids_NR: Tensor) -> tuple[Tensor, Tensor | None]:
        """Append R tokens to each of the N running sequences; logits [N, R, V] and features [N, R, F]."""
        N, R = ids_NR.shape
        device = ids_NR.device
        places_NR = torch.tensor(self._lengths, device=device)[:, None] + torch.arange(R, device=device)
        where = self._places
        where.slots_N1 = torch.arange(N, device=device)[:, None]
        where.places_NR, where.rows, where.length = places_NR, N, max(self._lengths) + R
        output = self._target.model(
            ids_NR,
            attention_mask=self._masks(places_NR),
            # Rows behind a sequence's last draft may lie past the last position that the target has.
            position_ids=places_NR.clamp(max=self._target.max_positions - 1),
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits, self._target.take_features(self._taps)

    def keep(self, rows: Sequence[int]) -> None:
        """Let this many rows of each sequence's last forward stay; the others are forgotten."""
        self._lengths = [length + count for length, count in zip(self._lengths, rows, strict=True)]

    def select(self, slots: Sequence[int]) -> None:
        """Let only the sequences of these slots go on, in slots 0, 1, and so on (`eval.batch.compacted`)."""
        self._lengths = [self._lengths[slot] for slot in slots]
        for place, slot in enumerate(slots):
            if slot != place:
                for layer in self._cache.layers:
                    layer.move(slot, place, self._lengths[place])

    def _masks(self, places_NR: Tensor) -> Any:
        """Bool [N, 1, R, L] masks: one for all layers, or one for each kind of layer."""
        query_NR1 = places_NR[..., None]
        key_L = torch.arange(self._places.length, device=places_NR.device)
        causal = key_L <= query_NR1
        masks = {
            kind: (causal if window is None else causal & (query_NR1 - key_L < window))[:, None]
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _layer_kinds(target: Target, layers: Sequence[Any]) -> list[str]:
    """Each layer's kind as transformers names it.

    Raises:
        EvalError: a layer, or a rope that depends on the longest sequence, that only a batch of one can have.
    """
    rope = getattr(target.config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    changing = [kind for kind in _LENGTH_DEPENDENT_ROPE if kind in kinds]
    if changing:
        raise EvalError(
            f"rope_type {', '.join(changing)} of the target depends on the longest sequence of a batch, so "
            "sequences would change each other; use --batch-size 1"
        )
    strange = {type(layer).__name__ for layer in layers} - {
        DynamicLayer.__name__,
        DynamicSlidingWindowLayer.__name__,
    }
    if strange:
        raise EvalError(
            f"the target has cache layers of kind {', '.join(sorted(strange))}, which hold no row for each "
            "position; use --batch-size 1"
        )
    return ["sliding_attention" if layer.is_sliding else "full_attention" for layer in layers]
