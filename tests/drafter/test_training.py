"""The pieces together: a drafter learns a sequence, and its labels are the right ones."""

import pytest
import torch

from drafter.checkpoint import initialise_from_target
from drafter.errors import CheckpointError
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.proposal import walk_metrics
from tests.drafter.successor import COUNT, FIRST, successor_target, train_on_successor
from tests.drafter.targets import llama_target, qwen3_target
from tests.drafter.tiny import dense_hidden, tiny_config


@pytest.mark.parametrize("version", [1, 2])
def test_drafter_learns_to_count_and_stays_finite(version):
    """A2, C3, C5, C13: 300 steps at ten times the usual rate; slot j is right only if its label is a + j."""
    config = tiny_config(version, vocab_size=128, block_size=6, num_layers=1)
    target = successor_target()
    drafter, losses = train_on_successor(config, target, steps=300, learning_rate=6e-3)
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())
    assert losses[-1] < 0.05 < 2.0 < losses[0]
    head = FrozenHead(target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    ids = FIRST + (7 + torch.arange(60)) % COUNT
    anchors = torch.tensor([3, 20, 41])
    labels = ids[anchors[:, None] + torch.arange(1, 6)]
    with torch.no_grad():
        hidden = dense_hidden(drafter, head, head.embedding[ids].repeat(1, config.num_taps), anchors, ids)
    sums = walk_metrics(
        drafter, hidden, ids[anchors], labels, torch.ones_like(labels, dtype=torch.bool), head
    )
    assert sums["walk_run"] == 15
    assert sums["walk_blocks"] == 3


def test_blocks_are_the_anchor_and_masks():
    config = tiny_config(input_embedding_scale=2.0)
    table = torch.arange(97.0)[:, None].expand(97, 64)
    blocks = embed_blocks(FrozenHead(table, table), config, torch.tensor([40, 50]))
    assert blocks[:, :, 0].tolist() == [[80.0, 6.0, 6.0, 6.0], [100.0, 6.0, 6.0, 6.0]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", ["5GB", "100KB"])
def test_frozen_tables_are_read_from_a_checkpoint(tmp_path, tied, shards):
    target = qwen3_target(tie_word_embeddings=tied)
    target.save_pretrained(tmp_path, max_shard_size=shards)
    head = FrozenHead.from_checkpoint(tmp_path)
    assert torch.equal(head.embedding, target.model.embed_tokens.weight)
    assert torch.equal(head.head, target.lm_head.weight)
    assert (head.head is head.embedding) == tied
    moved = head.to(dtype=torch.bfloat16)
    assert (moved.head is moved.embedding) == tied
    assert head.embedding_rms == pytest.approx(float(head.embedding.square().mean().sqrt()), rel=1e-5)


def test_missing_target_is_an_error_that_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        FrozenHead.from_checkpoint(tmp_path)


def test_warm_start_copies_the_last_layers(tmp_path):
    target = qwen3_target()
    torch.nn.init.uniform_(target.model.norm.weight)
    target.save_pretrained(tmp_path)
    drafter = Drafter(tiny_config(num_layers=2))
    fc = drafter.fc.weight.clone()
    initialise_from_target(drafter, tmp_path, "random")
    assert torch.equal(drafter.norm.weight, torch.ones(64))
    assert torch.equal(drafter.fc.weight, fc)
    initialise_from_target(drafter, tmp_path, "layers")
    for mine, theirs in zip(drafter.layers, target.model.layers[6:], strict=True):
        assert torch.equal(mine.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        assert torch.equal(mine.self_attn.q_norm.weight, theirs.self_attn.q_norm.weight)
        assert torch.equal(mine.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    assert torch.equal(drafter.fc.weight, fc)


@pytest.mark.parametrize("scaled", [True, False])
def test_aligned_start_reads_the_last_tap_as_the_next_layer_does(tmp_path, scaled):
    target = llama_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.input_layernorm.weight.uniform_(0.5, 2.0)
    target.save_pretrained(tmp_path)
    drafter = Drafter(tiny_config(num_layers=2, feature_scaling=scaled))
    if scaled:
        drafter.feature_scale.uniform_(0.5, 2.0)
    with torch.no_grad():
        output = target(torch.randint(97, (1, 40)), output_hidden_states=True)
    taps = [output.hidden_states[layer + 1][0] for layer in drafter.config.target_layer_ids]
    features = torch.cat(taps, -1)
    initialise_from_target(drafter, tmp_path, "aligned", features)
    following = target.model.layers[drafter.config.target_layer_ids[-1] + 1]
    with torch.no_grad():
        expected = following.input_layernorm(taps[-1])
        torch.testing.assert_close(drafter.fuse(features), expected, rtol=1e-4, atol=1e-5)
        layer = drafter.layers[0].self_attn
        queries = target.model.layers[6].self_attn.q_proj(target.model.layers[6].input_layernorm(taps[-1]))
    assert layer.q_norm.weight[0].item() == pytest.approx(queries.square().mean().sqrt().item(), rel=1e-4)


def test_warm_start_of_other_sizes_is_refused(tmp_path):
    qwen3_target().save_pretrained(tmp_path)
    drafter = Drafter(tiny_config(intermediate_size=128))
    with pytest.raises(
        CheckpointError, match=r"gate_proj\.weight is \[96, 64\], the drafter's is \[128, 64\]"
    ):
        initialise_from_target(drafter, tmp_path, "layers")
