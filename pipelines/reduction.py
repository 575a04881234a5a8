"""Averaging gradients over all ranks while the backward pass goes on.

Gradients travel in buckets, in an order that every rank knows beforehand, so a rank whose blocks reach fewer
parameters, or reach them in another order, still meets its peers. The sums are those of one reduction after
the backward pass, in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from csbp.footprint import BUCKETS_IN_FLIGHT


class OverlappedAverage:
    """Averages the gradients of `parameters` in place, over all ranks.

    Per step: `watch` before the backward pass that completes the gradients, `finish` after it.

    Args:
        parameters: in the same order on every rank; the backward pass is expected to reach the last first.
        bucket: elements of a bucket. A larger parameter is a bucket of its own and is summed where it lies.
        timeout: how long to wait for a peer.

    Attributes:
        sent_bytes: sent by this rank so far, by the count of a ring all-reduce.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket: int, timeout: timedelta) -> None:
        # Context rows cross ranks at the same time; on a group of their own, sums cannot get in their way.
        self._group = dist.new_group(timeout=timeout)
        self._ranks = dist.get_world_size()
        self._buckets = _buckets(parameters, bucket)
        self._missing: list[int] = []  # gradients that each bucket waits for; empty unless watching
        self._started = 0
        self._flights: deque[tuple[list[Tensor], Tensor, dist.Work]] = deque()
        self.sent_bytes = 0
        for index, members in enumerate(self._buckets):
            for parameter in members:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))

    def watch(self) -> None:
        """Send buckets as the next backward pass fills them."""
        self._missing = [len(members) for members in self._buckets]
        self._started = 0

    def finish(self) -> None:
        """Send what is left and wait for all sums; every parameter has a gradient by now."""
        while self._started < len(self._buckets):
            self._start()
        while self._flights:
            self._land()
        self._missing = []

    def _arrived(self, index: int, parameter: Tensor) -> None:
        del parameter
        if self._missing:
            self._missing[index] -= 1
            while self._started < len(self._buckets) and not self._missing[self._started]:
                self._start()

    def _start(self) -> None:
        if len(self._flights) == BUCKETS_IN_FLIGHT:
            self._land()
        gradients = [p.grad for p in self._buckets[self._started] if p.grad is not None]
        self._started += 1
        alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0].view(-1) if alone else torch.cat([g.reshape(-1) for g in gradients])
        self.sent_bytes += 2 * (self._ranks - 1) * flat.numel() * flat.element_size() // self._ranks
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._flights.append(([] if alone else gradients, flat, work))

    def _land(self) -> None:
        gradients, flat, work = self._flights.popleft()
        work.wait()
        flat.div_(self._ranks)
        parts = flat.split([gradient.numel() for gradient in gradients]) if gradients else ()
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def take_averaged(optimizer: Any) -> None:
    """Let DeepSpeed's ZeRO 1 partition gradients that are averaged already, without sending them again.

    Args:
        optimizer: `DeepSpeedZeroOptimizer` (DeepSpeed 0.19), which averages its buckets in `average_tensor`.
    """

    def averaged(tensor: Tensor, communication_data_type: torch.dtype) -> None:
        del tensor, communication_data_type

    optimizer.average_tensor = averaged


def hand_over_in_order(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Bring gradients to DeepSpeed's ZeRO in one order, the last parameter first, whenever they arrive.

    ZeRO fills its buckets as gradients arrive. Where a rank's blocks reach other parameters than its peers'
    do, buckets would hold different parameters at the same place, and sums would be wrong without an error.

    Args:
        optimizer: `DeepSpeedZeroOptimizer` of stage 2 (DeepSpeed 0.19), which gets them in
            `process_gradients`.
        parameters: in the same order on every rank; every backward pass reaches all of them.
    """
    process = optimizer.process_gradients
    place = {id(parameter): index for index, parameter in enumerate(reversed(parameters))}
    arrived: dict[int, tuple[nn.Parameter, int]] = {}
    following = 0

    def hold(parameter: nn.Parameter, group: int) -> None:
        nonlocal following
        arrived[place[id(parameter)]] = (parameter, group)
        while following in arrived:
            process(*arrived.pop(following))
            following = (following + 1) % len(place)

    optimizer.process_gradients = hold


def _buckets(parameters: Sequence[nn.Parameter], bucket: int) -> list[list[nn.Parameter]]:
    """Parameters, the last first, in runs of at most `bucket` elements."""
    runs: list[list[nn.Parameter]] = []
    held = bucket
    for parameter in reversed(parameters):
        if held + parameter.numel() > bucket:
            runs.append([])
            held = 0
        runs[-1].append(parameter)
        held += parameter.numel()
    return runs
