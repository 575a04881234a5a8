"""`bench memory`: the planner's peak bytes beside those of real steps on this machine.

Every case is a small drafter that makes one whole step (fusion, layers, loss, backward, AdamW) in as many
real processes as it has context ranks, with `csbp.memory.PeakTracker` around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from csbp.cost import Workload
from csbp.device import PRESETS
from csbp.footprint import StepSettings, peak_moment
from csbp.memory import PeakTracker
from csbp.plan import plan_step
from csbp.planner import step_cost
from csbp.processes import run_ranks
from csbp.share import draw_layout, replica_share
from csbp.topology import Grid
from drafter.config import FULL, SLIDING, DrafterConfig
from drafter.context import Features
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.objective import ObjectiveConfig, block_loss
from pipelines.plan import drafter_shape


@dataclass(frozen=True)
class MemoryCase:
    """One step.

    Attributes:
        name: what it stands for.
        layers: one letter a layer: `s` slides over 64 rows, `f` is full.
        context, anchors, ranks: of the replica.
        hidden, vocabulary, version: of the drafter.
        precision: compute dtype; features are stored in bfloat16 under bf16, else in float32.
        narrow_features: they are stored in bfloat16 in any case.
        retain: received shards that a ring keeps.
        recompute_context, recompute_blocks: they are made again in the backward pass.
    """

    name: str
    layers: str
    context: int
    anchors: int
    ranks: int = 1
    hidden: int = 128
    vocabulary: int = 2048
    version: int = 2
    precision: Literal["fp32", "bf16"] = "fp32"
    narrow_features: bool = False
    retain: int | None = None
    recompute_context: bool = False
    recompute_blocks: bool = False

    @property
    def compute_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 4

    @property
    def feature_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.narrow_features or self.precision == "bf16" else torch.float32


CASES = (
    MemoryCase("sliding layers", "sss", 1024, 128),
    MemoryCase("full layers, long context", "ff", 8192, 32),
    MemoryCase("mixed layers", "ssf", 4096, 96),
    MemoryCase("version 1", "sss", 1024, 128, version=1),
    MemoryCase("blocks made again", "ssss", 1024, 512, recompute_blocks=True),
    MemoryCase("blocks made again, bf16", "ssss", 1024, 512, precision="bf16", recompute_blocks=True),
    MemoryCase("wide, large vocabulary", "ss", 512, 64, hidden=256, vocabulary=16384),
    MemoryCase("bf16 autocast", "sss", 1024, 128, precision="bf16"),
    MemoryCase("sliding layers, 2 ranks", "sss", 2048, 128, ranks=2),
    MemoryCase("full layers, 2 ranks", "ff", 8192, 64, ranks=2),
    MemoryCase("full layers, 3 ranks, ring of two shards", "fff", 4096, 256, ranks=3, retain=1),
    MemoryCase("mixed layers, 2 ranks", "sfs", 4096, 128, ranks=2),
    MemoryCase("bf16 features, fp32 products", "ff", 16384, 32, narrow_features=True),
    MemoryCase("context made again", "ff", 32768, 32, narrow_features=True, recompute_context=True),
    MemoryCase(
        "context made again, bf16, 2 ranks",
        "fs",
        32768,
        32,
        ranks=2,
        precision="bf16",
        recompute_context=True,
    ),
)


class BenchMemoryOptions(BaseModel):
    """What to compare."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: Literal[1, 2, 3] | None = Field(None, description="Only cases with this many context ranks.")


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of the most loaded rank of one case."""

    case: MemoryCase
    transports: tuple[str, ...]
    measured: int
    estimated: float

    @property
    def ratio(self) -> float:
        return self.estimated / self.measured


@dataclass(frozen=True)
class BenchMemoryResult:
    rows: tuple[MemoryRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "cases": [
                {
                    "name": row.case.name,
                    "ranks": row.case.ranks,
                    "transports": list(row.transports),
                    "measured_bytes": row.measured,
                    "estimated_bytes": row.estimated,
                    "ratio": row.ratio,
                }
                for row in self.rows
            ]
        }


def run_bench_memory(options: BenchMemoryOptions) -> BenchMemoryResult:
    """Measure the cases and compare them with the planner; cases with equally many ranks share processes."""
    rows = []
    for ranks in sorted({case.ranks for case in CASES} if options.ranks is None else {options.ranks}):
        cases = [case for case in CASES if case.ranks == ranks]
        peaks = [_measure_all(cases)] if ranks == 1 else run_ranks(_measure_all, ranks, cases)
        for case, measured in zip(cases, zip(*peaks, strict=True), strict=True):
            transports, estimated = _estimate(case)
            rows.append(MemoryRow(case, transports, max(measured), estimated))
    return BenchMemoryResult(tuple(rows))


def _estimate(case: MemoryCase) -> tuple[tuple[str, ...], float]:
    """Transports, and the planner's peak bytes of the most loaded rank."""
    shape = drafter_shape(_config(case))
    element = case.compute_bytes
    settings = StepSettings(
        compute_bytes=element,
        feature_bytes=case.feature_dtype.itemsize,
        tensor_cores=False,
        retain=case.retain,
        recompute_context=case.recompute_context,
        recompute_blocks=case.recompute_blocks,
    )
    share = replica_share(
        shape,
        Workload(case.context, case.anchors),
        case.ranks,
        step_cost(shape, PRESETS["cpu"], element),
        wire_bytes=element,
        retain=case.retain,
    )
    peaks = [sum(peak_moment(shape, rank, settings, world=1)[1].values()) for rank in share.ranks]
    return share.transports, max(peaks)


def _measure_all(cases: Sequence[MemoryCase]) -> list[int]:
    return [_measure(case) for case in cases]


def _config(case: MemoryCase) -> DrafterConfig:
    target = {
        "hidden_size": case.hidden,
        "intermediate_size": 3 * case.hidden,
        "num_hidden_layers": 32,
        "num_attention_heads": case.hidden // 32,
        "num_key_value_heads": case.hidden // 64,
        "head_dim": 32,
        "vocab_size": case.vocabulary,
        "rope_theta": 1e4,
        "max_position_embeddings": 1 << 20,
    }
    return DrafterConfig.for_target(
        target,
        mask_token_id=case.vocabulary - 1,
        version=case.version,
        num_layers=len(case.layers),
        block_size=8,
        num_taps=4,
        layer_types=[SLIDING if letter == "s" else FULL for letter in case.layers],
        sliding_window=64,
        selector_rank=32,
    )


def _measure(case: MemoryCase) -> int:
    """Peak bytes of this rank's second step: by then AdamW has its moments."""
    torch.manual_seed(0)
    config, shape = _config(case), drafter_shape(_config(case))
    drafter = Drafter(config)
    drafter.recompute = case.recompute_blocks
    narrow = case.precision == "bf16"
    dtype = torch.bfloat16 if narrow else torch.float32
    tables = [torch.randn(case.vocabulary, case.hidden).mul_(0.02).to(dtype) for _ in range(2)]
    head = FrozenHead(tables[0], tables[1])
    layout = draw_layout(Workload(case.context, case.anchors), config.block_size)
    grid = Grid.single() if case.ranks == 1 else Grid.from_environment(case.ranks)
    plan = plan_step(
        layout,
        config.layer_masks,
        grid,
        cost=step_cost(shape, PRESETS["cpu"], case.compute_bytes),
        retain=case.retain,
    )
    rows = sum(stop - start for start, stop in plan.rows)
    features = torch.randn(rows, config.feature_width).to(case.feature_dtype)
    anchors = layout.anchors[plan.own]
    ids = torch.randint(0, case.vocabulary, (len(anchors),))
    labels = torch.randint(0, case.vocabulary, (len(anchors), config.num_drafts))
    positions = anchors[:, None] + torch.arange(config.block_size)
    objective = ObjectiveConfig.model_validate({})
    optimizer = torch.optim.AdamW(drafter.parameters())

    def step() -> None:
        autocast = torch.autocast("cpu", torch.bfloat16) if narrow else contextlib.nullcontext()
        with autocast:
            hidden = drafter(
                Features(features) if case.recompute_context else drafter.fuse(features),
                plan.row_positions,
                embed_blocks(head, config, ids),
                positions,
                plan.attention(),
            )
            supervised = torch.ones_like(labels, dtype=torch.bool)
            loss = block_loss(drafter, hidden, labels, supervised, ids, head, objective, 0).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with PeakTracker() as tracker:
        state = [tensor for moments in optimizer.state.values() for tensor in moments.values()]
        tracker.track([*drafter.parameters(), head.embedding, head.head, features, *state])
        step()
    return tracker.peak_bytes


def render_bench_memory(result: BenchMemoryResult) -> Table:
    table = Table(title="Peak of a step: the planner's estimate beside the measured one")
    table.add_column("case")
    table.add_column("transports")
    for column in ("measured MiB", "estimated MiB", "ratio"):
        table.add_column(column, justify="right")
    for row in result.rows:
        table.add_row(
            row.case.name,
            ", ".join(dict.fromkeys(row.transports)),
            f"{row.measured / 2**20:.1f}",
            f"{row.estimated / 2**20:.1f}",
            f"{row.ratio:.3f}",
        )
    return table
