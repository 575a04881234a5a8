"""The sums of every prompt in a report: what two reports are compared by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.breakdowns import per_prompt
from eval.metrics import Ratio
from eval.responses import PLAIN, Response, steps_of

Row = dict[str, Any]


def prompt_rows(responses: Sequence[Response], methods: Sequence[str]) -> list[Row]:
    """One row a prompt.

    Keys: prompt, key, data_set, category; `tokens` and `hashes` of each turn's rendered ids; `hash` of all of
    them; `methods`, plain decoding first, each with tokens (emitted by steps, in the first run), steps,
    drafted, accepted, and decode and prefill seconds (median over repeats).
    """
    seconds = {
        name: (
            per_prompt(responses, name, lambda d: d.decode_seconds),
            per_prompt(responses, name, lambda d: d.prefill_seconds),
        )
        for name in methods
    }
    rows = []
    for place, response in enumerate(responses):
        hashes = [turn.prompt_hash for turn in response.turns]
        figures = {}
        for name in methods:
            steps = steps_of(response, name, 0)
            figures[name] = {
                "tokens": sum(s.emitted for s in steps),
                "steps": len(steps),
                "drafted": sum(s.drafted for s in steps),
                "accepted": sum(s.accepted for s in steps),
                "decode_seconds": round(float(seconds[name][0][place]), 6),
                "prefill_seconds": round(float(seconds[name][1][place]), 6),
            }
        rows.append(
            {
                "prompt": response.prompt,
                "key": response.key,
                "data_set": response.dataset,
                "category": response.category,
                "tokens": [turn.prompt_tokens for turn in response.turns],
                "hashes": hashes,
                "hash": hashlib.sha256("".join(hashes).encode()).hexdigest()[:16],
                "methods": figures,
            }
        )
    return rows


def acceptance_length_of(rows: Sequence[Row], method: str) -> Ratio:
    """τ of a method, from the rows of its report."""
    return _ratio(rows, method, lambda m, _: (m["tokens"], m["steps"]), "emitted tokens / verify steps")


def speed_up_of(rows: Sequence[Row], method: str) -> Ratio:
    """Decode seconds of plain decoding, scaled to the same number of tokens / those of a method."""
    return _ratio(
        rows,
        method,
        lambda m, plain: (
            plain["decode_seconds"] * m["tokens"] / max(1, plain["tokens"]),
            m["decode_seconds"],
        ),
        "plain decode seconds, scaled to the same number of tokens / decode seconds",
    )


def seconds_per_plain_token_of(rows: Sequence[Row]) -> Ratio:
    """Decode seconds of plain decoding / its tokens."""
    return _ratio(
        rows, PLAIN, lambda m, _: (m["decode_seconds"], m["tokens"]), "plain decode seconds / plain tokens"
    )


def _ratio(rows: Sequence[Row], method: str, sums: Any, formula: str) -> Ratio:
    def pair(methods: Mapping[str, Any]) -> tuple[float, float]:
        return sums(methods[method], methods[PLAIN])

    table = np.array([pair(row["methods"]) for row in rows], dtype=np.float64).reshape(-1, 2)
    return Ratio(table[:, 0], table[:, 1], formula)
