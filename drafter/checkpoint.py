"""Drafters on disk, in the released (z-lab) and the speculators layout: config.json + model.safetensors.

Tensor names carry no prefix; embedding and head stay with the target. What only training needs (a low-rank
selector, a scale of features) is folded away, so an export is what every engine reads.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.errors import CheckpointError, ExportError
from drafter.export_checks import check_export, used_special_tokens
from drafter.frozen import FrozenHead, read_tensor, tensor_files
from drafter.model import Drafter
from drafter.speculators import to_speculators
from drafter.warm_start import initialise_from_target

__all__ = [
    "CheckpointError",
    "ExportError",
    "check_export",
    "initialise_from_target",
    "load_drafter",
    "materialise",
    "released_state",
    "save_drafter",
    "used_special_tokens",
]

_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")


def released_state(drafter: Drafter, head: FrozenHead | None = None) -> dict[str, Tensor]:
    """Return the tensors of a release: training-only parametrisations folded into the released names.

    Args:
        drafter: any drafter.
        head: the target's tables; needed when the selector is low-rank.

    Raises:
        ExportError: the selector is low-rank and `head` is None.
    """
    state = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    scale = state.pop("feature_scale", None)
    if scale is not None:
        state["fc.weight"] = state["fc.weight"] * scale
    selector = drafter.candidate_selector
    if selector is not None and selector.low_rank:
        if head is None:
            raise ExportError(
                "the selector is low-rank: give the target's tables, its codebooks are made of them"
            )
        for side in ("predecessor", "successor"):
            del state[f"candidate_selector.{side}_projection"]
        with torch.no_grad():
            state |= dict(zip(_CODEBOOKS, selector.codebooks(head), strict=True))
    return state


def materialise(drafter: Drafter, head: FrozenHead) -> Drafter:
    """Return the same drafter as a release would load it, which also decodes faster than a low-rank one."""
    config = dataclasses.replace(drafter.config, selector_parametrisation="free", feature_scaling=False)
    reference = drafter.norm.weight
    with torch.device(reference.device):
        released = Drafter(config)
    released.load_state_dict(released_state(drafter, head))
    return released.to(reference.dtype).train(drafter.training)


def save_drafter(
    drafter: Drafter,
    directory: str | Path,
    *,
    target_name: str,
    layout: Literal["zlab", "speculators"] = "zlab",
    head: FrozenHead | None = None,
    target_architectures: Sequence[str] = (),
) -> None:
    """Write an export in `config.dtype`. The directory appears, or is replaced, when it is complete.

    Args:
        drafter: any drafter.
        directory: where to write.
        target_name: name or path of the target; engines of the speculators layout load it.
        layout: "zlab" is read by every engine, "speculators" also names the target.
        head: the target's tables; needed when the selector is low-rank.
        target_architectures: of the target's config.json, for the speculators layout.

    Raises:
        ExportError: no target named, a weight that is not finite, or a layout that cannot carry this drafter.
    """
    if not target_name.strip():
        raise ExportError("target_name is blank: an engine has to know which target the drafter belongs to")
    config: dict[str, Any] = {**drafter.config.to_dict(), "target_name_or_path": target_name}
    if layout == "speculators":
        config = to_speculators(
            config,
            target_name=target_name,
            target_architectures=target_architectures,
            causal_layers=[mask.causal for mask in drafter.config.layer_masks],
        )
    elif layout != "zlab":
        raise ExportError(f"layout {layout!r}: expected 'zlab' or 'speculators'")
    dtype: torch.dtype = getattr(torch, drafter.config.dtype)
    state = {
        name: tensor.to("cpu", dtype).contiguous() for name, tensor in released_state(drafter, head).items()
    }
    broken = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if broken:
        raise ExportError(f"weights that are not finite in {drafter.config.dtype}: {', '.join(broken)}")
    directory = Path(directory)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    replaced = directory.with_name(directory.name + ".replaced")
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    shutil.rmtree(replaced, ignore_errors=True)


def load_drafter(directory: str | Path, dtype: torch.dtype | None = None) -> Drafter:
    """Read a drafter of either layout, in the dtype on disk unless one is given.

    Raises:
        ConfigError: its config.json cannot be read.
        CheckpointError: tensors are missing, unknown, or of other shapes than the config says.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not path.exists():
        raise CheckpointError(f"{directory}: no config.json; expected a drafter's directory")
    raw = json.loads(path.read_text())
    config = DrafterConfig.from_dict(raw)
    if (directory / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{directory}: mask_embedding.pt replaces the mask's row of the target's embedding, which is not "
            "supported; the drafter would read another mask than it was trained with"
        )
    files = tensor_files(directory)
    state: dict[str, Tensor] = {}
    for name in files:
        if name in _TARGET_COPIES and "speculators_model_type" in raw:
            continue  # older speculators checkpoints repeat the target's frozen tables
        state[_released_name(name)] = read_tensor(files, name, dtype)
    with torch.device("meta"):
        drafter = Drafter(config)
    expected = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in expected]
    problems += [
        f"{name} is {list(state[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in state and state[name].shape != shape
    ]
    if problems:
        raise CheckpointError(f"{directory}: weights do not match config.json: {'; '.join(problems)}")
    drafter.load_state_dict(state, assign=True)
    return drafter.requires_grad_()


def _released_name(name: str) -> str:
    """Drop the `.weight` that some writers give the codebooks."""
    bare = name.removesuffix(".weight")
    return bare if bare in _CODEBOOKS else name
