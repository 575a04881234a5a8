"""Where a drafter's own decoding was rejected: anchors by sample id, one JSON object a line.

`longdraft replay --rejected` writes such a list, and training with the anchor rule `rejected` draws from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pipelines.files import write_text_atomically


class ListError(ValueError):
    """A list of rejected anchors cannot be used."""


def write_rejected(path: Path, rejected: Mapping[str, Sequence[int]]) -> None:
    """Write a list of anchors by sample id, one JSON object a line."""
    lines = (json.dumps({"id": name, "anchors": list(anchors)}) + "\n" for name, anchors in rejected.items())
    write_text_atomically(path, "".join(lines))


def read_rejected(path: Path) -> dict[str, np.ndarray]:
    """Anchors by sample id.

    Raises:
        ListError: no such file, or a line of it is none of a list.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {row["id"]: np.array(row["anchors"], dtype=np.int64) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ListError(
            f"anchors.rejected: {path} is no list of anchors ({error}); make one with `longdraft replay "
            "--store STORE --drafter DRAFTER --rejected FILE`"
        ) from None
