"""The operation count against torch's own counter on whole steps of small drafters."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from csbp.cost import Workload, step_flops
from csbp.device import PRESETS
from csbp.plan import plan_step
from csbp.planner import step_cost
from csbp.share import draw_layout, replica_share
from csbp.topology import Grid
from drafter.config import DrafterConfig
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.objective import ObjectiveConfig, block_loss
from pipelines.plan import drafter_shape

TARGET = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}


class NoAttention:
    """Lets values through, so that the counter sees every product but attention's."""

    def context_rows(self, layer):
        return None

    def __call__(self, layer, q, k_block, v_block, k_context, v_context):
        ratio = q.shape[2] // v_block.shape[2]
        context = (k_context + v_context).sum() * 1e-6
        return q + (k_block + v_block).repeat_interleave(ratio, 2) + context


def addmm_inplace_flop(self_shape, a_shape, b_shape, *args, out_shape=None, **kwargs):
    return mm_flop(a_shape, b_shape)


def counted(config, work, attention, objective):
    torch.manual_seed(0)
    drafter = Drafter(config)
    head = FrozenHead(torch.randn(1000, 128), torch.randn(1000, 128))
    layout = draw_layout(work, config.block_size)
    plan = plan_step(layout, config.layer_masks, Grid.single())
    rows = sum(stop - start for start, stop in plan.rows)
    labels = torch.randint(0, 1000, (work.blocks, config.num_drafts))
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_inplace_flop})
    with counter:
        hidden = drafter(
            drafter.fuse(torch.randn(rows, config.feature_width)),
            plan.row_positions,
            embed_blocks(head, config, labels[:, 0]),
            layout.anchors[:, None] + torch.arange(config.block_size),
            attention or plan.attention(),
        )
        supervised = torch.ones_like(labels, dtype=torch.bool)
        block_loss(drafter, hidden, labels, supervised, labels[:, 0], head, objective, 0).loss.backward()
    return counter.get_total_flops()


def modelled(config, work, fraction=1.0):
    shape = drafter_shape(config)
    cost = step_cost(shape, PRESETS["cpu"], 4)
    share = replica_share(shape, work, 1, cost, wire_bytes=4, retain=None).ranks[0]
    parts = step_flops(
        shape,
        blocks=share.blocks,
        fused_rows=share.feature_rows,
        projected_rows=tuple(layer.own_rows for layer in share.layers),
        pairs=tuple(layer.pairs for layer in share.layers),
        selector_fraction=fraction,
    )
    return {name: part.total for name, part in parts.items()}


def config_of(version, window, **changes):
    return DrafterConfig.for_target(
        TARGET,
        mask_token_id=999,
        version=version,
        num_layers=2,
        block_size=8,
        num_taps=3,
        sliding_window=window,
        selector_rank=32,
        **changes,
    )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_products_without_attention(version, fraction):
    """The counter also sees the norms' weight gradients as thin products; they are left out: 2 %."""
    work = Workload(512, 64)
    config = config_of(version, None)
    objective = ObjectiveConfig.model_validate({"selector_blocks_fraction": fraction})
    model = modelled(config, work, fraction)
    model.pop("attention")
    assert sum(model.values()) == pytest.approx(counted(config, work, NoAttention(), objective), rel=0.02)


def test_low_rank_selector():
    work = Workload(512, 64)
    config = config_of(2, None, selector_parametrisation="low_rank")
    model = modelled(config, work)
    model.pop("attention")
    objective = ObjectiveConfig.model_validate({})
    assert sum(model.values()) == pytest.approx(counted(config, work, NoAttention(), objective), rel=0.02)


@pytest.mark.parametrize("window", [None, 512])
def test_whole_step_with_planned_attention(window):
    """Blocks of one neighbourhood see nearly the same keys, so few masked pairs are multiplied: under 5 %."""
    work = Workload(1024, 16, anchor_rule="locality")
    config = config_of(2, window)
    total = counted(config, work, None, ObjectiveConfig.model_validate({}))
    assert sum(modelled(config, work).values()) == pytest.approx(total, rel=0.05)


def test_candidates_from_the_products_of_the_loss_save_one_product_with_the_head():
    config = config_of(2, None)
    shape = drafter_shape(config)
    sizes = {"blocks": 64.0, "fused_rows": 512.0, "projected_rows": (512.0,) * 2, "pairs": (1e5,) * 2}
    apart, shared = (step_flops(shape, **sizes, shared_search=way) for way in (False, True))
    rows = 64 * shape.supervised_slots
    saved = apart["candidates"].total - shared["candidates"].total
    assert saved == 2 * rows * shape.hidden * shape.vocabulary == apart["vocabulary"].total / 2
    assert {name for name in apart if apart[name] != shared[name]} == {"candidates"}
