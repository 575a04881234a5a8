"""A target that counts, and a drafter trained to know it: acceptance is then known beforehand."""

import torch

from drafter.frozen import FrozenHead
from drafter.objective import ObjectiveConfig, block_loss
from tests.drafter.targets import qwen3_target
from tests.drafter.tiny import dense_hidden, tiny_drafter

FIRST, COUNT = 10, 40


def successor(token):
    """10, 11, ..., 49, 10, ..."""
    return FIRST + (token - FIRST + 1) % COUNT


def successor_target(vocab_size=128):
    """A Qwen3 whose layers add nothing and whose head reads the embedding of the token before."""
    target = qwen3_target(vocab_size=vocab_size)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.lm_head.weight.normal_(std=0.01, generator=torch.Generator().manual_seed(9))
        for token in range(FIRST, FIRST + COUNT):
            target.lm_head.weight[successor(token)] = target.model.embed_tokens.weight[token]
    return target


def train_on_successor(config, target, steps, learning_rate, blocks=32):
    """Train on counting sequences; return the drafter and the loss per slot of each step."""
    head = FrozenHead(target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    drafter = tiny_drafter(config, scale=0.02)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        start = int(torch.randint(COUNT, (1,), generator=generator))
        ids = FIRST + (start + torch.arange(64)) % COUNT
        features = head.embedding[ids].repeat(1, config.num_taps)
        anchors = torch.randint(1, 64 - config.block_size, (blocks,), generator=generator).sort().values
        labels = ids[anchors[:, None] + torch.arange(1, config.block_size)]
        hidden = dense_hidden(drafter, head, features, anchors, ids)
        sums = block_loss(
            drafter,
            hidden,
            labels,
            torch.ones_like(labels, dtype=torch.bool),
            ids[anchors],
            head,
            ObjectiveConfig(selector_start_step=steps // 3),
            step,
        )
        optimizer.zero_grad()
        (sums.loss / labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(sums.metrics["ce"]) / labels.numel())
    return drafter, losses
