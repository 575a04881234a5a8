"""`bench csbp`: csbp and its baselines timed in turns on real ranks of this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from rich.table import Table

from csbp.baselines import BASELINES
from csbp.plan import Mode
from csbp.processes import run_ranks
from csbp.transport import KINDS
from pipelines.bench_step import ONE_RANK, ModeFigures, StepSetting, measure_rank

BYTES_TOLERANCE = 0.02


class CsbpOptions(BaseModel):
    """Options of `bench csbp`."""

    model_config = ConfigDict(extra="forbid")

    context: int = Field(65536, ge=2, description="Rows of the sequence.")
    anchors: int = Field(256, ge=1, description="Blocks of the sequence.")
    anchor_rule: Literal["uniform", "locality"] = Field(
        "uniform", description="Blocks anywhere, or one block size apart in one neighbourhood."
    )
    block: int = Field(8, ge=2, description="Block size.")
    layers: Literal["full", "sliding", "mixed"] = Field("full", description="Kinds of draft layers.")
    draft_layers: int = Field(2, ge=1, description="Draft layers; `mixed` has a full one last.")
    window: int = Field(2048, ge=1, description="Window of sliding layers.")
    version: int = Field(1, ge=1, le=2, description="1 for a DFlash drafter, 2 for DFlash2.")
    ranks: int = Field(2, ge=1, description="Processes with one thread each; one replica.")
    modes: tuple[Mode, ...] = Field(
        ("csbp", "replicated"),
        description=f"What to time: csbp, {', '.join(BASELINES)}; one rank alone is always timed too.",
    )
    placement: Literal["auto", "dealt", "contiguous"] = Field("auto", description="Who owns what in csbp.")
    transport: Literal["auto", "local", "halo", "gather", "ring", "query-ring"] = Field(
        "auto", description="How context keys and values reach the blocks in csbp."
    )
    retain: int | None = Field(None, ge=1, description="Received shards that a ring keeps; all by default.")
    steps: int = Field(7, ge=1, description="Timed steps of each mode.")
    warmup: int = Field(1, ge=0, description="Steps of each mode before these.")
    check: bool = Field(
        False,
        description="Fail when a bound below is missed, csbp sends block rows, or its bytes differ from the "
        "closed forms of docs/csbp.md by more than 2 %.",
    )
    min_efficiency: float | None = Field(None, description="Least one-rank time over ranks times csbp time.")
    min_ratio: dict[str, float] = Field(
        {}, description="Least time of a mode over that of csbp, MODE=X; the interval's lower end counts."
    )
    max_imbalance: float | None = Field(
        None, description="Largest busy time of a rank over the mean, in csbp."
    )
    timeout: float = Field(7200.0, gt=0, description="Seconds before the ranks are ended.")

    @model_validator(mode="after")
    def _known_modes(self) -> CsbpOptions:
        if "csbp" not in self.modes:
            raise ValueError(f"modes must hold csbp and may hold {BASELINES}, found {self.modes}")
        if absent := set(self.min_ratio) - set(self.modes):
            raise ValueError(f"min_ratio names modes that are not timed: {sorted(absent)}")
        return self


@dataclass(frozen=True)
class CsbpResult:
    """Figures by mode.

    Attributes:
        figures: per mode and rank.
        expected_bytes: context and query bytes of csbp by closed form, mean over ranks.
    """

    options: CsbpOptions
    figures: dict[str, list[ModeFigures]]
    expected_bytes: float

    def seconds(self, mode: str) -> list[float]:
        """Each timed step: the time of its last rank."""
        return [max(step) for step in zip(*(rank.step_s for rank in self.figures[mode]), strict=True)]

    def busy(self, mode: str) -> list[float]:
        """Median busy seconds of each rank."""
        return [statistics.median(rank.busy_s) for rank in self.figures[mode]]

    @property
    def imbalance(self) -> float:
        busy = self.busy("csbp")
        return max(busy) / statistics.fmean(busy)

    @property
    def efficiency(self) -> float:
        one = statistics.median(self.seconds(ONE_RANK))
        return one / (self.options.ranks * statistics.median(self.seconds("csbp")))

    @property
    def sent_bytes(self) -> float:
        """Context and query bytes that csbp sent, mean over ranks."""
        ranks = self.figures["csbp"]
        return statistics.fmean(r.sent.get("context_kv", 0) + r.sent.get("other", 0) for r in ranks)

    def ratio(self, mode: str) -> dict[str, float]:
        """Time of a mode over that of csbp, with a bootstrap 95 % interval over the rounds."""
        return ratio_interval(self.seconds(mode), self.seconds("csbp"))

    @property
    def missed(self) -> list[str]:
        """Bounds that were missed, in words; empty unless `check`."""
        options, misses = self.options, []
        if not options.check:
            return []
        blocks = sum(rank.sent.get("block_kv", 0) for rank in self.figures["csbp"])
        if blocks:
            misses.append(f"csbp sent {blocks} bytes of block K/V; expected none")
        if abs(self.sent_bytes - self.expected_bytes) > BYTES_TOLERANCE * self.expected_bytes:
            misses.append(
                f"csbp sent {self.sent_bytes:,.0f} bytes a rank; closed form {self.expected_bytes:,.0f}"
            )
        if options.min_efficiency is not None and self.efficiency < options.min_efficiency:
            misses.append(f"efficiency {self.efficiency:.3f} is below {options.min_efficiency}")
        for mode, least in options.min_ratio.items():
            if self.ratio(mode)["low"] < least:
                misses.append(f"{mode} takes {self.ratio(mode)['low']:.2f} times csbp's time, below {least}")
        if options.max_imbalance is not None and self.imbalance > options.max_imbalance:
            misses.append(f"busiest rank {self.imbalance:.3f} of the mean, above {options.max_imbalance}")
        return misses

    def to_dict(self) -> dict[str, Any]:
        tokens = self.options.anchors * (self.options.block - 1)
        modes = {}
        for mode, ranks in self.figures.items():
            seconds = self.seconds(mode)
            q1, median, q3 = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
            modes[mode] = {
                "step_s": {"median": median, "q1": q1, "q3": q3, "n": len(seconds)},
                "tokens_per_s": tokens / median,
                "bytes_sent": {
                    kind: statistics.fmean(rank.sent.get(kind, 0) for rank in ranks) for kind in KINDS
                },
                "peak_bytes": [rank.peak_bytes for rank in ranks],
                "rank_busy_s": self.busy(mode),
                "rows": [rank.rows for rank in ranks],
                "blocks": [rank.blocks for rank in ranks],
                "placement": ranks[0].placement,
                "transports": list(ranks[0].transports),
            }
        others = [mode for mode in self.figures if mode not in ("csbp", ONE_RANK)]
        return {
            "config": {**self.options.model_dump(), "features": "synthetic"},
            "modes": modes,
            "ratios": {mode: self.ratio(mode) for mode in others},
            "efficiency_vs_one_rank": self.efficiency,
            "imbalance": self.imbalance,
            "expected_bytes": self.expected_bytes,
            "missed": self.missed,
        }


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], draws: int = 10_000
) -> dict[str, float]:
    """Ratio of medians with a 95 % bootstrap interval over rounds, which keeps what was timed together."""
    above, below = np.asarray(numerators), np.asarray(denominators)
    pick = np.random.default_rng(0).integers(len(above), size=(draws, len(above)))
    ratios = np.median(above[pick], 1) / np.median(below[pick], 1)
    low, high = np.quantile(ratios, [0.025, 0.975]).tolist()
    return {"median": float(np.median(above) / np.median(below)), "low": low, "high": high}


def run_bench_csbp(options: CsbpOptions) -> CsbpResult:
    """Time every mode; the ranks are processes of this machine with one thread each."""
    names = StepSetting.__dataclass_fields__
    setting = StepSetting(**{name: getattr(options, name) for name in names})
    modes = (*options.modes, ONE_RANK)
    found = run_ranks(
        measure_rank, options.ranks, setting, modes, options.steps, options.warmup, timeout=options.timeout
    )
    figures = {mode: [rank[mode] for rank in found] for mode in modes}
    figures[ONE_RANK] = figures[ONE_RANK][:1]
    return CsbpResult(options, figures, _expected_bytes(options, setting, figures["csbp"][0].transports))


def _expected_bytes(options: CsbpOptions, setting: StepSetting, transports: Sequence[str]) -> float:
    """Closed forms of docs/csbp.md, forward and backward, mean over ranks, in float32."""
    config = setting.config()
    row = 2 * config.num_key_value_heads * config.head_dim * 4
    query = options.anchors * options.block * config.num_attention_heads * 4
    share = (options.ranks - 1) / options.ranks
    union = options.context
    if options.layers == "sliding" and options.anchor_rule == "locality":
        union = min(union, (options.anchors - 1) * options.block + options.window - 1)
    per_layer = {
        "local": 0.0,
        "halo": 2 * share * (options.window - 1) * row,
        "gather": 2 * share * union * row,
        "ring": 2 * share * union * row,
        "query-ring": share * query * 4 * (config.head_dim + 1),
    }
    return sum(per_layer[transport] for transport in transports)


def render_bench_csbp(result: CsbpResult) -> Table:
    """One column a mode; bytes are per rank."""
    figures, options = result.to_dict(), result.options
    table = Table(
        title=f"{options.context:,} rows, {options.anchors} blocks of {options.block}, "
        f"{options.layers} layers, {options.ranks} ranks of one thread, synthetic features",
        caption=f"efficiency against one rank {result.efficiency:.3f}, busiest rank {result.imbalance:.3f} "
        f"of the mean; csbp sent {result.sent_bytes:,.0f} context bytes a rank, closed form "
        f"{result.expected_bytes:,.0f}" + "".join(f"\nMISSED: {miss}" for miss in result.missed),
    )
    table.add_column("")
    columns = []
    for mode, figure in figures["modes"].items():
        table.add_column(mode, justify="right")
        step, sent, ratio = figure["step_s"], figure["bytes_sent"], figures["ratios"].get(mode)
        columns.append(
            {
                "step, median s": f"{step['median']:.2f}",
                "quartiles": f"{step['q1']:.2f}-{step['q3']:.2f}",
                "supervised tokens/s": f"{figure['tokens_per_s']:,.0f}",
                "time over csbp's": f"{ratio['median']:.2f}" if ratio else "",
                "95 % interval": f"{ratio['low']:.2f}-{ratio['high']:.2f}" if ratio else "",
                "context by": " ".join(dict.fromkeys(figure["transports"])),
                "context MB": f"{(sent['context_kv'] + sent['other']) / 1e6:.2f}",
                "block K/V MB": f"{sent['block_kv'] / 1e6:.2f}",
                "gradient MB": f"{sent['gradients'] / 1e6:.2f}",
                "peak MiB": f"{max(figure['peak_bytes']) / 2**20:,.0f}",
                "busy s of ranks": " ".join(f"{busy:.2f}" for busy in figure["rank_busy_s"]),
            }
        )
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table
