"""The step that `bench long` times: everything that training does, with its parts timed apart.

A step plans, reads feature rows, runs forward and backward over the whole vocabulary, averages gradients and
updates the weights. Features are synthetic: a reader hands out copies of a few random rows instead of reading
a disk, so a sequence of a million rows costs no more memory than its windows.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from csbp.attention import Backend
from csbp.cost import Workload
from csbp.device import PRESETS
from csbp.memory import PeakTracker
from csbp.plan import StepPlan, plan_step
from csbp.planner import step_cost
from csbp.share import draw_layout
from csbp.topology import Grid
from csbp.transport import Wire
from csbp.visibility import seen
from drafter.config import DrafterConfig
from drafter.context import Features
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.objective import ObjectiveConfig, block_loss
from pipelines.plan import drafter_shape
from pipelines.progress import Bar

_BANK_ROWS = 1 << 14
_GEMM_SIZE = 2048


@dataclass
class RunFigures:
    """What one rank measured at one context length; a list has one entry a timed step.

    Attributes:
        step_s: seconds from the common start to this rank's end.
        parts_s: of these, by part.
        peak_bytes: highest live tensor bytes of one further step; weights, moments and features included.
        kv_bytes_sent: keys, values, queries and their gradients that this rank sent in one step.
        feature_bytes_read: by this rank in one step.
        union_bytes: features of all rows that any block of the replica sees.
        blocks: of this rank.
        placement, transports: as planned.
    """

    step_s: list[float] = field(default_factory=list)
    parts_s: list[dict[str, float]] = field(default_factory=list)
    peak_bytes: int = 0
    kv_bytes_sent: int = 0
    feature_bytes_read: int = 0
    union_bytes: int = 0
    blocks: int = 0
    placement: str = ""
    transports: tuple[str, ...] = ()


class PartClock:
    """Seconds by part; a part inside another is taken out of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._inner.append(0.0)
        began = time.perf_counter()
        yield
        whole = time.perf_counter() - began
        self.seconds[name] += whole - self._inner.pop()
        self._inner[-1] += whole

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        return wrapped


class SyntheticRows:
    """Stands for a feature store: row t is row t mod 16,384 of a table of random rows."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._bank = torch.randn(_BANK_ROWS, width).to(dtype)

    def rows(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Rows of ascending axis ranges, copied as a read would."""
        index = torch.cat([torch.arange(start, stop) for start, stop in ranges] or [torch.arange(0)])
        return self._bank.index_select(0, index.remainder_(_BANK_ROWS))


class LongStep:
    """One drafter with its optimizer, and a layout for each context length."""

    def __init__(
        self, config: DrafterConfig, works: Sequence[Workload], grid: Grid, *, recompute: bool, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.config, self.grid, self.recompute = config, grid, recompute
        self.drafter = Drafter(config)
        table = torch.randn(config.vocab_size, config.hidden_size).mul_(0.05)
        self.head = FrozenHead(table, table)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-4, fused=True)
        self.objective = ObjectiveConfig.model_validate({})
        self.layouts = [draw_layout(work, config.block_size) for work in works]
        self.cost = step_cost(drafter_shape(config), PRESETS["cpu"], 4)
        self.store = SyntheticRows(config.feature_width, torch.bfloat16)
        anchors = works[0].anchors
        self.labels = torch.randint(config.vocab_size, (anchors, config.num_drafts))
        self.anchor_ids = torch.randint(config.vocab_size, (anchors,))

    def plan(self, index: int, wire: Wire) -> StepPlan:
        return plan_step(self.layouts[index], self.config.layer_masks, self.grid, cost=self.cost, wire=wire)

    def union_bytes(self, index: int) -> int:
        rows = max(len(seen(self.layouts[index], mask)) for mask in set(self.config.layer_masks))
        return rows * self.config.feature_width * torch.bfloat16.itemsize

    def run(self, index: int, wire: Wire, clock: PartClock) -> None:
        """One step at the context length of layout `index`; weights change."""
        with clock.part("plan"):
            plan = self.plan(index, wire)
            backend = plan.seam.backend
            timed = Backend(
                clock.timed("attention forward", backend.forward),
                clock.timed("attention backward", backend.backward),
                clock.timed("attention forward", backend.begin),
                clock.timed("attention backward", backend.begin_backward),
            )
            attention = dataclasses.replace(plan.seam, backend=timed)
            labels, ids = self.labels[plan.own], self.anchor_ids[plan.own]
            positions = self.layouts[index].positions[plan.own, None] + torch.arange(self.config.block_size)
        with clock.part("read"):
            rows = self.store.rows(plan.rows)
        with clock.part("fuse"):
            context = Features(rows) if self.recompute else self.drafter.fuse(rows)
        del rows
        with clock.part("layers forward"):
            embeddings = embed_blocks(self.head, self.config, ids)
            hidden = self.drafter(context, plan.row_positions, embeddings, positions, attention)
        del context
        with clock.part("vocabulary"):
            supervised = torch.ones_like(labels, dtype=torch.bool)
            loss = block_loss(
                self.drafter, hidden, labels, supervised, ids, self.head, self.objective, 0
            ).loss
        with clock.part("backward"):
            (loss * (plan.loss_scale * self.grid.world / self.labels.numel())).backward()
        with clock.part("gradients"):
            self._average(wire)
        with clock.part("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _average(self, wire: Wire) -> None:
        if self.grid.world == 1:
            return
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        flat = wire.add_up(torch.cat([g.flatten() for g in gradients]), "gradients").div_(self.grid.world)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def measure_long_rank(
    config: DrafterConfig, works: Sequence[Workload], recompute: bool, steps: int, warmup: int
) -> tuple[list[RunFigures], list[float]]:
    """Figures of this rank for every context length, and FLOP/s of a large product, all timed in turns."""
    grid = Grid.from_environment(dist.get_world_size())
    step = LongStep(config, works, grid, recompute=recompute)
    wire = Wire(grid)
    figures = [RunFigures(union_bytes=step.union_bytes(index)) for index in range(len(works))]
    gemm: list[float] = []
    square = torch.randn(_GEMM_SIZE, _GEMM_SIZE)
    with Bar("bench long", (warmup + steps) * len(works)) as bar:
        for turn in range(warmup + steps):
            dist.barrier()
            began = time.perf_counter()
            torch.mm(square, square)
            gemm.append(2 * _GEMM_SIZE**3 / (time.perf_counter() - began))
            for index, mine in enumerate(figures):
                dist.barrier()
                before, clock = wire.sent_by_kind(), PartClock()
                began = time.perf_counter()
                step.run(index, wire, clock)
                seconds = time.perf_counter() - began
                sent = {kind: total - before[kind] for kind, total in wire.sent_by_kind().items()}
                if turn >= warmup:
                    mine.step_s.append(seconds)
                    mine.parts_s.append({**clock.seconds, "other": seconds - sum(clock.seconds.values())})
                    mine.kv_bytes_sent = sent["context_kv"] + sent["block_kv"] + sent["other"]
                if grid.rank == 0:
                    bar.advance(1, f"{works[index].context:,} rows")
    for index, mine in enumerate(figures):
        plan = step.plan(index, wire)
        mine.blocks, mine.placement, mine.transports = plan.own.numel(), plan.placement, plan.transports
        row_bytes = config.feature_width * torch.bfloat16.itemsize
        mine.feature_bytes_read = sum(stop - start for start, stop in plan.rows) * row_bytes
        mine.peak_bytes = _peak(step, index)
    return figures, gemm[warmup:]


def _peak(step: LongStep, index: int) -> int:
    with PeakTracker() as tracker:
        moments = [tensor for state in step.optimizer.state.values() for tensor in state.values()]
        tracker.track([*step.drafter.parameters(), *moments, step.head.embedding])
        step.run(index, Wire(step.grid), PartClock())
    return tracker.peak_bytes
