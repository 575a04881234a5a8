"""Tiny targets and drafters whose behaviour is known."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from drafter.config import DrafterConfig
from drafter.model import Drafter
from eval.block_drafter import BlockDrafter
from eval.folded_attention import register
from eval.sampling import Draft
from eval.target import Target

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny_model(kind="llama"):
    torch.manual_seed(7)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    elif kind == "sliding":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    # Initial weights of 0.02 give nearly constant logits; larger ones make a model with opinions.
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    model.config._attn_implementation = register()
    return model.eval()


@pytest.fixture(params=["llama", "qwen3", "sliding"])
def target(request):
    return Target(tiny_model(request.param))


@pytest.fixture
def llama():
    return Target(tiny_model("llama"))


class ScriptedDrafter:
    """Proposes from a known continuation of the prompt, or always wrongly."""

    taps = ()

    def __init__(self, script, block, name="scripted", wrong=False):
        self.script, self.block, self.name, self.wrong = script, block, name, wrong
        self.asked = []

    def start(self, prompt, sampling, generator):
        self.emitted = 0

    def prefill(self, features):
        raise AssertionError("no taps, no features")

    def observe(self, emitted, features):
        assert features is None
        self.emitted += len(emitted)

    def draft(self, anchor, count):
        self.asked.append(count)
        ids = self.script[self.emitted : self.emitted + count]
        if self.wrong:
            ids = [(i + 1) % VOCAB for i in ids]
        return Draft(torch.tensor(ids, dtype=torch.int64))


@pytest.fixture
def scripted():
    return ScriptedDrafter


def tiny_drafter(target, version=2, block=8, **overrides):
    """A random drafter of the target; its selector and convolutions are not the identity."""
    config = DrafterConfig.for_target(
        target.config.to_dict(),
        mask_token_id=VOCAB - 1,
        version=version,
        num_layers=2,
        block_size=block,
        target_layer_ids=(0, 2),
        selector_rank=8,
        selector_top_k=4,
        **{"sliding_window": None, **overrides},
    )
    torch.manual_seed(11)
    model = Drafter(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def head_of(target):
    return target.frozen_head


@pytest.fixture
def make_drafter():
    def make(target, name="tiny", decode_block=None, **options):
        return BlockDrafter(tiny_drafter(target, **options), head_of(target), name=name, block=decode_block)

    return make
