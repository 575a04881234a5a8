"""Tap ids of drafters and of vLLM. This is the only place that converts between them.

A drafter's `target_layer_ids` are layer OUTPUTS; vLLM's `eagle_aux_hidden_state_layer_ids` name the residual
stream ENTERING a layer, so the output of layer l is id l + 1 there (and `hidden_states[l + 1]` in
transformers).
"""

from __future__ import annotations

from collections.abc import Sequence


def engine_layer_ids(target_layer_ids: Sequence[int]) -> list[int]:
    """The ids that vLLM gives these layer outputs."""
    return [layer + 1 for layer in target_layer_ids]
