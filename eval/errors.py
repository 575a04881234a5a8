"""What an evaluation refuses."""

from __future__ import annotations


class EvalError(ValueError):
    """An evaluation cannot be run as asked: what was expected, what was found, what to do."""
