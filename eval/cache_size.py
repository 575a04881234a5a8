"""Bytes of keys and values that a drafter and its target keep for one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from drafter.config import DrafterConfig


@dataclass(frozen=True)
class CacheSize:
    """How a cache grows with the context.

    Attributes:
        bytes_per_token: of layers that keep every token.
        window_bytes_per_token: of layers that slide, until their windows are full.
        window_bytes: of all full windows.
        target_bytes_per_token: what the target keeps for one token in all its layers; None where its config
            does not say, or where not every layer keeps every token.
    """

    bytes_per_token: int
    window_bytes_per_token: int
    window_bytes: int
    target_bytes_per_token: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def draft_cache(config: DrafterConfig, target: Mapping[str, Any], element_bytes: int) -> CacheSize:
    """Size of a drafter's: 2 x key/value heads x head size x bytes of an element, a layer and token.

    Args:
        config: of the drafter. A sliding layer keeps the last W - 1 tokens (`drafter.cache`).
        target: config.json of the target.
        element_bytes: of the cache's dtype.
    """
    layer = 2 * config.num_key_value_heads * config.head_dim * element_bytes
    kept = [None if mask.window is None else mask.window - 1 for mask in config.layer_masks]
    return CacheSize(
        bytes_per_token=layer * sum(rows is None for rows in kept),
        window_bytes_per_token=layer * sum(rows is not None for rows in kept),
        window_bytes=layer * sum(rows for rows in kept if rows is not None),
        target_bytes_per_token=_target_bytes(target, element_bytes),
    )


def _target_bytes(config: Mapping[str, Any], element_bytes: int) -> int | None:
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    kinds = config.get("layer_types") or (["sliding_attention"] if slides else ["full_attention"])
    if set(kinds) != {"full_attention"}:
        return None
    return int(2 * heads * size * element_bytes * config["num_hidden_layers"])
