"""Context lengths: how they are written, and the buckets that steps are sorted into.

K is 1,024 tokens and M is 1,024 K.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.errors import EvalError

#: Edges of the buckets where none are given: a bucket starts at its lower edge and ends before its upper one.
EDGES: tuple[int, ...] = (2_048, 8_192, 32_768, 131_072, 524_288, 1_048_576)

_UNITS = {"": 1, "k": 1_024, "m": 1_048_576}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([km]?)")


def parse_contexts(text: str) -> tuple[int, ...]:
    """`2k,8k,32k` as token counts, shortest first.

    Raises:
        EvalError: an item is no length, or not one is there.
    """
    lengths = set()
    for item in text.replace(" ", "").lower().split(","):
        match = _LENGTH.fullmatch(item)
        length = int(float(match[1]) * _UNITS[match[2]]) if match else 0
        if length < 1:
            raise EvalError(f"context lengths {text!r}: expected items such as 512, 2k or 1m, found {item!r}")
        lengths.add(length)
    return tuple(sorted(lengths))


def length_name(length: int) -> str:
    """`2K` for 2,048; lengths that are no tenth of a K stay numbers."""
    for unit, size in (("M", 1_048_576), ("K", 1_024)):
        if length >= size and (length * 10) % size == 0:
            return f"{length / size:g}{unit}"
    return str(length)


def bucket_of(context: int, edges: Sequence[int] = EDGES) -> str:
    """The name of the bucket that holds a context length."""
    low = 0
    for high in edges:
        if context < high:
            return _span(low, high)
        low = high
    return f"over {length_name(low)}"


def bucket_names(edges: Sequence[int] = EDGES) -> list[str]:
    """All buckets, shortest context first."""
    return [bucket_of(start, edges) for start in (0, *edges)]


def _span(low: int, high: int) -> str:
    first, last = length_name(low), length_name(high)
    if first[-1] == last[-1] and first[-1] in "KM":
        first = first[:-1]
    return f"{first}-{last}"
