"""The errors of this package, one per boundary."""

from __future__ import annotations


class ConfigError(ValueError):
    """A drafter's config cannot be read, or contradicts itself."""


class CheckpointError(ValueError):
    """Weights on disk do not belong to the config beside them, or a target's tensors cannot be found."""


class ExportError(ValueError):
    """An export would load in an engine and serve wrongly."""
