"""What is made again in the backward pass: the same results, in less memory."""

import pytest
import torch

from csbp.layout import BlockLayout
from csbp.memory import PeakTracker
from csbp.plan import plan_step
from csbp.topology import Grid
from drafter.context import Features
from drafter.frozen import embed_blocks
from tests.drafter.tiny import MIXED, VOCABULARY, tiny_config, tiny_drafter, tiny_head

LENGTH = 60


def layout(block_size, anchors=(3, 20, 22, 41)):
    at = torch.tensor(anchors)
    return BlockLayout(at, torch.zeros_like(at), LENGTH, block_size)


def hidden_and_gradients(drafter, plan, features, wrap, autocast=False):
    config = drafter.config
    rows = torch.cat([features[:0], *(features[start:stop] for start, stop in plan.rows)])
    own = plan.layout.anchors[plan.own]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = drafter(
            wrap(drafter, rows),
            plan.row_positions,
            embed_blocks(tiny_head(dtype=drafter.norm.weight.dtype), config, own % VOCABULARY),
            own[:, None] + torch.arange(config.block_size),
            plan.attention(),
        )
    hidden.double().square().sum().backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    return hidden.detach(), gradients


def at_once(drafter, rows):
    return drafter.fuse(rows)


def in_chunks(size):
    return lambda drafter, rows: Features(rows, size)


@pytest.mark.parametrize("layer_types", [MIXED, ("sliding_attention",) * 2, ("full_attention",) * 2])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_give_the_results_of_one_pass(layer_types, chunk):
    """Float64; chunk borders inside windows, layers that project a part of the rows, a chunk of all rows."""
    config = tiny_config(layer_types=layer_types, feature_scaling=True)
    drafter = tiny_drafter(config, dtype=torch.float64)
    drafter.feature_scale.uniform_(0.5, 2.0)
    plan = plan_step(layout(config.block_size), config.layer_masks, Grid.single())
    features = torch.randn(LENGTH, config.feature_width, dtype=torch.float64)
    hidden, gradients = hidden_and_gradients(drafter, plan, features, at_once)
    found, chunked = hidden_and_gradients(drafter, plan, features, in_chunks(chunk))
    assert torch.allclose(found, hidden, rtol=1e-12, atol=1e-12)
    assert chunked.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # sums over rows in another order; the largest entries are about 1e5
        assert torch.allclose(chunked[name], gradient, rtol=1e-10, atol=1e-8), name


def test_chunks_keep_the_precision_of_autocast():
    """The second pass has to round as the first did, or the gradient belongs to another function."""
    config = tiny_config(layer_types=MIXED)
    drafter = tiny_drafter(config)
    plan = plan_step(layout(config.block_size), config.layer_masks, Grid.single())
    features = torch.randn(LENGTH, config.feature_width).bfloat16()
    hidden, gradients = hidden_and_gradients(drafter, plan, features, at_once, autocast=True)
    found, chunked = hidden_and_gradients(drafter, plan, features, in_chunks(16), autocast=True)
    assert torch.equal(found, hidden)
    for name in ("fc.weight", "layers.1.self_attn.k_proj.weight", "layers.0.self_attn.k_norm.weight"):
        # products of chunks are rounded to bfloat16 before they are added
        assert torch.allclose(
            chunked[name], gradients[name], rtol=0.05, atol=0.02 * gradients[name].abs().max()
        )


def test_a_rank_without_rows_gives_gradients_of_zero():
    config = tiny_config(layer_types=MIXED)
    drafter = tiny_drafter(config)
    plan = plan_step(
        BlockLayout(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), LENGTH, 4),
        config.layer_masks,
        Grid.single(),
    )
    _, gradients = hidden_and_gradients(
        drafter, plan, torch.randn(LENGTH, config.feature_width), in_chunks(8)
    )
    assert gradients["fc.weight"].abs().max() == 0
    assert gradients["layers.1.self_attn.v_proj.weight"].abs().max() == 0


def test_chunks_keep_only_features_keys_and_values_of_a_row():
    """A row may cost its keys and values with their gradients, not its fused state or a wide copy."""
    config = tiny_config(1, layer_types=("full_attention",) * 2)
    drafter = tiny_drafter(config)
    rows = 20_000
    blocks = BlockLayout(torch.tensor([rows - 10]), torch.tensor([0]), rows, 4)
    plan = plan_step(blocks, config.layer_masks, Grid.single())
    features = torch.randn(rows, config.feature_width).bfloat16()
    peaks = {}
    for name, wrap in {"at once": at_once, "chunks": in_chunks(500)}.items():
        with PeakTracker() as tracker:
            hidden_and_gradients(drafter, plan, features, wrap)
        peaks[name] = tracker.peak_bytes / rows
    key_value = 2 * config.num_key_value_heads * config.head_dim * 4
    # two layers' keys and values, the gradients of two, one of which may exist in two types on its way
    assert peaks["chunks"] < 5.2 * key_value
    assert peaks["at once"] > peaks["chunks"] + 2 * config.hidden_size * 4


def test_narrow_features_are_never_widened_as_a_whole():
    config = tiny_config(1)
    drafter = tiny_drafter(config)
    rows = 50_000
    features = torch.randn(rows, config.feature_width).bfloat16()
    with PeakTracker() as tracker:
        drafter.fuse(features).sum().backward()
    # fused rows, their norm, its gradient and that of the product; a wide copy alone would be 3 more
    assert tracker.peak_bytes < (4.5 * config.hidden_size + 0.5 * config.feature_width) * 4 * rows
    wide = tiny_drafter(config)
    wide.fuse(features.float()).sum().backward()
    assert torch.allclose(drafter.fc.weight.grad, wide.fc.weight.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_blocks_made_again_give_the_same_gradients(version, autocast):
    """Bit for bit: the second pass repeats the first on the same numbers."""
    config = tiny_config(version, layer_types=MIXED)
    drafter = tiny_drafter(config)
    plan = plan_step(layout(config.block_size), config.layer_masks, Grid.single())
    features = torch.randn(LENGTH, config.feature_width)
    hidden, gradients = hidden_and_gradients(drafter, plan, features, at_once, autocast)
    drafter.recompute = True
    found, again = hidden_and_gradients(drafter, plan, features, at_once, autocast)
    assert torch.equal(found, hidden)
    assert again.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(again[name], gradient), name


def test_blocks_made_again_are_not_kept():
    config = tiny_config(2, num_layers=6)
    drafter = tiny_drafter(config)
    anchors = torch.arange(1, 2001)
    plan = plan_step(
        BlockLayout(anchors, torch.zeros_like(anchors), 2010, config.block_size),
        config.layer_masks,
        Grid.single(),
    )
    features = torch.randn(2010, config.feature_width)
    peaks = []
    for recompute in (False, True):
        drafter.recompute = recompute
        with PeakTracker() as tracker:
            hidden_and_gradients(drafter, plan, features, at_once)
        peaks.append(tracker.peak_bytes)
    assert peaks[1] < 0.65 * peaks[0]
