"""Tap ids of drafters and of vLLM. This is the only place that converts between them.

A drafter's `target_layer_ids` are layer OUTPUTS; vLLM's `eagle_aux_hidden_state_layer_ids` name the residual
stream ENTERING a layer, so the output of layer l is id l + 1 there (and `hidden_states[l + 1]` in
transformers).
"""

from __future__ import annotations

from collections.abc import Sequence


def engine_layer_ids(target_layer_ids: Sequence[int], last_of: int | None = None) -> list[int]:
    """The ids that vLLM gives these layer outputs.

    Args:
        target_layer_ids: increasing, without the last layer.
        last_of: layers of the target if the stream behind the last one, before the final norm, is wanted too;
            its id comes last.
    """
    ids = [layer + 1 for layer in target_layer_ids]
    return ids if last_of is None else [*ids, last_of]
