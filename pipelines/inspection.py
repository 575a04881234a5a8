"""`inspect`: what a feature store, a drafter or a training run holds, whichever it is given."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from safetensors import safe_open

from drafter.checkpoint import load_drafter
from drafter.config import DrafterConfig
from pipelines.inspect_store import inspect_store, render_store
from pipelines.train_result import RESULT, TrainResult, render_train
from pipelines.training_state import list_checkpoints

STORE, DRAFTER, RUN = "manifest.json", "config.json", "run.yaml"


class InspectError(ValueError):
    """A path is none of the things that can be inspected."""


def inspect_path(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """Figures of what stands at `path`; `kind` says what it is.

    Args:
        path: folder of a store, of a drafter in the released or speculators layout, or of a training run.
        verify: check a store's checksums; load a drafter's weights into its model.

    Raises:
        InspectError: `path` is none of these.
        StoreError, ConfigError, CheckpointError: it is one of these and cannot be read.
    """
    if (path / STORE).is_file():
        return {"kind": "store", **inspect_store(path, verify=verify)}
    if (path / RUN).is_file():
        return {"kind": "run", **_inspect_run(path)}
    if (path / DRAFTER).is_file():
        return {"kind": "drafter", **_inspect_drafter(path, verify=verify)}
    raise InspectError(
        f"expected a feature store ({STORE}), a training run ({RUN}) or a drafter ({DRAFTER}), "
        f"found none of them in {path}"
    )


def render_inspection(report: dict[str, Any]) -> RenderableType:
    """The figures as a table for the terminal."""
    if report["kind"] == "store":
        return render_store(report)
    if report["kind"] == "run" and report["result"]:
        return render_train(TrainResult(**report["result"]))
    table = Table(title=f"{report['kind']} {report['path']}", show_header=False)
    for name, value in report.items():
        if name not in ("kind", "path") and value is not None:
            table.add_row(name.replace("_", " "), _text(value))
    return table


def _inspect_run(path: Path) -> dict[str, Any]:
    result = path / RESULT
    log = path / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    return {
        "path": str(path),
        "checkpoints": list_checkpoints(path),
        "exports": sorted(p.name for p in (path / "export").glob("*")),
        "last_metrics": json.loads(lines[-1]) if lines else None,
        "result": json.loads(result.read_text()) if result.is_file() else None,
    }


def _inspect_drafter(path: Path, *, verify: bool) -> dict[str, Any]:
    config = DrafterConfig.from_dict(json.loads((path / DRAFTER).read_text()))
    tensors: dict[str, tuple[int, ...]] = {}
    size = 0
    for file in sorted(path.glob("*.safetensors")):
        size += file.stat().st_size
        with safe_open(file, framework="pt") as weights:
            tensors |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 - a handle, not a dict
    if verify:
        load_drafter(path)
    window = config.sliding_window
    return {
        "path": str(path),
        "architecture": f"DFlash{config.version if config.version > 1 else ''}",
        "layers": [f"{kind} W={window}" if "sliding" in kind else kind for kind in config.layer_types],
        "hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
        "tensors": len(tensors),
        "parameters": sum(math.prod(shape) for shape in tensors.values()),
        "bytes": size,
        "weights_load": True if verify else None,
    }


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
