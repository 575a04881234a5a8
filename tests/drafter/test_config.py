"""Configs: defaults for any target, the released layout as it is found, and what is refused."""

import dataclasses

import pytest

from drafter.config import ConfigError, DrafterConfig
from drafter.taps import default_layer_ids
from tests.drafter.tiny import MIXED, TARGET, tiny_config

RELEASED_DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 202048,
    "num_target_layers": 52,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "layer_types": ["sliding_attention"] * 5,
    "use_sliding_window": True,
    "sliding_window": 2048,
    "is_causal": False,
    "dtype": "bfloat16",
    "dflash_config": {
        "mask_token_id": 201818,
        "target_layer_ids": [1, 13, 25, 37, 49],
        "block_size": 16,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
    },
}


def test_a_released_config_is_read():
    config = DrafterConfig.from_dict(RELEASED_DFLASH2)
    assert config.version == 2
    assert config.block_size == 16
    assert config.num_drafts == 15
    assert config.feature_width == 5 * 6656
    assert config.output_multiplier == 0.19611613513818404
    assert config.rope == {"rope_type": "default", "rope_theta": 500000.0}
    assert {(mask.window, mask.causal) for mask in config.layer_masks} == {(2048, False)}
    assert DrafterConfig.from_dict(config.to_dict()) == config


def test_released_dflash_without_optional_keys_gets_the_published_defaults():
    config = DrafterConfig.from_dict(
        {
            "architectures": ["DFlashDraftModel"],
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_target_layers": 36,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000,
            "dflash_config": {"mask_token_id": 151669},
        }
    )
    assert config.version == 1
    assert config.block_size == 16
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert {(mask.window, mask.causal) for mask in config.layer_masks} == {(None, False)}


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (52, 5, [1, 13, 25, 37, 49]), (36, 1, [18]), (24, 3, [1, 11, 21])],
)
def test_default_taps(layers, taps, expected):
    assert default_layer_ids(layers, taps) == expected


def test_draft_keys_are_looked_up_nested_first():
    outside = {**RELEASED_DFLASH2, "mask_token_id": 7, "selector_rank": 32}
    config = DrafterConfig.from_dict(outside)
    assert config.mask_token_id == 201818
    assert config.selector_rank == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"draft_vocab_size": 32000}, "pruned vocabulary"),
        ({"use_sliding_window": False}, "use_sliding_window is false"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"layer_types": ["full_attention"]}, "1 entries for 5 layers"),
        ({"layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
        ({"attention_sink_bias": True}, "attention sinks"),
        ({"num_key_value_heads": 5}, "no multiple"),
        ({"target_hidden_size": 4096}, "shares the target's embedding"),
    ],
)
def test_configs_that_cannot_be_built_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_dict({**RELEASED_DFLASH2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 3}, "version 3"),
        ({"block_size": 1}, "at least one draft"),
        ({"conv_group_size": 7}, "does not divide"),
        ({"selector_top_k": 98}, "selector_top_k 98"),
        ({"selector_parametrisation": "tied"}, "expected 'free' or 'low_rank'"),
        ({"target_layer_ids": ()}, "reads nothing"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(tiny_config(), **changes)


def test_new_drafter_takes_everything_from_the_target():
    config = DrafterConfig.for_target({**TARGET, "final_logit_softcapping": 30.0}, mask_token_id=3)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (64, 96, 32)
    assert config.target_layer_ids == (1, 2, 3, 4, 5)
    assert config.final_logit_softcapping == 30.0
    assert config.layer_types == ("sliding_attention",) * 5
    assert config.sliding_window == 2048
    assert config.is_causal is False


def test_targets_with_other_spellings_are_read():
    """A multimodal wrapper, rope per layer type, no head_dim, no key/value heads, few layers."""
    target = {
        "text_config": {
            "hidden_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "vocab_size": 50,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    }
    config = DrafterConfig.for_target(target, mask_token_id=3, num_layers=2, layer_types=MIXED)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (32, 3, 384)
    assert config.target_layer_ids == (2,)
    assert config.rope["rope_theta"] == 1e6
    assert config.sliding_window == 2048


@pytest.mark.parametrize("taps", [(2, 1), (1, 1), (1, 7), (-1, 3)])
def test_taps_that_cannot_be_served_are_refused_for_a_new_drafter(taps):
    with pytest.raises(ConfigError, match="target_layer_ids"):
        tiny_config(target_layer_ids=taps)


@pytest.mark.parametrize(
    ("extra", "scale"),
    [
        ({}, 1.0),
        ({"model_type": "gemma3_text"}, TARGET["hidden_size"] ** 0.5),
        ({"model_type": "granite", "embedding_multiplier": 12.0}, 12.0),
    ],
)
def test_embedding_scale_is_the_targets(extra: dict[str, object], scale: float) -> None:
    config = DrafterConfig.for_target({**TARGET, **extra}, mask_token_id=3)
    assert config.input_embedding_scale == scale
    assert DrafterConfig.from_dict(config.to_dict()).input_embedding_scale == scale
