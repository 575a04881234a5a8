"""Every fast path against its plain twin: packed weights, folded attention, the growing cache."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

from eval.block_drafter import BlockDrafter
from eval.decode import Limits, decode_plain, decode_speculative
from eval.folded_attention import folded_attention
from eval.kv_cache import RoomyLayer, open_cache
from eval.lookup import LookupDrafter
from eval.prepack import PackedLinear, can_prepack, prepack_linears
from eval.sampling import Sampling, best_tokens
from eval.target import Target, choose_attention
from tests.eval.conftest import tiny_drafter, tiny_model

needs_packing = pytest.mark.skipif(
    not can_prepack(torch.device("cpu"), torch.float32), reason="this torch has no oneDNN kernels"
)


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [640, 1100])
def test_packed_linear_equals_linear(rows, bias, width):
    torch.manual_seed(0)
    linear = nn.Linear(512, width, bias=bias)  # 640: transposed, 1100: in oneDNN's layout
    x = torch.randn(2, rows, 512)[:1]
    with torch.inference_mode():
        # float32 sums of 512 products in another order
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=2e-5, rtol=2e-5)


@needs_packing
def test_only_large_layers_are_packed_and_parameters_stay(monkeypatch):
    monkeypatch.setattr("eval.prepack._MIN_WEIGHTS", 64 * 96)
    monkeypatch.setattr("eval.prepack._MIN_PACKED", 97 * 64)
    model = tiny_model("llama")
    names = set(model.state_dict())
    # per layer gate, up and down (64 x 96); and the head (97 x 64)
    assert prepack_linears(model) == 4 * 3 + 1
    assert set(model.state_dict()) == names
    assert model.lm_head.weight is model.get_input_embeddings().weight


@needs_packing
def test_speculative_tokens_equal_plain_tokens_with_packed_weights(monkeypatch):
    monkeypatch.setattr("eval.prepack._MIN_WEIGHTS", 1)
    model = tiny_model("qwen3")
    prepack_linears(model)
    target, prompt = Target(model), [5, 17, 3, 60, 5, 17, 3]
    settings = {"limits": Limits(40), "sampling": Sampling(), "generator": None}
    drafter = LookupDrafter(8, shortest=1)
    assert (
        decode_speculative(target, drafter, prompt, **settings).ids
        == decode_plain(target, prompt, **settings).ids
    )


@needs_packing
@pytest.mark.parametrize("version", [1, 2])
def test_drafts_with_packed_weights_equal_those_without(monkeypatch, version):
    plain = Target(tiny_model("qwen3"))
    assert plain.frozen_head.product is None
    monkeypatch.setattr("eval.prepack._MIN_WEIGHTS", 1)
    monkeypatch.setattr("eval.prepack._MIN_PACKED", 64 * 96)
    packed = Target(tiny_model("qwen3"))
    prepack_linears(packed.model)
    calls = []
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: calls.append(self) or forward(self, x))
    runs = []
    for target in (plain, packed):
        model = tiny_drafter(target, version=version, dtype="float32")
        if target is packed:
            prepack_linears(model)
        drafter = BlockDrafter(model, target.frozen_head, name="tiny")
        drafts = []
        for anchor in range(20):
            drafter.start([], Sampling(), None)
            drafter.prefill(
                torch.randn(9, model.config.feature_width, generator=torch.Generator().manual_seed(anchor))
            )
            calls.clear()
            drafts.append(drafter.draft(torch.tensor([anchor]), 7).ids.tolist())
        runs.append(drafts)
    assert runs[0] == runs[1]
    assert model.fc in calls
    assert packed.model.lm_head in calls


def test_packing_is_for_cpus_and_known_dtypes():
    assert not can_prepack(torch.device("cuda"), torch.float32)
    assert not can_prepack(torch.device("cpu"), torch.float16)


@pytest.mark.parametrize(("rows", "keys"), [(1, 9), (5, 9), (64, 70), (65, 70)])
def test_folded_attention_equals_attention_over_repeated_heads(rows, keys):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, rows, 8), torch.randn(1, 2, keys, 8), torch.randn(1, 2, keys, 8)
    mask = None if rows == 1 else torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)[None, None]
    module = nn.Module()
    module.num_key_value_groups = 3
    mixed, _ = folded_attention(module, q, k, v, mask)
    repeated = (x.repeat_interleave(3, dim=1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=1e-5)


def test_additive_mask_is_made_once_a_forward_and_gives_the_same_sums(monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    masks = [torch.ones(5, 9, dtype=torch.bool).tril(shift)[None, None] for shift in (4, 2)]
    given = []

    def spy(*args, attn_mask, **kwargs):
        given.append(attn_mask)
        return F.softmax(args[0] @ args[1].mT * kwargs["scale"] + attn_mask, -1) @ args[2]

    expected = [folded_attention(nn.Module(), q, k, v, mask.clone(), scaling=0.3)[0] for mask in masks]
    monkeypatch.setattr("eval.folded_attention.F.scaled_dot_product_attention", spy)
    mixed = [folded_attention(nn.Module(), q, k, v, mask, scaling=0.3)[0] for mask in masks * 2]
    assert given[0] is given[2]
    assert given[1] is given[3]
    assert given[0] is not given[1]
    for ours, reference in zip(mixed, expected * 2, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 96, 97, 128, 4096, 49152])
@pytest.mark.parametrize("ties", [False, True])
def test_best_tokens_equal_argmax(width, ties):
    logits = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    if ties:
        logits = logits.clamp(max=1.0).round()
    assert torch.equal(best_tokens(logits), logits.argmax(-1))
    assert torch.equal(best_tokens(logits[0]), logits[0].argmax(-1))


def test_prefill_without_a_mask_stays_causal():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 7, 8) for heads in (4, 2, 2))
    module = nn.Module()
    module.num_key_value_groups = 2
    module.is_causal = True
    mixed, _ = folded_attention(module, q, k, v, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=1e-5)


def test_growing_layer_equals_concatenation_through_crops():
    torch.manual_seed(0)
    roomy, plain = RoomyLayer(), DynamicCache().layer_class_to_replicate()
    for rows, drop in ((500, 0), (8, 5), (8, 0), (600, 599), (3, 3), (1, 0)):
        keys, values = torch.randn(1, 2, rows, 4), torch.randn(1, 2, rows, 4)
        for ours, theirs in zip(roomy.update(keys, values), plain.update(keys, values), strict=True):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
        roomy.crop(-drop)
        plain.crop(-drop)
        assert roomy.get_seq_length() == plain.get_seq_length()


def test_window_layers_keep_transformers_own_cache():
    cache = open_cache(tiny_model("sliding").config)
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicSlidingWindowLayer"}


def test_flash_attention_is_chosen_where_it_runs(monkeypatch):
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr("eval.target.find_spec", lambda name: name == "flash_attn")
    assert choose_attention(gpu, torch.bfloat16, batched=False) == "flash_attention_2"
    assert choose_attention(gpu, torch.bfloat16, batched=True) == "folded"  # needs a mask
    assert choose_attention(gpu, torch.float32, batched=False) == "folded"
    assert choose_attention(cpu, torch.bfloat16, batched=False) == "folded"
    monkeypatch.setattr("eval.target.find_spec", lambda name: None)
    assert choose_attention(gpu, torch.bfloat16, batched=False) == "folded"
