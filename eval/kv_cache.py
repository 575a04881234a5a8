"""The target's key/value cache: transformers' own, with full-attention layers that grow in place.

`DynamicCache` concatenates, so it copies the whole context at every step. At 8K positions that costs more
than the target's own arithmetic, and it would flatter speculative decoding, which takes fewer steps.

Shape legend: N batch (1), G key/value heads, L cached positions, R new positions, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_FIRST_CAPACITY = 512


class RoomyLayer(DynamicLayer):
    """A full-attention layer that doubles its buffer and hands out views of it."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append [N, G, R, E] keys and values; return all L + R of them, [N, G, L + R, E]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        self._keys = _append(self._keys, key_states, old, new)
        self._values = _append(self._values, value_states, old, new)
        self.keys, self.values = self._keys[..., :new, :], self._values[..., :new, :]
        return self.keys, self.values


def _append(buffer: Tensor | None, rows: Tensor, old: int, new: int) -> Tensor:
    if buffer is None or buffer.shape[-2] < new:
        capacity = max(_FIRST_CAPACITY, 1 << (new - 1).bit_length())
        grown = torch.empty(*rows.shape[:-2], capacity, rows.shape[-1], dtype=rows.dtype, device=rows.device)
        if buffer is not None:
            grown[..., :old, :] = buffer[..., :old, :]
        buffer = grown
    buffer[..., old:new, :] = rows
    return buffer


def open_cache(config: Any) -> DynamicCache:
    """An empty cache of the right layer kinds for `config` that can be cropped after every forward."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    cache.activate_past_recording()
    return cache
