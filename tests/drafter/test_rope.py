"""Rotary positions: both schemas, all kinds, and angles at a million tokens."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from drafter.config import ConfigError, DrafterConfig
from drafter.dense import DenseAttention
from drafter.frozen import embed_blocks
from drafter.rope import Rotary, normalise_rope, position_limit, rotate
from tests.drafter.tiny import TARGET, tiny_config, tiny_drafter, tiny_head

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e7},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_cosines_equal_those_of_transformers(kind):
    """Positions below 2048, where float32 angles are themselves right to 1e-4."""
    rope = ROPES[kind]
    config = Qwen3Config(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(rope))
    positions = torch.arange(0, 2048, 7)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = Rotary(rope, 64, 131072)(positions, torch.float32)
    torch.testing.assert_close(ours[0][:, 0], cos[0, :, :32], rtol=0, atol=2e-4)
    torch.testing.assert_close(ours[1][:, 0], sin[0, :, :32], rtol=0, atol=2e-4)
    assert Rotary(rope, 64, 131072).scaling == pytest.approx(1.1386294 if kind == "yarn" else 1.0)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("start", [0, 100_000, 1_048_000, 10_000_000])
def test_angles_inside_a_block_are_relative_to_1e_5(kind, start):
    """G2, D4: the angle between two rows of one block, from cos and sin, against float64."""
    rotary = Rotary(ROPES[kind], 128, 1_048_576)
    cos, sin = (table[:, 0].double() for table in rotary(torch.arange(start, start + 16), torch.float32))
    relative = torch.atan2(sin * cos[0] - cos * sin[0], cos * cos[0] + sin * sin[0])
    exact = torch.arange(16).double()[:, None] * rotary.frequencies
    error = torch.remainder(relative - exact + torch.pi, 2 * torch.pi) - torch.pi
    assert error.abs().max() < 1e-5


@pytest.mark.parametrize("kind", ROPES)
def test_angles_themselves_are_right_to_ten_million(kind):
    """Absolute cosines and sines against integer positions times exact float64 frequencies."""
    rotary = Rotary(ROPES[kind], 64, 1 << 24)
    positions = torch.tensor([0, 1, 2**20 - 1, 2**24 + 1, 10_000_001])  # 2^24 + 1 is no float32 number
    exact = positions.double()[:, None] * rotary.frequencies
    for found, expected in zip(rotary(positions, torch.float32), (exact.cos(), exact.sin()), strict=True):
        assert (found[:, 0].double() - expected * rotary.scaling).abs().max() < 2e-7


TARGET_ROPES = {
    "llama, theta alone": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3": ("llama", {"rope_parameters": ROPES["llama3"]}),
    "linear": ("llama", {"rope_parameters": ROPES["linear"]}),
    "yarn": ("qwen3", {"rope_parameters": ROPES["yarn"]}),
    "yarn without its original length": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    ),
    "yarn with its own attention factor": (
        "qwen3",
        {"rope_parameters": {**ROPES["yarn"], "attention_factor": 0.9, "truncate": False}},
    ),
}


@pytest.mark.parametrize("name", TARGET_ROPES)
@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_new_drafter_turns_as_its_target_does(name, limit):
    """D4: frequencies and the factor on cosines are those of the target's own module.

    Also where the drafter is given another position limit, and after its config went to disk and back.
    """
    kind, rope = TARGET_ROPES[name]
    config = AutoConfig.for_model(
        kind,
        hidden_size=64,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=96,
        num_hidden_layers=8,
        vocab_size=97,
        max_position_embeddings=32768,
        **rope,
    )
    own = AutoModel.from_config(config, dtype=torch.float32).rotary_emb
    overrides = {} if limit is None else {"max_position_embeddings": limit}
    made = DrafterConfig.for_target(config.to_dict(), mask_token_id=3, **overrides)
    again = DrafterConfig.from_dict(made.to_dict())
    for drafter in (made, again):
        rotary = Rotary(drafter.rope, drafter.head_dim, drafter.max_position_embeddings)
        assert torch.equal(rotary.frequencies.float(), own.inv_freq)
        assert rotary.scaling == pytest.approx(own.attention_scaling)


def test_scores_of_a_bfloat16_drafter_do_not_depend_on_where_it_stands():
    """Queries and keys far out, rotated and then rounded to bfloat16: scores move by rounding alone.

    Frequencies of eight bits would put all rows of a block at one angle there; scores would be off by 1.
    """
    drafter = tiny_drafter(tiny_config()).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(16, 1, 32, generator=generator).bfloat16() for _ in range(2))
    scores = []
    for start in (0, 1_048_000, 10_000_000):
        angles = drafter.rotary(torch.arange(start, start + 16), torch.bfloat16)
        turned = [rotate(x, *angles)[:, 0].double() for x in (q, k)]
        scores.append(turned[0] @ turned[1].T / 32**0.5)
    # each of 32 products is off by two roundings of 2^-9: a few times 2^-9 for scores of order 1
    for far in scores[1:]:
        assert (far - scores[0]).abs().max() < 0.06
    assert (scores[0] - scores[0][:1]).abs().max() > 1


def test_bfloat16_drafter_keeps_its_frequencies():
    drafter = tiny_drafter(tiny_config())
    before = copy.deepcopy(drafter.rotary.frequencies)
    positions = torch.tensor([0, 257, 1_048_000])
    expected = drafter.rotary(positions, torch.float32)
    drafter.to(torch.bfloat16)
    assert torch.equal(drafter.rotary.frequencies, before)
    assert before.dtype == torch.float64
    cos, sin = drafter.rotary(positions, torch.bfloat16)
    assert cos.dtype == torch.float32
    assert torch.equal(cos, expected[0])
    assert torch.equal(sin, expected[1])
    assert not any("inv_freq" in name or "rotary" in name for name in drafter.state_dict())


@pytest.mark.parametrize("kind", ROPES)
def test_old_and_new_schema_are_one(kind):
    """D5: `rope_theta` + `rope_scaling` and nested `rope_parameters` give the same angles at 100K."""
    rope = ROPES[kind]
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    old = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": kind, **scaling} if kind != "default" else None,
        "max_position_embeddings": 131072,
    }
    new = {"rope_parameters": rope, "max_position_embeddings": 131072}
    tables = []
    for schema in (old, new):
        config = DrafterConfig.for_target({**TARGET, "rope_parameters": None, **schema}, mask_token_id=3)
        again = DrafterConfig.from_dict(config.to_dict())
        assert again == config
        tables.append(Rotary(again.rope, 64, 131072)(torch.arange(100_000, 100_008), torch.float64))
    assert torch.equal(tables[0][0], tables[1][0])
    assert torch.equal(tables[0][1], tables[1][1])


def test_rope_that_cannot_be_a_drafters_has_to_be_replaced():
    for rope in ({"rope_type": "longrope"}, {"rope_type": "dynamic"}, {"partial_rotary_factor": 0.25}):
        target = {**TARGET, "rope_parameters": {"rope_theta": 1e4, **rope}}
        with pytest.raises(ConfigError, match="explicit rope"):
            DrafterConfig.for_target(target, mask_token_id=3)
        config = DrafterConfig.for_target(target, mask_token_id=3, rope=ROPES["default"])
        assert config.rope == ROPES["default"]


def test_limits_are_those_an_engine_serves():
    assert position_limit(normalise_rope({"rope_parameters": ROPES["yarn"]}), 4096) == 131072
    assert position_limit(ROPES["linear"], 4096) == 32768
    assert position_limit(ROPES["llama3"], 131072) == 131072


def test_positions_are_absolute_only_through_their_differences():
    """Context and block shifted together by a million: attention sees the same differences."""
    drafter, head = tiny_drafter(tiny_config(sliding_window=None)), tiny_head()
    config = drafter.config
    anchors = torch.tensor([12])
    attention = DenseAttention(anchors, torch.zeros(1, dtype=torch.int64), 12, 4, config.layer_masks)
    context = drafter.fuse(torch.randn(12, config.feature_width))
    blocks = embed_blocks(head, config, torch.tensor([7]))
    outputs = [
        drafter(context, shift + torch.arange(12), blocks, shift + torch.arange(12, 16)[None], attention)
        for shift in (0, 1_048_000)
    ]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=2e-5)
