"""The speculators layout of a drafter's config, converted to and from the released (z-lab) one.

Three traps of that layout: layer ids are one higher (the stream *entering* a layer), one flag
(`sliding_window_non_causal`) decides the causality of every layer, and logit scale, soft cap and embedding
scale have no place in it (vLLM 0.32 `transformers_utils/configs/speculators/algos.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafter.errors import ConfigError, ExportError

_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_UNCARRIED = {"output_multiplier": 1.0, "final_logit_softcapping": None, "input_embedding_scale": 1.0}


def from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the released layout of a speculators config.json.

    Raises:
        ConfigError: another kind of speculator, a pruned vocabulary, or a block that samples from its anchor.
    """
    kind = config.get("speculators_model_type")
    if kind not in ("dflash", "dflash2"):
        raise ConfigError(f"speculators_model_type {kind!r}: expected 'dflash' or 'dflash2'")
    if config.get("sample_from_anchor"):
        raise ConfigError("sample_from_anchor is true: slot 0 of this project's blocks is never sampled")
    missing = [
        key
        for key in ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id", "block_size")
        if config.get(key) is None
    ]
    if missing:
        raise ConfigError(f"speculators config.json lacks {', '.join(missing)}")
    layer = dict(config["transformer_layer_config"])
    draft_vocabulary = config.get("draft_vocab_size")
    if draft_vocabulary is not None and draft_vocabulary != layer["vocab_size"]:
        raise ConfigError(
            f"draft_vocab_size {draft_vocabulary} differs from vocab_size {layer['vocab_size']}: drafters "
            "with a pruned vocabulary are not supported"
        )
    layer["architectures"] = ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"]
    if layer.get("is_causal") is None:
        layer["is_causal"] = not config.get("sliding_window_non_causal", True)
    if config.get("target_hidden_size") is not None:
        layer["target_hidden_size"] = config["target_hidden_size"]
    if config.get("dtype") is not None:
        layer["dtype"] = config["dtype"]
    layer["dflash_config"] = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [entering - 1 for entering in config["aux_hidden_state_layer_ids"]],
        "block_size": config["block_size"],
        **{key: config[key] for key in _DFLASH2_KEYS if config.get(key) is not None},
    }
    return layer


def to_speculators(
    released: Mapping[str, Any],
    *,
    target_name: str,
    target_architectures: Sequence[str],
    causal_layers: Sequence[bool],
) -> dict[str, Any]:
    """Return the speculators layout of a released config dict; `causal_layers` holds one flag per layer.

    Raises:
        ExportError: the layout has no place for something that this drafter needs.
    """
    nested = released["dflash_config"]
    lost = [key for key, neutral in _UNCARRIED.items() if nested.get(key, neutral) != neutral]
    if lost:
        raise ExportError(
            f"the speculators layout cannot carry {', '.join(lost)} and engines would serve without; "
            "export with layout 'zlab'"
        )
    if len(set(causal_layers)) > 1:
        raise ExportError(
            f"layers differ in causality {list(causal_layers)}, the speculators layout has one flag for all "
            "of them; export with layout 'zlab'"
        )
    kind = "dflash2" if "selector_rank" in nested else "dflash"
    layer = {
        key: value
        for key, value in released.items()
        if key not in ("architectures", "block_size", "dflash_config", "target_name_or_path")
    }
    layer["is_causal"] = causal_layers[0]
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in nested["target_layer_ids"]],
        "block_size": nested["block_size"],
        "draft_vocab_size": released["vocab_size"],
        "dtype": released["dtype"],
        "mask_token_id": nested["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": not causal_layers[0],
        "target_hidden_size": released["target_hidden_size"],
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        **{key: nested[key] for key in _DFLASH2_KEYS if key in nested},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": nested["block_size"] - 1,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": list(target_architectures)},
        },
    }
