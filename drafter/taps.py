"""Which layers of the target a drafter reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def default_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Return evenly spread taps, layer 1 to the third from the end (z-lab's rule when none are given)."""
    if num_taps == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + index * span / (num_taps - 1)) for index in range(num_taps)]


def tap_problem(target_layer_ids: Sequence[int], num_target_layers: int) -> str | None:
    """Say why these taps cannot be served, or None.

    Engines sort and de-duplicate tap ids; the last layer's output is normed in transformers and not in vLLM.
    """
    ids = list(target_layer_ids)
    if any(after <= before for before, after in itertools.pairwise(ids)):
        return (
            f"target_layer_ids {ids} must increase strictly: engines sort them, which permutes the features"
        )
    if ids[0] < 0 or ids[-1] >= num_target_layers - 1:
        return (
            f"target_layer_ids {ids} must lie in 0..{num_target_layers - 2}: the last of the target's "
            f"{num_target_layers} layers is read before its norm in one engine and after it in another"
        )
    return None
