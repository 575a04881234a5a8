"""`bench exactness`: whole drafter steps on real ranks against one rank in float64 (see `csbp.exactness`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table
from torch import Tensor

from csbp.exactness import BLOCK, TOLERANCE, Result, check_rank
from csbp.layout import BlockLayout
from csbp.processes import run_ranks
from drafter.attention import BlockAttention, LayerMask
from drafter.config import DrafterConfig
from drafter.context import Features
from drafter.dense import DenseAttention
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.objective import ObjectiveConfig, block_loss
from pipelines.progress import Bar

VOCABULARY = 61
CHUNK = 5  # rows; divides neither shards nor windows
TARGET = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


class ExactnessOptions(BaseModel):
    """Options of `bench exactness`."""

    model_config = ConfigDict(extra="forbid")

    ranks: str = Field(
        "1,2,3,4",
        pattern=r"^[1-9]\d*(,[1-9]\d*)*$",
        description="Worlds to try, by number of processes, each with every number of context ranks.",
    )
    dtype: Literal["float64", "float32"] = Field("float64", description="Precision of the sharded steps.")
    only: tuple[str, ...] = Field((), description="Run only cases whose name contains one of these texts.")
    timeout: float = Field(900.0, gt=0, description="Seconds that one world may take.")


@dataclass(frozen=True)
class ExactnessResult:
    """Every case, and whether all lie within the tolerance of the precision."""

    dtype: str
    tolerance: float
    cases: tuple[Result, ...]

    @property
    def max_rel_err(self) -> float:
        return max((case.max_rel_err for case in self.cases), default=0.0)

    @property
    def passed(self) -> bool:
        return bool(self.cases) and self.max_rel_err <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return {
            "max_rel_err": self.max_rel_err,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "dtype": self.dtype,
            "cases": [asdict(case) for case in self.cases],
        }


class TinyStep:
    """A DFlash2 drafter of 64 k parameters, every one of them random and in use, with features and labels."""

    def __init__(
        self, layout: BlockLayout, masks: Sequence[LayerMask], dtype: torch.dtype, seed: int
    ) -> None:
        self.layout, self.masks = layout, masks
        config = _config(masks)
        draw = torch.Generator().manual_seed(100 + seed)
        blocks, slots = layout.anchors.numel(), layout.block_size - 1
        # Numbers are drawn in fp32, so that both precisions start from the same ones.
        self.features = torch.randn(layout.length, config.feature_width, generator=draw).to(dtype)
        tables = torch.randn(2, VOCABULARY, config.hidden_size, generator=draw).to(dtype)
        self.head = FrozenHead(tables[0], tables[1])
        self.labels = torch.randint(VOCABULARY, (blocks, slots), generator=draw)
        self.supervised = torch.rand(blocks, slots, generator=draw) < 0.8
        self.anchor_ids = torch.randint(VOCABULARY, (blocks,), generator=draw)
        self.slots = max(1, int(self.supervised.sum()))
        self.drafter = Drafter(config)
        weights = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in self.drafter.named_parameters():
                noise = 0.1 * torch.randn(parameter.shape, generator=weights)
                parameter.copy_(noise + 1.0 if "norm" in name else noise)
        self.drafter.to(dtype)
        self.parameters: dict[str, Tensor] = dict(self.drafter.named_parameters())

    def loss_sum(
        self,
        attention: BlockAttention,
        rows: Sequence[tuple[int, int]],
        positions: Tensor,
        own: Tensor,
        *,
        again: bool = False,
    ) -> Tensor:
        features = torch.cat([self.features[:0], *(self.features[start:stop] for start, stop in rows)])
        at = self.layout.positions[own, None] + torch.arange(self.layout.block_size)
        anchors = self.anchor_ids[own]
        self.drafter.recompute = again
        hidden = self.drafter(
            Features(features, CHUNK) if again else self.drafter.fuse(features),
            positions,
            embed_blocks(self.head, self.drafter.config, anchors),
            at,
            attention,
        )
        labels, supervised = self.labels[own], self.supervised[own]
        return block_loss(
            self.drafter,
            hidden,
            labels,
            supervised,
            anchors,
            self.head,
            ObjectiveConfig.model_validate({}),
            0,
        ).loss

    def reference_sum(self) -> Tensor:
        layout = self.layout
        dense = DenseAttention(layout.anchors, layout.starts, layout.length, layout.block_size, self.masks)
        starts = torch.unique(torch.cat([torch.zeros(1, dtype=torch.int64), layout.starts]))
        axis = torch.arange(layout.length)
        positions = axis - starts[torch.searchsorted(starts, axis, right=True) - 1]
        blocks = torch.arange(layout.anchors.numel())
        return self.loss_sum(dense, [(0, layout.length)], positions, blocks)


def _config(masks: Sequence[LayerMask]) -> DrafterConfig:
    windows = [mask.window for mask in masks if mask.window is not None]
    return DrafterConfig.for_target(
        TARGET,
        version=2,
        mask_token_id=3,
        num_layers=len(masks),
        num_taps=2,
        block_size=BLOCK,
        layer_types=tuple("full_attention" if m.window is None else "sliding_attention" for m in masks),
        sliding_window=windows[0] if windows else None,
        is_causal=None if any(mask.causal for mask in masks) else False,
        conv_group_size=8,
        selector_rank=8,
        selector_top_k=5,
        dtype="float32",
    )


def run_bench_exactness(options: ExactnessOptions) -> ExactnessResult:
    """Check every case in every world."""
    dtype = getattr(torch, options.dtype)
    worlds = [int(ranks) for ranks in options.ranks.split(",")]
    cases: list[Result] = []
    with Bar("exactness", len(worlds)) as bar:
        for ranks in worlds:
            divisors = [p for p in range(1, ranks + 1) if ranks % p == 0]
            arguments = (TinyStep, dtype, divisors, options.only or ("",))
            cases += run_ranks(check_rank, ranks, *arguments, timeout=options.timeout)[0]
            bar.advance(1, f"{len(cases)} cases")
    return ExactnessResult(options.dtype, TOLERANCE[dtype], tuple(cases))


def render_bench_exactness(result: ExactnessResult) -> Table:
    """The worst case of each plan."""
    verdict = "exact" if result.passed else "NOT exact"
    table = Table(
        "ranks",
        "context ranks",
        "plan",
        "cases",
        "largest relative error",
        "in",
        title=f"{verdict}: {result.max_rel_err:.1e} over {len(result.cases)} cases, "
        f"tolerance {result.tolerance:.0e} in {result.dtype}",
    )
    groups: dict[tuple[int, int, str], list[Result]] = {}
    for case in result.cases:
        groups.setdefault((case.ranks, case.context_ranks, case.name.split(" | ")[-1]), []).append(case)
    for (ranks, context_ranks, plan), cases in groups.items():
        worst = max(cases, key=lambda case: case.max_rel_err)
        table.add_row(
            str(ranks), str(context_ranks), plan, str(len(cases)), f"{worst.max_rel_err:.1e}", worst.worst
        )
    return table
