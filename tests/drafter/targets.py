"""Tiny random HF targets written as ordinary checkpoints."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.drafter.tiny import TARGET


def qwen3_target(seed=0, **changes):
    """A random Qwen3 whose weights are large enough that its greedy tokens vary."""
    torch.manual_seed(seed)
    settings = {key: value for key, value in TARGET.items() if key != "model_type"}
    model = Qwen3ForCausalLM(Qwen3Config(**{**settings, "initializer_range": 0.2, **changes})).eval()
    model.generation_config.eos_token_id = None
    return model


def llama_target(seed=0, **changes):
    torch.manual_seed(seed)
    settings = {key: value for key, value in TARGET.items() if key != "model_type"}
    return LlamaForCausalLM(LlamaConfig(**{**settings, "initializer_range": 0.2, **changes})).eval()
