"""A target, a store and a run small enough to train in seconds.

The text is a cycle: token t is followed by (5 t + 3) mod 16. Feature rows carry the token of their own
position and noise. A drafter whose labels are aligned with its slots can learn every slot.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipelines.keep import WindowRule, choose_rows, keep_dict
from pipelines.runfile import RunConfig
from pipelines.store import Manifest, StoreWriter, TokenSample
from pipelines.store_schema import FEATURES, LAST
from pipelines.target import config_fingerprint

HIDDEN, VOCABULARY, TAPS, CYCLE = 32, 48, [1, 3], 16


def make_target(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": embedding_table(), "model.norm.weight": torch.ones(HIDDEN)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def embedding_table() -> torch.Tensor:
    """The target's tied embedding and head."""
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))


def cycle_tokens(length: int, start: int) -> torch.Tensor:
    tokens = [start % CYCLE]
    for _ in range(length - 1):
        tokens.append((5 * tokens[-1] + 3) % CYCLE)
    return torch.tensor(tokens)


def make_store(
    folder: Path,
    target: Path,
    samples: int = 24,
    *,
    length: int = 40,
    prompt: int = 8,
    documents: int = 1,
    rule: WindowRule | None = None,
    last_hidden: bool = False,
    **manifest: Any,
) -> Path:
    """`samples` samples of packed documents; each document of sample i has `length` + i % 3 tokens.

    With `rule` only the rows of windows are stored (of one document). The last hidden state at a token is the
    head's row of the token that follows: the target is nearly certain of it.
    """
    generator = torch.Generator().manual_seed(2)
    tap_table = torch.randn(CYCLE, len(TAPS) * HIDDEN, generator=generator)
    facts = Manifest(
        **{
            "target": str(target),
            "target_fingerprint": config_fingerprint(target),
            "tokenizer_fingerprint": "none",
            "target_layer_ids": TAPS,
            "hidden_size": HIDDEN,
            "dtype": "float32",
            "keep": keep_dict(rule),
            "last_hidden": last_hidden,
            **manifest,
        }
    )
    with StoreWriter(folder, facts) as writer:
        for i in range(samples):
            parts = [cycle_tokens(length + i % 3, 7 * i + d) for d in range(documents)]
            ids = torch.cat(parts)
            mask = torch.cat([torch.arange(len(part)) >= prompt for part in parts])
            starts = torch.tensor([0] + [len(part) for part in parts[:-1]]).cumsum(0)
            rows = tap_table[ids] + 0.1 * torch.randn(len(ids), tap_table.shape[1], generator=generator)
            name, talk = f"sample-{i:03d}", f"talk-{i // 2}"
            if rule is None and not last_hidden:
                writer.add(TokenSample(name, ids, mask, starts, talk), rows)
                continue
            kept = choose_rows(name, mask, len(ids), rule, last_hidden=last_hidden)
            sample = TokenSample(name, ids, mask, starts, talk, **kept.fields(len(ids), rule))
            last = (
                embedding_table()[(5 * ids + 3) % CYCLE][kept.rows[LAST].indices()] if last_hidden else None
            )
            writer.add(sample, rows[kept.rows[FEATURES].indices()], last)
    return folder


def make_run(folder: Path, **sections: Any) -> RunConfig:
    """A run over a fresh tiny store in `folder`; `sections` go over the defaults, key by key."""
    target, store = folder / "target", folder / "store"
    if not store.exists():
        make_store(store, make_target(target))
    content: dict[str, Any] = {
        "out": folder / "run",
        "data": {"stores": [store], "validation_fraction": 0.1},
        "drafter": {
            "target": str(target),
            "layers": 1,
            "block_size": 4,
            "sliding_window": 16,
            "mask_token_id": VOCABULARY - 1,
            "conv_group_size": 8,
            "selector_rank": 8,
            "selector_top_k": 4,
            "dtype": "float32",
        },
        "anchors": {"per_document": 6},
        "optimizer": {"lr": 3e-3},
        "schedule": {"steps": 8},
        "batch": {"samples": 4, "micro": 2},
        "checkpoint": {"every": 4},
        "validation": {"every": 100},
        "logging": {"every": 2, "tensorboard": False},
    }
    if "init_from" in sections.get("drafter", {}):
        content["drafter"] = {"target": str(target)}
    for name, value in sections.items():
        content[name] = {**content[name], **value} if isinstance(content.get(name), dict) else value
    return RunConfig.model_validate(content)
