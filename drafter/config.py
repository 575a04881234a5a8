"""What a drafter is made of: sizes, taps, masks, block, and the released config.json that carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafter.attention import LayerMask
from drafter.errors import ConfigError
from drafter.rope import normalise_rope
from drafter.speculators import from_speculators
from drafter.taps import default_layer_ids, tap_problem

__all__ = ["ConfigError", "DrafterConfig"]

FULL = "full_attention"
SLIDING = "sliding_attention"
ARCHITECTURES = {1: "DFlashDraftModel", 2: "DFlash2DraftModel"}
DEFAULT_BLOCK_SIZE = 16

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "num_target_layers",
    "max_position_embeddings",
    "mask_token_id",
)
_REFUSED = {
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled values",
    "sample_from_anchor": "drafting from slot 0",
}


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter. Field names are those of config.json where it has them.

    Attributes:
        version: 1 for DFlash, 2 for DFlash2 (convolutions and candidate selector).
        rope: flat rope dict with `rope_type` and `rope_theta` (see `drafter.rope.normalise_rope`).
        layer_types: "full_attention" or "sliding_attention" per layer.
        sliding_window: W of the sliding layers; it counts the query itself.
        is_causal: causality of every layer, or None: causal iff the layer slides.
        target_layer_ids: taps, 0-based decoder layers of the target whose outputs are read.
        block_size: B, the anchor and B - 1 drafts.
        output_multiplier: factor on the head's logits, before the soft cap.
        final_logit_softcapping: s of s * tanh(z / s), or None.
        selector_parametrisation: "free" trains two [V, r] codebooks, "low_rank" two [r, d] projections of the
            target's embedding rows that export as such codebooks. Training only, never in config.json.
        feature_scaling: keep a factor per feature that is folded into `fc` at export. Training only.
        dtype: name of the torch dtype that an export stores.
    """

    version: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    mask_token_id: int
    block_size: int
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    rope: dict[str, Any] = field(hash=False)
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    sliding_window: int | None = None
    is_causal: bool | None = None
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    selector_parametrisation: str = "free"
    feature_scaling: bool = False
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        if self.version not in ARCHITECTURES:
            raise ConfigError(f"version {self.version}: expected 1 (DFlash) or 2 (DFlash2)")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            raise ConfigError(f"layer_types holds {unknown}: expected {FULL!r} or {SLIDING!r}")
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ConfigError(
                f"a layer slides but sliding_window is {self.sliding_window}; give a window >= 1"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd, rotary halves need an even size")
        if self.target_hidden_size != self.hidden_size:
            raise ConfigError(
                f"target_hidden_size {self.target_hidden_size} differs from hidden_size {self.hidden_size}: "
                "the drafter shares the target's embedding and head, so both are the target's"
            )
        if self.block_size < 2:
            raise ConfigError(f"block_size {self.block_size}: a block is the anchor and at least one draft")
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty: the drafter reads nothing of the target")
        if self.selector_parametrisation not in ("free", "low_rank"):
            raise ConfigError(
                f"selector_parametrisation {self.selector_parametrisation!r}: expected 'free' or 'low_rank'"
            )
        if self.version == 2 and self.hidden_size % self.conv_group_size:
            raise ConfigError(
                f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}"
            )
        if self.version == 2 and not 0 < self.selector_top_k <= self.vocab_size:
            raise ConfigError(f"selector_top_k {self.selector_top_k} is not in 1..{self.vocab_size}")

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def feature_width(self) -> int:
        """F, the width of one context feature: the taps side by side."""
        return self.num_taps * self.target_hidden_size

    @property
    def num_drafts(self) -> int:
        """K = B - 1, the slots that predict."""
        return self.block_size - 1

    @property
    def layer_masks(self) -> tuple[LayerMask, ...]:
        """Window and causality of every layer; without `is_causal` exactly the sliding layers are causal."""
        return tuple(
            LayerMask(
                window=self.sliding_window if kind == SLIDING else None,
                causal=kind == SLIDING if self.is_causal is None else self.is_causal,
            )
            for kind in self.layer_types
        )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Read a config.json in the released or the speculators layout.

        Every draft key is looked up in `dflash_config` first, then at top level.

        Raises:
            ConfigError: a required key is missing, block sizes disagree, or the drafter needs something that
                this implementation does not do.
        """
        if "speculators_model_type" in config:
            config = from_speculators(config)
        nested = dict(config.get("dflash_config") or {})
        merged = {key: value for key, value in {**config, **nested}.items() if value is not None}
        missing = [key for key in _REQUIRED if key not in merged]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)} (at top level or in dflash_config)")
        for key, what in _REFUSED.items():
            if merged.get(key):
                raise ConfigError(f"config.json sets {key}: {what} are not supported")
        if "draft_vocab_size" in merged and merged["draft_vocab_size"] != merged["vocab_size"]:
            raise ConfigError(
                f"draft_vocab_size {merged['draft_vocab_size']} differs from vocab_size "
                f"{merged['vocab_size']}: drafters with a pruned vocabulary are not supported"
            )
        outer, inner = config.get("block_size"), nested.get("block_size")
        if outer is not None and inner is not None and outer != inner:
            raise ConfigError(
                f"block_size is {outer} at top level and {inner} in dflash_config; engines read either, so "
                "both must be the size that the drafter was trained with"
            )
        architectures = config.get("architectures") or []
        version = 2 if ARCHITECTURES[2] in architectures or "selector_rank" in merged else 1
        layers, heads = int(merged["num_hidden_layers"]), int(merged["num_attention_heads"])
        layer_types, window = _layer_types(merged, layers)
        causal = config.get("is_causal")
        if causal is None:
            causal = nested.get("causal")
        optional = {
            key: merged[key]
            for key in (
                "rms_norm_eps",
                "attention_bias",
                "conv_kernel_size",
                "conv_group_size",
                "selector_rank",
                "selector_top_k",
                "output_multiplier",
                "input_embedding_scale",
            )
            if key in merged
        }
        return cls(
            version=version,
            hidden_size=merged["hidden_size"],
            intermediate_size=merged["intermediate_size"],
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=merged.get("num_key_value_heads", heads),
            head_dim=merged.get("head_dim", merged["hidden_size"] // heads),
            vocab_size=merged["vocab_size"],
            num_target_layers=merged["num_target_layers"],
            target_layer_ids=tuple(
                merged.get("target_layer_ids") or default_layer_ids(merged["num_target_layers"], layers)
            ),
            target_hidden_size=merged.get("target_hidden_size", merged["hidden_size"]),
            mask_token_id=merged["mask_token_id"],
            block_size=merged.get("block_size", DEFAULT_BLOCK_SIZE),
            max_position_embeddings=merged["max_position_embeddings"],
            layer_types=layer_types,
            sliding_window=window,
            is_causal=None if causal is None else bool(causal),
            rope=normalise_rope(config),
            final_logit_softcapping=merged.get("final_logit_softcapping") or None,
            dtype=str(merged.get("dtype", merged.get("torch_dtype", "bfloat16"))).removeprefix("torch."),
            **optional,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return config.json in the released layout; block size and rope wherever engines look for them."""
        draft: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "block_size": self.block_size,
        }
        if self.version == 2:
            draft |= {
                "conv_kernel_size": self.conv_kernel_size,
                "conv_group_size": self.conv_group_size,
                "selector_rank": self.selector_rank,
                "selector_top_k": self.selector_top_k,
            }
        if self.output_multiplier != 1.0:
            draft["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            draft["final_logit_softcapping"] = self.final_logit_softcapping
        if self.input_embedding_scale != 1.0:
            draft["input_embedding_scale"] = self.input_embedding_scale
        scaling = {key: value for key, value in self.rope.items() if key != "rope_theta"}
        released = {
            "architectures": [ARCHITECTURES[self.version]],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "num_target_layers": self.num_target_layers,
            "target_hidden_size": self.target_hidden_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "rope_parameters": dict(self.rope),
            "rope_theta": self.rope["rope_theta"],
            "rope_scaling": None if self.rope["rope_type"] == "default" else scaling,
            "layer_types": list(self.layer_types),
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "dtype": self.dtype,
            "dflash_config": draft,
        }
        if self.is_causal is not None:
            released["is_causal"] = self.is_causal
        return released

    @classmethod
    def for_target(
        cls,
        target_config: Mapping[str, Any],
        *,
        mask_token_id: int,
        version: int = 2,
        num_layers: int = 5,
        block_size: int = DEFAULT_BLOCK_SIZE,
        num_taps: int = 5,
        target_layer_ids: Sequence[int] | None = None,
        layer_types: Sequence[str] | None = None,
        sliding_window: int | None = 2048,
        is_causal: bool | None = False,
        rope: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> DrafterConfig:
        """Make the config of a new drafter for any HF target config.

        Sizes, norm epsilon, rope and position limit are the target's. Without `layer_types` every layer
        slides over `sliding_window` rows, or is full when that is None. `overrides` are further fields of
        this class.

        Raises:
            ConfigError: the target lacks a size, its rope cannot be a drafter's, or the taps do not fit.
        """
        target = dict(target_config.get("text_config") or target_config)
        missing = [
            key
            for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            if target.get(key) is None
        ]
        if missing:
            raise ConfigError(f"the target's config.json lacks {', '.join(missing)}")
        depth, hidden = target["num_hidden_layers"], target["hidden_size"]
        heads = target["num_attention_heads"]
        taps = tuple(
            default_layer_ids(depth, max(1, min(num_taps, depth - 3)))
            if target_layer_ids is None
            else target_layer_ids
        )
        problem = tap_problem(taps, depth)
        if problem:
            raise ConfigError(problem)
        if layer_types is None:
            layer_types = [FULL if sliding_window is None else SLIDING] * num_layers
        fields: dict[str, Any] = {
            "version": version,
            "hidden_size": hidden,
            "intermediate_size": target.get("intermediate_size") or 4 * hidden,
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": target.get("num_key_value_heads") or heads,
            "head_dim": target.get("head_dim") or hidden // heads,
            "vocab_size": target["vocab_size"],
            "num_target_layers": depth,
            "target_layer_ids": taps,
            "target_hidden_size": hidden,
            "mask_token_id": mask_token_id,
            "block_size": block_size,
            "max_position_embeddings": target.get("max_position_embeddings") or 2048,
            "layer_types": tuple(layer_types),
            "sliding_window": sliding_window if SLIDING in layer_types else None,
            "is_causal": is_causal,
            "rope": normalise_rope(target if rope is None else {**target, "rope_parameters": dict(rope)}),
            "rms_norm_eps": target.get("rms_norm_eps") or 1e-6,
            "final_logit_softcapping": target.get("final_logit_softcapping"),
            "input_embedding_scale": _embedding_scale(target),
        }
        return cls(**{**fields, **overrides})


def _embedding_scale(target: Mapping[str, Any]) -> float:
    """What the target multiplies its embedding rows by (transformers 5.19: the Gemma and Granite models)."""
    if str(target.get("model_type", "")).startswith("gemma"):
        return float(target["hidden_size"]) ** 0.5
    return float(target.get("embedding_multiplier") or 1.0)


def _layer_types(merged: Mapping[str, Any], num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Resolve layer types and window, `use_swa` included (as vLLM 0.32 `_resolve_layer_attention`)."""
    types = tuple(merged.get("layer_types") or ())
    if merged.get("use_swa") and SLIDING not in types:
        types = (SLIDING,) * num_layers
    types = types or (FULL,) * num_layers
    if SLIDING not in types:
        return types, None
    if merged.get("use_sliding_window") is False:
        raise ConfigError(
            "layer_types names sliding layers but use_sliding_window is false, which makes engines serve "
            "them without a window; set it to true"
        )
    return types, merged.get("swa_window_size", merged.get("sliding_window"))
