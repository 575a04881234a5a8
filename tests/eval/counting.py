"""A target that counts, and a DFlash drafter that counts from its features alone.

Every layer of the target adds more to the residual than all before it, so features of a wrong layer are
strange to the drafter. In training the anchor's embedding is that of a random token, so the drafter learns to
find the last context row by its position and to ignore the anchor: wrong layers, wrong positions or another
token in place of the mask all spoil its drafts.
"""

import torch

from drafter.dense import DenseAttention
from drafter.frozen import FrozenHead, embed_blocks
from drafter.objective import ObjectiveConfig, block_loss
from tests.drafter.successor import COUNT, FIRST, successor
from tests.drafter.targets import qwen3_target
from tests.drafter.tiny import tiny_config, tiny_drafter

VOCABULARY = 128
LENGTH = 48


@torch.no_grad()
def counting_target():
    """10, 11, ..., 49, 10, ... whatever came before; logits depend on the last token only."""
    target = qwen3_target(vocab_size=VOCABULARY)
    for depth, layer in enumerate(target.model.layers):
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.mul_(3.0**depth)
    states = target.model(torch.arange(VOCABULARY)[:, None]).last_hidden_state[:, 0]
    target.lm_head.weight.zero_()
    for token in range(FIRST, FIRST + COUNT):
        target.lm_head.weight[successor(token)] = states[token]
    return target


@torch.no_grad()
def feature_table(target, taps):
    """[V, F]: the features of every token, which are the same at every place."""
    states = target.model(torch.arange(VOCABULARY)[:, None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][:, 0] for layer in taps], -1)


def counting_drafter(target, *, version=1, steps=400, blocks=24, shift=0, **changes):
    """`shift` moves the positions of blocks away from where an engine puts them."""
    config = tiny_config(version, vocab_size=VOCABULARY, block_size=6, num_layers=2, **changes)
    head = FrozenHead(target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    table = feature_table(target, config.target_layer_ids)
    drafter = tiny_drafter(config, scale=0.02)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps, pct_start=0.1)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = FIRST + (torch.randint(COUNT, (1,), generator=draw) + torch.arange(LENGTH)) % COUNT
        anchors = torch.randint(4, LENGTH - config.block_size, (blocks,), generator=draw).sort().values
        labels = ids[anchors[:, None] + torch.arange(1, config.block_size)]
        strange = torch.randint(FIRST, FIRST + COUNT, (blocks,), generator=draw)
        start = int(torch.randint(400, (1,), generator=draw))
        attention = DenseAttention(
            anchors, torch.zeros_like(anchors), LENGTH, config.block_size, config.layer_masks
        )
        hidden = drafter(
            drafter.fuse(table[ids]),
            start + torch.arange(LENGTH),
            embed_blocks(head, config, strange),
            start + shift + anchors[:, None] + torch.arange(config.block_size),
            attention,
        )
        supervised = torch.ones_like(labels, dtype=torch.bool)
        sums = block_loss(drafter, hidden, labels, supervised, ids[anchors], head, ObjectiveConfig(), 0)
        optimizer.zero_grad()
        (sums.loss / labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return drafter, float(sums.metrics["ce"]) / labels.numel()
