"""The step that `bench csbp` times: a drafter of the embedded target's shape on synthetic features.

Features, tokens and frozen tables are random numbers; a step takes as long as with real ones. What a step
does: plan, fuse, layers, loss over the whole vocabulary, backward, one sum of all gradients over the ranks.
It leaves out reading features and the optimizer's update.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from csbp.cost import Workload
from csbp.device import PRESETS
from csbp.memory import PeakTracker
from csbp.plan import StepPlan, plan_step
from csbp.planner import step_cost
from csbp.share import draw_layout
from csbp.topology import Grid
from csbp.transport import Wire
from drafter.config import FULL, SLIDING, DrafterConfig
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.objective import ObjectiveConfig, block_loss
from pipelines.plan import drafter_shape
from pipelines.progress import Bar

ONE_RANK = "one-rank"

# SmolLM2-135M, the target that this project embeds
TARGET = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
}


@dataclass(frozen=True)
class StepSetting:
    """One micro-step.

    Attributes:
        context: rows L of the sequence.
        anchors: blocks A.
        anchor_rule: `uniform` or `locality`.
        block: block size B.
        layers: kinds of the draft layers; `mixed` is sliding layers with a full one last.
        draft_layers: how many.
        window: W of sliding layers.
        version: 1 for DFlash, 2 for DFlash2.
        placement, transport, retain: of mode `csbp`, as in `csbp.plan.plan_step`.
    """

    context: int
    anchors: int
    anchor_rule: Literal["uniform", "locality"]
    block: int
    layers: Literal["full", "sliding", "mixed"]
    draft_layers: int
    window: int
    version: int
    placement: Any = "auto"
    transport: Any = "auto"
    retain: int | None = None

    def config(self) -> DrafterConfig:
        return target_drafter(self.layers, self.draft_layers, self.window, self.block, self.version)


def target_drafter(
    layers: Literal["full", "sliding", "mixed"], count: int, window: int, block: int, version: int
) -> DrafterConfig:
    """A drafter like the demo's; `mixed` is sliding layers with a full one last."""
    kinds = {"full": [FULL] * count, "sliding": [SLIDING] * count, "mixed": [SLIDING] * (count - 1) + [FULL]}
    return DrafterConfig.for_target(
        TARGET,
        version=version,
        mask_token_id=0,
        num_layers=count,
        block_size=block,
        layer_types=kinds[layers],
        sliding_window=window,
        selector_rank=64,
        selector_parametrisation="low_rank",
    )


@dataclass
class ModeFigures:
    """What one rank measured in one mode; a list has one entry a timed step.

    Attributes:
        step_s: seconds from the common start to this rank's end.
        busy_s: of these, not waiting for peers.
        sent: bytes that this rank sent in one step, by kind.
        peak_bytes: highest live tensor bytes of one further step, weights, tables and features included.
        rows: context rows that this rank fused.
        blocks: blocks that it computed.
        placement, transports: as planned.
    """

    step_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    rows: int = 0
    blocks: int = 0
    placement: str = ""
    transports: tuple[str, ...] = ()


class SyntheticStep:
    """A drafter with features, blocks and labels, the same on every rank."""

    def __init__(self, setting: StepSetting, grid: Grid) -> None:
        torch.manual_seed(0)
        self.setting, self.grid = setting, grid
        self.config = setting.config()
        self.drafter = Drafter(self.config)
        table = torch.randn(self.config.vocab_size, self.config.hidden_size).mul_(0.05)
        self.head = FrozenHead(table, table)
        work = Workload(setting.context, setting.anchors, anchor_rule=setting.anchor_rule)
        self.layout = draw_layout(work, setting.block)
        self.cost = step_cost(drafter_shape(self.config), PRESETS["cpu"], 4)
        self.labels = torch.randint(self.config.vocab_size, (setting.anchors, self.config.num_drafts))
        self.anchor_ids = torch.randint(self.config.vocab_size, (setting.anchors,))
        self.features = torch.empty(0, self.config.feature_width)

    def plan(self, mode: str, wire: Wire) -> StepPlan:
        masks, layout = self.config.layer_masks, self.layout
        if mode == ONE_RANK:
            return plan_step(layout, masks, Grid.single(), cost=self.cost)
        if mode != "csbp":
            return plan_step(layout, masks, self.grid, mode=mode, cost=self.cost, wire=wire)  # type: ignore[arg-type]
        setting = self.setting
        return plan_step(
            layout,
            masks,
            self.grid,
            placement=setting.placement,
            transport=setting.transport,
            retain=setting.retain,
            cost=self.cost,
            wire=wire,
        )

    def make_features(self, rows: int) -> None:
        """Random features for any plan of at most `rows` rows."""
        if rows > len(self.features):
            self.features = torch.randn(rows, self.config.feature_width)

    def run(self, mode: str, wire: Wire, tracker: PeakTracker | None = None) -> None:
        """One step; its gradients are averaged over the ranks and dropped."""
        plan = self.plan(mode, wire)
        features = self.features[: plan.row_positions.numel()]
        if tracker is not None:
            features = features.clone()
        labels, ids = self.labels[plan.own], self.anchor_ids[plan.own]
        positions = self.layout.positions[plan.own, None] + torch.arange(self.setting.block)
        hidden = self.drafter(
            self.drafter.fuse(features),
            plan.row_positions,
            embed_blocks(self.head, self.config, ids),
            positions,
            plan.attention(),
        )
        supervised = torch.ones_like(labels, dtype=torch.bool)
        objective = ObjectiveConfig.model_validate({})
        loss = block_loss(self.drafter, hidden, labels, supervised, ids, self.head, objective, 0).loss
        ranks = 1 if mode == ONE_RANK else self.grid.world
        (loss * (plan.loss_scale * ranks / self.labels.numel())).backward()
        if ranks > 1:
            flat = torch.cat([p.grad.flatten() for p in self.drafter.parameters() if p.grad is not None])
            wire.add_up(flat, "gradients").div_(ranks)
        self.drafter.zero_grad(set_to_none=True)


def measure_rank(
    setting: StepSetting, modes: tuple[str, ...], steps: int, warmup: int
) -> dict[str, ModeFigures]:
    """Time `modes` in turns, A/B/A/B, on this rank of an existing world whose ranks are one replica."""
    grid = Grid.from_environment(dist.get_world_size())
    step = SyntheticStep(setting, grid)
    wires = {mode: Wire(grid) for mode in modes}
    figures = {mode: ModeFigures() for mode in modes}
    for mode in modes:
        plan = step.plan(mode, wires[mode])
        step.make_features(plan.row_positions.numel())
        figures[mode].rows, figures[mode].blocks = plan.row_positions.numel(), plan.own.numel()
        figures[mode].placement, figures[mode].transports = plan.placement, plan.transports
    for mode in _turns(modes, warmup + steps, grid):
        wire, mine = wires[mode], figures[mode]
        before, waited = wire.sent_by_kind(), wire.waited
        began = time.perf_counter()
        if mode != ONE_RANK or grid.rank == 0:
            step.run(mode, wire)
        seconds = time.perf_counter() - began
        mine.step_s.append(seconds)
        mine.busy_s.append(seconds - (wire.waited - waited))
        mine.sent = {kind: total - before[kind] for kind, total in wire.sent_by_kind().items()}
    for mode in modes:
        figures[mode].step_s, figures[mode].busy_s = (
            times[warmup:] for times in (figures[mode].step_s, figures[mode].busy_s)
        )
        if mode != ONE_RANK or grid.rank == 0:
            figures[mode].peak_bytes = _peak(step, mode)
    return figures


def _turns(modes: tuple[str, ...], rounds: int, grid: Grid) -> Iterable[str]:
    """Modes in turns; every turn starts on all ranks at once."""
    with Bar("bench csbp", rounds * len(modes)) as bar:
        for turn in range(rounds * len(modes)):
            dist.barrier()
            yield modes[turn % len(modes)]
            if grid.rank == 0:
                bar.advance(1, modes[turn % len(modes)])


def _peak(step: SyntheticStep, mode: str) -> int:
    with PeakTracker() as tracker:
        tracker.track([*step.drafter.parameters(), step.head.embedding])
        step.run(mode, Wire(step.grid), tracker)
    return tracker.peak_bytes
