"""A real but tiny target, for transformers and vLLM: random weights, byte-level tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LAYERS, HIDDEN, TAPS = 6, 64, [0, 2, 3]
SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|unused|>", "<think>", "</think>"]

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + (m['content'] or '') + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# As Qwen3's: an empty think block before an answer without reasoning, and reasoning only in the last answer.
THINKING = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def make_tokenizer(template: str | None = CHATML, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """Bytes, `merges` of them, then the special tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: at for at, symbol in enumerate([*symbols, *("".join(pair) for pair in merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


def make_target(folder: Path, kind: str = "llama", template: str | None = CHATML, **changes: Any) -> Path:
    """Random weights, scaled so that layers differ clearly."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(template)
    shape = {
        "vocab_size": 320,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "initializer_range": 0.15,
        **changes,
    }
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    model_class(config_class(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
