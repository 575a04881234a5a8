"""Sums that a run adds up, and the figures that it prints of them.

Everything is kept as a sum until it is printed: a figure of several micro-batches, steps or ranks is then one
quotient of two sums, and nothing is averaged twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from csbp.transport import KINDS

STEP_KINDS = tuple(kind for kind in KINDS if kind != "gradients")  # what crosses context ranks in a step
# read from stores by all ranks, and what the blocks of each replica can see, each row once
BYTES_READ = ("feature_bytes_read", "union_bytes", "state_bytes_read")


class Sums:
    """Float64 sums by name."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            tensor = torch.as_tensor(value, dtype=torch.float64)
            self.values[name] = self.values[name] + tensor if name in self.values else tensor

    def take(self) -> dict[str, Tensor]:
        """The sums so far; counting begins anew."""
        values, self.values = self.values, {}
        return values


def training_figures(sums: Mapping[str, Tensor]) -> dict[str, Any]:
    """What one line of metrics.jsonl says of some training steps.

    Args:
        sums: over steps, micro-batches and ranks, of `block_loss`'s metrics and of documents, coverage,
        bytes.
    """
    slots = float(sums["slots"].sum())
    figures = {
        "loss": _ratio(sums["loss"], slots),
        "unary_loss": _ratio(sums["unary_loss"], slots),
        "selector_loss": _ratio(sums["selector_loss"], slots),
        "ce": _ratio(sums["ce"], slots),
        "top1": _ratio(sums["top1_hits"].sum(), sums["top1_slots"].sum()),
        "coverage": _ratio(sums["coverage"], sums["documents"]),
        **{name: float(sums[name]) for name in BYTES_READ},
        "gradient_bytes": float(sums["gradient_bytes"]),
        "sent_bytes": {kind: float(sums[f"sent_{kind}"]) for kind in STEP_KINDS},
    }
    figures |= {name: _ratio(sums[name], slots) for name in ("kl", "target_ce", "overlap") if name in sums}
    if float(sums["recall_slots"].sum()):
        recall_slots = sums["recall_slots"].sum()
        figures["recall"] = _ratio(sums["recall_hits"].sum(), recall_slots)
        figures["selector_top1"] = _ratio(sums["selector_hits"].sum(), recall_slots)
    return figures


def per_slot(hits_K: Tensor, slots_K: Tensor) -> list[float]:
    """Rate of each slot, slot 1 first; 0 where a slot has no case."""
    return [_ratio(hit, slot) for hit, slot in zip(hits_K, slots_K, strict=True)]


def _ratio(part: Tensor | float, whole: Tensor | float) -> float:
    return float(part) / float(whole) if float(whole) else 0.0
