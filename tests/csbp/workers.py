"""What spawned ranks run; spawning needs module-level functions."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from csbp.layout import BlockLayout
from csbp.plan import plan_step
from csbp.topology import Grid
from csbp.transport import Wire
from drafter.attention import LayerMask

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTH, BLOCK, WINDOW = 4_001, 4, 256
FULL, SLIDING = LayerMask(None, causal=False), LayerMask(WINDOW, causal=False)


def neighbourhood(length=LENGTH):
    at = torch.arange(length - 1 - 60 * 16, length - 1, 16)
    return BlockLayout(at, torch.zeros_like(at), length, BLOCK)


def spread(length=LENGTH):
    at = torch.arange(100, length, 13)
    return BlockLayout(at, torch.zeros_like(at), length, BLOCK)


def step(plan, masks, dtype=torch.float32):
    """Attention of every layer, forward and backward, on random rows."""
    blocks = plan.own.numel()
    attention = plan.attention()
    total = torch.zeros((), dtype=dtype)
    for layer in range(len(masks)):
        wanted = attention.context_rows(layer)
        rows = plan.row_positions.numel() if wanted is None else wanted.numel()
        shapes = [
            (blocks, BLOCK, HEADS, SIZE),
            *[(blocks, BLOCK, GROUPS, SIZE)] * 2,
            *[(rows, GROUPS, SIZE)] * 2,
        ]
        leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        total = total + attention(layer, *leaves).float().sum()
    total.backward()


def sent_bytes(layout, masks, options, dtype=torch.float32):
    """Bytes by kind that this rank sent in one step, and what its plan was."""
    grid = Grid.from_environment(dist.get_world_size())
    wire = Wire(grid)
    plan = plan_step(layout, masks, grid, wire=wire, **options)
    step(plan, masks, dtype)
    return {"sent": dict(wire.sent), "blocks": plan.own.numel(), "transports": plan.transports}


def all_sent_bytes(cases):
    return {name: sent_bytes(*case) for name, case in cases.items()}


def lose_a_peer():
    """Rank 1 dies in the middle of a step; what the others see."""
    grid = Grid.from_environment(dist.get_world_size(), timeout=timedelta(seconds=20))
    plan = plan_step(spread(), [FULL], grid, transport="ring")
    if grid.rank == 1:
        os._exit(3)
    step(plan, [FULL])


def wait_for_a_sleeper():
    """Rank 1 takes part too late."""
    grid = Grid.from_environment(dist.get_world_size(), timeout=timedelta(seconds=1))
    if grid.rank == 1:
        time.sleep(8)
        return
    step(plan_step(spread(), [FULL], grid, transport="ring"), [FULL])
