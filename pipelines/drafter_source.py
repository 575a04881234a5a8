"""Where a run's drafter comes from: a new one shaped for the target, or one that exists."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from torch import Tensor

from drafter.checkpoint import initialise_from_target, load_drafter
from drafter.config import DrafterConfig
from drafter.frozen import FrozenHead, TargetOutput
from drafter.model import Drafter
from drafter.warm_start import WarmStart
from pipelines.corpus import Corpus, DataError
from pipelines.target import choose_mask_id, config_fingerprint, resolve_target, target_config

_SHAPE = (
    "version", "layers", "block_size", "layer_types", "sliding_window", "is_causal", "mask_token_id",
    "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "selector_parametrisation",
    "feature_scaling", "warm_start",
)  # fmt: skip


class DrafterSource(BaseModel):
    """The drafter to train. `init_from` excludes every key that would shape a new one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str | None = Field(
        default=None,
        description="Folder or hub id of the target, whose embedding and head the drafter shares. Default: "
        "the one that the stores name. Its configuration must have the fingerprint that the stores hold.",
    )
    init_from: Path | None = Field(
        default=None, description="Folder of a released or exported drafter to go on from."
    )
    warm_start: WarmStart = Field(
        default="random",
        description="First weights of a new drafter: `random`; `layers`, the target's last layers and final "
        "norm; `aligned`, also with every layer reading the last tap as the target's next layer would.",
    )
    version: Literal[1, 2] = Field(default=2, description="1 is DFlash, 2 adds convolutions and a selector.")
    layers: int = Field(default=5, ge=1, description="Draft layers (5: fastest in arXiv 2602.06036).")
    block_size: int = Field(default=8, ge=2, description="The anchor and the drafts of a block.")
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(
        default=None,
        description="One per layer. Default: all slide, or all are full if sliding_window is null.",
    )
    sliding_window: int | None = Field(
        default=2048, ge=1, description="Window of sliding layers; it counts the query itself."
    )
    is_causal: bool = Field(
        default=False, description="Whether a row sees only rows before it in its own block."
    )
    mask_token_id: int | None = Field(
        default=None, ge=0, description="Id of the mask token; default: chosen from the target's unused ids."
    )
    conv_kernel_size: int = Field(default=2, ge=1, description="Rows that a convolution mixes (released: 2).")
    conv_group_size: int = Field(
        default=16, ge=1, description="Channels that share a dynamic coefficient (released: 16)."
    )
    selector_rank: int = Field(default=256, ge=1, description="Width of the codebooks (released: 256).")
    selector_top_k: int = Field(default=16, ge=1, description="Candidates of a slot (released: 16).")
    selector_parametrisation: Literal["free", "low_rank"] = Field(
        default="low_rank",
        description="low_rank trains two projections of the target's embedding, free two tables of a row per "
        "token; both export as tables.",
    )
    feature_scaling: bool = Field(
        default=True, description="Scale every feature to unit size while training; folded into fc at export."
    )
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="Weights of an export.")

    @model_validator(mode="after")
    def _one_origin(self) -> DrafterSource:
        shaped = sorted(set(_SHAPE) & self.model_fields_set)
        if self.init_from is not None and shaped:
            raise ValueError(f"init_from takes the drafter as it is, so {', '.join(shaped)} cannot be given")
        return self

    @model_serializer(mode="wrap")
    def _without_shape(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a saved run file holds: with `init_from` no key that it excludes."""
        content: dict[str, Any] = handler(self)
        return {k: v for k, v in content.items() if self.init_from is None or k not in _SHAPE}

    def with_absolute_paths(self) -> DrafterSource:
        """The same with absolute paths; keeps which keys were given."""
        update: dict[str, Any] = {}
        if self.init_from is not None:
            update["init_from"] = self.init_from.absolute()
        if self.target is not None and Path(self.target).is_dir():
            update["target"] = str(Path(self.target).absolute())
        return self.model_copy(update=update)


def find_target(source: DrafterSource, corpus: Corpus) -> Path:
    """Folder of the target.

    Raises:
        DataError: its configuration is not the one that the stores were captured from.
        TargetError: it is neither a folder nor a hub id.
    """
    manifest = corpus.manifest
    folder = resolve_target(source.target or manifest.target)
    found = config_fingerprint(folder)
    if found != manifest.target_fingerprint:
        raise DataError(
            f"drafter.target {folder} has configuration fingerprint {found[:12]}, the stores were captured "
            f"from {manifest.target} with {manifest.target_fingerprint[:12]}; name the target of the stores"
        )
    return folder


def make_drafter(source: DrafterSource, corpus: Corpus, target: Path, seed: int) -> Drafter:
    """The drafter of a fresh run, in float32 on the CPU, the same on every rank.

    Raises:
        DataError: an existing drafter reads other taps than the stores hold.
        ConfigError: the shape cannot be built for the target.
    """
    if source.init_from is not None:
        drafter = load_drafter(source.init_from, torch.float32)
        if "dtype" in source.model_fields_set:
            drafter.config = dataclasses.replace(drafter.config, dtype=source.dtype)
    else:
        torch.manual_seed(seed)
        drafter = Drafter(new_config(source, corpus, target))
        rows_TF = corpus.example_rows()
        if drafter.feature_scale is not None:
            drafter.feature_scale.copy_(_unit_scale(rows_TF))
        initialise_from_target(drafter, target, source.warm_start, rows_TF)
    taps = list(drafter.config.target_layer_ids)
    if taps != list(corpus.manifest.target_layer_ids):
        raise DataError(
            f"the drafter reads target layers {taps}, the stores hold {corpus.manifest.target_layer_ids}; "
            "capture with the drafter's taps or start from another drafter"
        )
    return drafter


def new_config(source: DrafterSource, corpus: Corpus, target: Path) -> DrafterConfig:
    """Configuration of a new drafter: sizes of the target, taps of the stores, the rest as asked."""
    mask = choose_mask_id(target) if source.mask_token_id is None else source.mask_token_id
    version_2: dict[str, Any] = {
        "conv_kernel_size": source.conv_kernel_size,
        "conv_group_size": source.conv_group_size,
        "selector_rank": source.selector_rank,
        "selector_top_k": source.selector_top_k,
        "selector_parametrisation": source.selector_parametrisation,
    }
    return DrafterConfig.for_target(
        target_config(target),
        mask_token_id=mask,
        version=source.version,
        num_layers=source.layers,
        block_size=source.block_size,
        target_layer_ids=corpus.manifest.target_layer_ids,
        layer_types=source.layer_types,
        sliding_window=source.sliding_window,
        is_causal=source.is_causal,
        dtype=source.dtype,
        feature_scaling=source.feature_scaling,
        **(version_2 if source.version == 2 else {}),
    )


def make_head(
    corpus: Corpus, target: Path, device: torch.device, dtype: torch.dtype, *, output: bool = False
) -> FrozenHead:
    """The target's tables on `device`, with the training data's tokens by frequency.

    Args:
        corpus: the training data.
        target: folder of the target.
        device: where a step is computed.
        dtype: of the tables.
        output: also what it does before and after its head, for losses on its own distribution.

    Raises:
        CheckpointError: the checkpoint lacks a table, or its own distribution cannot be made from states.
    """
    head = FrozenHead.from_checkpoint(target, dtype=dtype)
    if output:
        head.output = TargetOutput.from_checkpoint(target)
    head.frequent_ids = corpus.frequent_ids
    return head.to(device=device)


def _unit_scale(rows_TF: Tensor) -> Tensor:
    """One over the root mean square of each feature; one that is always zero gets the median's."""
    rms_F = rows_TF.square().mean(0).sqrt()
    return 1.0 / rms_F.where(rms_F > 0, rms_F[rms_F > 0].median())
