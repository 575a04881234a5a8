"""`bench long`: what a step costs as the sequence grows, at the same work."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from rich.table import Table

from csbp.cost import Workload, step_flops
from csbp.device import PRESETS
from csbp.planner import step_cost
from csbp.processes import run_ranks
from csbp.share import replica_share
from drafter.config import DrafterConfig
from pipelines.bench_long_step import RunFigures, measure_long_rank
from pipelines.bench_step import target_drafter
from pipelines.plan import drafter_shape

GIB = 2**30


class LongOptions(BaseModel):
    """Options of `bench long`."""

    model_config = ConfigDict(extra="forbid")

    contexts: tuple[int, ...] = Field((65536, 262144, 1048576), description="Rows of the sequence, in turns.")
    layers: Literal["full", "sliding", "mixed"] = Field("sliding", description="Kinds of draft layers.")
    anchors: int = Field(512, ge=1, description="Blocks of the sequence.")
    anchors_rule: Literal["uniform", "locality"] = Field(
        "locality", description="Blocks anywhere, or one block size apart in neighbourhoods."
    )
    neighbourhoods: int = Field(8, ge=1, description="Of a sequence, under the locality rule.")
    block: int = Field(8, ge=2, description="Block size.")
    window: int = Field(2048, ge=1, description="Window of sliding layers.")
    draft_layers: int = Field(2, ge=1, description="Draft layers; `mixed` has a full one last.")
    version: int = Field(2, ge=1, le=2, description="1 for a DFlash drafter, 2 for DFlash2.")
    ranks: int = Field(2, ge=1, description="Processes with one thread each; one replica.")
    recompute: bool | None = Field(
        None,
        description="Make context rows again in the backward pass instead of keeping them; by default for "
        "full and mixed layers, whose rows grow with the sequence.",
    )
    steps: int = Field(5, ge=1, description="Timed steps of each length.")
    warmup: int = Field(1, ge=0, description="Steps of each length before these.")
    check: bool = Field(False, description="Fail when a bound below is missed.")
    max_step_ratio: float | None = Field(None, description="Most time at the last length over the first.")
    max_peak_ratio: float | None = Field(None, description="Most peak bytes at the last over the first.")
    min_gemm_share: float | None = Field(
        None, description="Least share of the machine's GEMM rate, at the first length."
    )
    max_total_gib: float | None = Field(None, description="Most peak GiB of all ranks together.")
    timeout: float = Field(7200.0, gt=0, description="Seconds before the ranks are ended.")

    @model_validator(mode="after")
    def _complete(self) -> LongOptions:
        if self.recompute is None:
            self.recompute = self.layers != "sliding"
        return self

    def work(self, context: int) -> Workload:
        groups = self.neighbourhoods if self.anchors_rule == "locality" else 1
        return Workload(
            context, self.anchors, anchor_rule=self.anchors_rule, neighbourhoods=min(groups, self.anchors)
        )

    def config(self) -> DrafterConfig:
        return target_drafter(self.layers, self.draft_layers, self.window, self.block, self.version)


@dataclass(frozen=True)
class LongRun:
    """Figures of one context length, by rank."""

    context: int
    ranks: Sequence[RunFigures]
    flops: dict[str, float]
    gemm_flops_per_s: float

    @property
    def seconds(self) -> list[float]:
        """Each timed step: the time of its last rank."""
        return [max(step) for step in zip(*(rank.step_s for rank in self.ranks), strict=True)]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def peak(self) -> int:
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def gemm_share(self) -> float:
        """Achieved FLOP/s of the step over what large products of all ranks reach together."""
        return sum(self.flops.values()) / (self.median * self.gemm_flops_per_s)

    @property
    def parts(self) -> dict[str, float]:
        """Median seconds of each part, mean over ranks."""
        names = list(self.ranks[0].parts_s[0])
        return {
            name: statistics.fmean(
                statistics.median(step[name] for step in rank.parts_s) for rank in self.ranks
            )
            for name in names
        }

    def to_dict(self) -> dict[str, Any]:
        q1, median, q3 = np.quantile(self.seconds, [0.25, 0.5, 0.75]).tolist()
        return {
            "context": self.context,
            "step_s": {"median": median, "q1": q1, "q3": q3, "n": len(self.seconds)},
            "peak_bytes": [rank.peak_bytes for rank in self.ranks],
            "kv_bytes_sent": sum(rank.kv_bytes_sent for rank in self.ranks),
            "feature_bytes_read": sum(rank.feature_bytes_read for rank in self.ranks),
            "union_bytes": self.ranks[0].union_bytes,
            "flops": sum(self.flops.values()),
            "flops_by_part": self.flops,
            "flops_share_of_gemm": self.gemm_share,
            "parts_s": self.parts,
            "blocks": [rank.blocks for rank in self.ranks],
            "placement": self.ranks[0].placement,
            "transports": list(self.ranks[0].transports),
        }


@dataclass(frozen=True)
class LongResult:
    """All lengths.

    Attributes:
        gemm: median FLOP/s of a 2048-cubed float32 product on each rank, all ranks at once.
    """

    options: LongOptions
    runs: Sequence[LongRun]
    gemm: Sequence[float]

    @property
    def step_ratio(self) -> float:
        return self.runs[-1].median / self.runs[0].median

    @property
    def peak_ratio(self) -> float:
        return self.runs[-1].peak / self.runs[0].peak

    def fits(self) -> dict[str, dict[str, float]]:
        """Lines through the lengths: time over union rows and over rows, peak over rows of a rank."""
        if len(self.runs) < 2:
            return {}
        row_bytes = self.options.config().feature_width * 2
        union = [run.ranks[0].union_bytes / row_bytes for run in self.runs]
        rows = [run.context / self.options.ranks for run in self.runs]
        times, peaks = [run.median for run in self.runs], [float(run.peak) for run in self.runs]
        return {
            "step_s_over_union_rows": line(union, times),
            "step_s_over_context_rows": line([run.context for run in self.runs], times),
            "peak_bytes_over_context_rows_of_a_rank": line(rows, peaks),
        }

    @property
    def missed(self) -> list[str]:
        """Bounds that were missed, in words; empty unless `check`."""
        options = self.options
        if not options.check:
            return []
        total = max(sum(rank.peak_bytes for rank in run.ranks) for run in self.runs) / GIB
        reads = [run.to_dict() for run in self.runs]
        bounds = [
            (self.step_ratio, options.max_step_ratio, "time at the last length over the first"),
            (self.peak_ratio, options.max_peak_ratio, "peak bytes at the last length over the first"),
            (total, options.max_total_gib, "peak GiB of all ranks together"),
        ]
        misses = [
            f"{what} {found:.3f} is above {most}" for found, most, what in bounds if most and found > most
        ]
        share = self.runs[0].gemm_share
        if options.min_gemm_share is not None and share < options.min_gemm_share:
            misses.append(f"share of the GEMM rate {share:.3f} is below {options.min_gemm_share}")
        if options.layers == "sliding":
            misses += [
                f"{run['context']:,} rows: read more than 1.1 times the union of windows"
                for run in reads
                if run["feature_bytes_read"] > 1.1 * run["union_bytes"]
            ]
        return misses

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": {
                **self.options.model_dump(),
                "features": "synthetic, bfloat16, copied from memory",
                "gemm_flops_per_s": list(self.gemm),
            },
            "runs": [run.to_dict() for run in self.runs],
            "ratio_last_to_first": {"step": self.step_ratio, "peak": self.peak_ratio},
            "fits": self.fits(),
            "missed": self.missed,
        }


def line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Least squares y = intercept + slope x with the share of the variance that it explains."""
    if len(set(x)) < 2:
        return {"slope": 0.0, "intercept": statistics.fmean(y), "r2": 0.0}
    slope, intercept = statistics.linear_regression(x, y)
    spread = sum((value - statistics.fmean(y)) ** 2 for value in y)
    rest = sum((value - intercept - slope * at) ** 2 for at, value in zip(x, y, strict=True))
    return {"slope": slope, "intercept": intercept, "r2": 1 - rest / spread if spread else 1.0}


def run_bench_long(options: LongOptions) -> LongResult:
    """Time every length; the ranks are processes of this machine with one thread each."""
    config = options.config()
    works = [options.work(context) for context in options.contexts]
    found = run_ranks(
        measure_long_rank,
        options.ranks,
        config,
        works,
        options.recompute,
        options.steps,
        options.warmup,
        timeout=options.timeout,
    )
    gemm = [statistics.median(rates) for _, rates in found]
    runs = [
        LongRun(work.context, [rank[0][index] for rank in found], _flops(config, work, options), sum(gemm))
        for index, work in enumerate(works)
    ]
    return LongResult(options, runs, gemm)


def _flops(config: DrafterConfig, work: Workload, options: LongOptions) -> dict[str, float]:
    """Operations of the products of all ranks; rows that are made twice count once more only if two ranks
    make them.
    """
    shape = drafter_shape(config)
    cost = step_cost(shape, PRESETS["cpu"], 4)
    share = replica_share(shape, work, options.ranks, cost, wire_bytes=4, retain=None)
    total: dict[str, float] = {}
    for rank in share.ranks:
        parts = step_flops(
            shape,
            blocks=rank.blocks,
            fused_rows=rank.feature_rows,
            projected_rows=tuple(layer.own_rows for layer in rank.layers),
            pairs=tuple(layer.pairs for layer in rank.layers),
        )
        for name, flops in parts.items():
            total[name] = total.get(name, 0.0) + flops.total
    return total


def render_bench_long(result: LongResult) -> Table:
    """One column a length."""
    options = result.options
    fits = {name: f"{fit['slope']:.3g} a row, r2 {fit['r2']:.3f}" for name, fit in result.fits().items()}
    table = Table(
        title=f"{options.anchors} blocks of {options.block}, {options.anchors_rule} anchors, "
        f"{options.layers} layers, {options.ranks} ranks of one thread, synthetic features",
        caption=f"last length over first: time {result.step_ratio:.3f}, peak {result.peak_ratio:.3f}; GEMM "
        f"{sum(result.gemm) / 1e9:.0f} GFLOP/s of all ranks; "
        + "; ".join(f"{name.replace('_', ' ')}: {text}" for name, text in fits.items())
        + "".join(f"\nMISSED: {miss}" for miss in result.missed),
    )
    table.add_column("")
    columns: list[dict[str, str]] = []
    for run in result.runs:
        table.add_column(f"{run.context:,} rows", justify="right")
        figures = run.to_dict()
        step = figures["step_s"]
        columns.append(
            {
                "step, median s": f"{step['median']:.2f}",
                "quartiles": f"{step['q1']:.2f}-{step['q3']:.2f}",
                "GFLOP": f"{figures['flops'] / 1e9:,.0f}",
                "share of GEMM": f"{run.gemm_share:.3f}",
                "peak MiB of a rank": f"{run.peak / 2**20:,.0f}",
                "features read MB": f"{figures['feature_bytes_read'] / 1e6:,.1f}",
                "union of windows MB": f"{figures['union_bytes'] / 1e6:,.1f}",
                "K/V and queries sent MB": f"{figures['kv_bytes_sent'] / 1e6:,.2f}",
                **{f"s {name}": f"{seconds:.3f}" for name, seconds in run.parts.items()},
            }
        )
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table
