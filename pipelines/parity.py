"""Are the rows what they claim to be? Comparison with plain transformers, and checks that need no reference.

A wrong tap, a wrong cache slot or a normed state trains a drafter that looks well and is useless when served,
so a capture compares its first sample with an independent computation and every sample with what no real row
can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.rowformat import DTYPES, LAST
from pipelines.store_schema import Manifest
from pipelines.target import target_config

# Rows of one computation in two programs differ by rounding: SmolLM2 in bfloat16 by 0.2-0.6 % overall, 3.4 %
# in its worst row of layer 27, in float32 by 1e-6. One layer off is 55-85 %.
_COMPUTING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
_STORING = {  # unit roundoff
    torch.float32: 0.0,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float8_e4m3fn: 2**-4,
}
PARITY_TOKENS = 256
_CONSTANT_ROWS = 4  # this many equal rows of different tokens are no accident


class ParityError(RuntimeError):
    """The engine's rows are not the target's hidden states."""


@dataclass(frozen=True)
class ParityReport:
    """How close the two computations are.

    Attributes:
        tokens: rows compared.
        tolerance: relative difference that was accepted.
        worst: tap (layer output) -> largest relative difference of a row.
    """

    tokens: int
    tolerance: float
    worst: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parity_tolerance(computed: torch.dtype, stored: torch.dtype) -> float:
    """Relative difference of a row that two correct computations may show."""
    return _COMPUTING[computed] + _STORING[stored]


@torch.inference_mode()
def reference_states(target: Path, token_ids: list[int], dtype: str = "auto") -> list[Tensor]:
    """Raw outputs [T, hidden] fp32 of all decoder layers by transformers on the CPU, then of the norm."""
    from transformers import AutoModelForCausalLM

    from pipelines.engine import EngineError
    from pipelines.engine_hf import decoder_layers, final_norm

    model = AutoModelForCausalLM.from_pretrained(
        target, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
    ).eval()
    outputs: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[0].float())

    hooks = [layer.register_forward_hook(keep) for layer in decoder_layers(model)]
    model(input_ids=torch.tensor([token_ids]), use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    try:
        norm = final_norm(model)
    except EngineError:
        return outputs
    outputs.append(norm(outputs[-1].to(next(model.parameters()).dtype)).float())
    return outputs


def compare_captured(
    found: dict[str, Tensor], manifest: Manifest, token_ids: list[int], target: Path
) -> ParityReport:
    """Compare a captured sequence with transformers; a last hidden state counts as a tap of the last layer.

    Args:
        found: family of rows -> all rows of the sequence.
        manifest: of the store.
        token_ids: the sequence.
        target: checkpoint folder.

    Raises:
        ParityError: see `compare_rows`.
    """
    states = reference_states(target, token_ids, manifest.target_dtype)
    layers = int(target_config(target)["num_hidden_layers"])
    taps = [*manifest.target_layer_ids, *([layers - 1] if LAST in found else [])]
    rows_TW = torch.cat(list(found.values()), dim=1)
    tolerance = parity_tolerance(DTYPES[manifest.target_dtype], DTYPES[manifest.dtype])
    return compare_rows(rows_TW, taps, states, tolerance)


def compare_rows(
    rows_TW: Tensor, target_layer_ids: Sequence[int], states: list[Tensor], tolerance: float
) -> ParityReport:
    """Compare captured rows with reference states.

    Args:
        rows_TW: [T, taps * hidden], any float dtype.
        target_layer_ids: taps in the order of the row.
        states: from `reference_states`: layer outputs, and last the final norm's output if there is one.
        tolerance: largest relative difference per row and tap.

    Raises:
        ParityError: beyond it; names layer, row and likely cause.
    """
    hidden = states[0].shape[1]
    worst: dict[int, float] = {}
    for number, tap in enumerate(target_layer_ids):
        found = rows_TW[:, number * hidden : (number + 1) * hidden].float()
        difference = _relative(found, states[tap])
        row = int(difference.argmax())
        worst[tap] = float(difference[row])
        if not worst[tap] <= tolerance:
            cause = _likely_cause(found, tap, states, tolerance)
            raise ParityError(
                f"tap {tap} (output of layer {tap}), row {row}: the engine's row differs from transformers' "
                f"by {worst[tap]:.1%} (allowed {tolerance:.1%}). {cause}"
            )
    return ParityReport(rows_TW.shape[0], tolerance, worst)


def _likely_cause(found: Tensor, tap: int, states: list[Tensor], tolerance: float) -> str:
    if bool((found == 0).all(dim=1).any()):
        row = int((found == 0).all(dim=1).nonzero()[0])
        return f"Likely cause: wrong cache slots - row {row} is all zeros"
    for other, state in enumerate(states):
        if other == tap or float(_relative(found, state).median()) > tolerance:
            continue
        if other == len(states) - 1 and state.shape == states[tap].shape:
            return "Likely cause: the state after the final norm was captured (never tap the last layer)"
        shift = other - tap
        off = " - off by one" if abs(shift) == 1 else ""
        return f"Likely cause: these are outputs of layer {other}{off}; check how tap ids are converted"
    reference = states[tap]
    nearest = torch.cdist(found, reference).argmin(dim=1)
    moved = nearest != torch.arange(len(found))
    matched = _relative(found, reference[nearest])
    if bool(moved.any()) and float(matched.median()) <= tolerance:
        row = int(moved.nonzero()[0])
        return f"Likely cause: wrong cache slots - row {row} is the reference's row {int(nearest[row])}"
    return (
        "Likely cause: another computation (weights, dtype or quantization of the target, rope settings); "
        "compare with --backend hf"
    )


def _relative(found: Tensor, reference: Tensor) -> Tensor:
    return (found - reference).norm(dim=1) / reference.norm(dim=1).clamp_min(1e-12)


class RowCheck:
    """What no captured sample may be, checked while its rows pass: all-zero rows, taps that never change.

    Args:
        target_layer_ids: taps in the order of the row.
        hidden: width of a tap.
    """

    def __init__(self, target_layer_ids: Sequence[int], hidden: int) -> None:
        self._taps = list(target_layer_ids)
        self._hidden = hidden
        self._first: Tensor | None = None
        self._constant = torch.ones(len(self._taps), dtype=torch.bool)
        self._rows = 0

    def add(self, rows_TW: Tensor) -> None:
        """Look at the next rows.

        Raises:
            ParityError: a row of a tap is all zeros.
        """
        rows_THD = rows_TW.view(len(rows_TW), len(self._taps), self._hidden)
        zero = (rows_THD == 0).all(dim=-1)
        if bool(zero.any()):
            row, tap = zero.nonzero()[0].tolist()
            raise ParityError(
                f"row {self._rows + row} of tap {self._taps[tap]} is all zeros: its cache slot was "
                "never written"
            )
        if self._first is None and len(rows_THD):
            self._first = rows_THD[0].clone()
        if self._first is not None:
            self._constant &= (rows_THD == self._first).all(dim=-1).all(dim=0)
        self._rows += len(rows_TW)

    def finish(self, distinct_tokens: int) -> None:
        """The sample is complete.

        Raises:
            ParityError: a tap has the same row for every token although the tokens differ.
        """
        if self._rows >= _CONSTANT_ROWS and distinct_tokens > 1 and bool(self._constant.any()):
            tap = self._taps[int(self._constant.nonzero()[0])]
            raise ParityError(f"tap {tap} has the same row for all {self._rows} tokens (zero variance)")
