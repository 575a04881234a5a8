"""Which attention backend is fastest at a run's own shape, measured on the device at hand."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from csbp.cost import DrafterShape, Workload
from csbp.plan import plan_step
from csbp.share import draw_layout
from csbp.topology import Grid
from drafter.attention import BlockAttention

ROUNDS = 5
Name = TypeVar("Name", bound=str)


def share_of_a_rank(work: Workload, ranks: int) -> Workload:
    """About what one of P context ranks computes of a micro-step: 1/P of the blocks over 1/P of the rows."""
    anchors = max(1, work.anchors // ranks)
    return replace(
        work,
        anchors=anchors,
        context=max(anchors + 1, work.context // ranks),
        neighbourhoods=min(anchors, max(1, work.neighbourhoods // ranks)),
    )


def race(
    names: Sequence[Name], shape: DrafterShape, work: Workload, dtype: torch.dtype, device: torch.device
) -> dict[Name, float]:
    """Seconds of attention of all layers, forward and backward, by backend.

    Backends take turns, so that a change of the machine's pace meets all of them; the first turn compiles and
    is not counted. Held meanwhile: one layer's queries, keys, values and gradients.

    Args:
        names: of `csbp.backends.BACKENDS`.
        shape: heads, block size and masks of the drafter.
        work: what this rank computes in a micro-step.
        dtype: of queries, keys and values.
        device: where they live.

    Returns:
        The median over turns for every layer, summed over layers.
    """
    layout = draw_layout(work, shape.block_size)
    totals = dict.fromkeys(names, 0.0)
    for mask, layers in Counter(shape.masks).items():
        steps = {
            name: plan_step(layout, [mask], Grid.single(), device=device, backend=name) for name in names
        }
        rows = sum(hi - lo for lo, hi in steps[names[0]].rows)
        operands = _operands(shape, layout.anchors.numel(), rows, dtype, device)
        turns: dict[Name, list[float]] = {name: [] for name in names}
        for _ in range(1 + ROUNDS):
            for name in names:
                turns[name].append(_seconds(steps[name].attention(), operands, device))
        for name in names:
            totals[name] += layers * statistics.median(turns[name][1:])
    return totals


def _operands(
    shape: DrafterShape, blocks: int, rows: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Queries, keys and values of the blocks, keys and values of the context."""
    generator = torch.Generator(device).manual_seed(0)
    block = (blocks, shape.block_size)
    keys = (shape.kv_heads, shape.head_size)
    sizes = [(*block, shape.heads, shape.head_size), *[(*block, *keys)] * 2, *[(rows, *keys)] * 2]
    return [
        torch.randn(size, generator=generator, dtype=dtype, device=device, requires_grad=True)
        for size in sizes
    ]


def _seconds(attention: BlockAttention, operands: Sequence[Tensor], device: torch.device) -> float:
    """Of one forward and backward pass."""
    _settle(device)
    began = time.perf_counter()
    output = attention(0, *operands)
    torch.autograd.grad(output, operands, output.detach())
    _settle(device)
    return time.perf_counter() - began


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
