"""Small drafters, tables and batches shared by the tests of this package."""

import torch

from drafter.config import DrafterConfig
from drafter.dense import DenseAttention
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter

VOCABULARY = 97
TARGET = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ("sliding_attention", "full_attention")


def tiny_config(version: int = 2, **changes) -> DrafterConfig:
    settings = {
        "mask_token_id": 3,
        "num_layers": 2,
        "block_size": 4,
        "num_taps": 3,
        "sliding_window": 6,
        "dtype": "float32",
        **({"selector_rank": 8, "selector_top_k": 5} if version == 2 else {}),
    }
    return DrafterConfig.for_target(TARGET, version=version, **{**settings, **changes})


def tiny_drafter(config: DrafterConfig, seed: int = 0, dtype=torch.float32, scale: float = 0.2) -> Drafter:
    """A drafter whose every parameter, convolutions and codebooks included, is random and matters."""
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            is_gain = name.endswith(("norm.weight", "layernorm.weight"))
            parameter.copy_(1 + noise if is_gain else noise)
    return drafter.to(dtype)


def tiny_head(seed: int = 1, dtype=torch.float32, tied: bool = False) -> FrozenHead:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCABULARY, 64, generator=generator).to(dtype)
    head = embedding if tied else torch.randn(VOCABULARY, 64, generator=generator).to(dtype)
    return FrozenHead(embedding, head)


def dense_hidden(drafter, head, features, anchors, ids, starts=None):
    """Final hidden states of blocks on one axis, with dense attention; `ids` are the tokens of the axis."""
    config = drafter.config
    anchors = torch.as_tensor(anchors)
    starts = torch.zeros_like(anchors) if starts is None else torch.as_tensor(starts)
    attention = DenseAttention(anchors, starts, len(features), config.block_size, config.layer_masks)
    row_starts = torch.zeros(len(features), dtype=torch.int64)
    for start in starts.unique():
        row_starts[start:] = start
    positions = torch.arange(len(features)) - row_starts
    block_positions = (anchors - starts)[:, None] + torch.arange(config.block_size)
    return drafter(
        drafter.fuse(features),
        positions,
        embed_blocks(head, config, ids[anchors]),
        block_positions,
        attention,
    )
