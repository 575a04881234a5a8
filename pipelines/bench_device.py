"""`bench device`: what this machine reaches in the products, copies and messages of a training step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from csbp.device import DeviceConstants
from csbp.measure import measure_device
from pipelines.plan import named_shape


class BenchDeviceOptions(BaseModel):
    """What to measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(
        "qwen3.8-27b-dflash2",
        description="Whose products are timed: a drafter's or target's config.json, or a shipped shape.",
    )
    device: Literal["cpu", "cuda"] | None = Field(None, description="By default CUDA if there is a GPU.")
    precision: Literal["bf16", "fp32"] | None = Field(
        None, description="Dtype of the products; by default bf16 on CUDA and fp32 on CPU."
    )
    rows: int | None = Field(
        None, ge=1, description="Rows of a product; by default 8192 on CUDA and 64 on CPU."
    )
    link: bool = Field(True, description="Time two processes that send to each other.")
    disk: Path | None = Field(None, description="A folder on the disk that features are read from.")
    out: Path | None = Field(None, description="File for `plan --device`.")


@dataclass(frozen=True)
class BenchDeviceResult:
    """What was measured, and where it was saved."""

    constants: DeviceConstants
    out: Path | None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self.constants)


def run_bench_device(options: BenchDeviceOptions) -> BenchDeviceResult:
    """Measure this machine; write `options.out` if given.

    Raises:
        DeviceError: CUDA was asked for and is not there.
    """
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    constants = measure_device(
        named_shape(options.target),
        device=device,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        rows=options.rows or (8192 if device == "cuda" else 64),
        link=options.link,
        disk=options.disk,
    )
    if options.out is not None:
        constants.save(options.out)
    return BenchDeviceResult(constants, options.out)


def render_bench_device(result: BenchDeviceResult) -> Table:
    device = result.constants
    table = Table("figure", "value", title=f"{device.name}: {device.source}")
    table.add_row("matrix products", f"{device.matmul_flops / 1e9:,.1f} GFLOP/s")
    table.add_row("attention", f"{device.matmul_flops * device.attention_efficiency / 1e9:,.1f} GFLOP/s")
    table.add_row("memory bandwidth", f"{device.memory_bandwidth / 1e9:,.1f} GB/s")
    table.add_row("memory", f"{device.memory_bytes / 2**30:,.1f} GiB")
    table.add_row("link, one direction", f"{device.link_bandwidth / 1e9:,.2f} GB/s")
    table.add_row("link latency", f"{device.link_latency * 1e6:,.0f} us")
    if device.disk_read is not None:
        table.add_row("disk read", f"{device.disk_read / 1e9:,.2f} GB/s")
    if result.out is not None:
        table.caption = f"saved to {result.out}; use it with plan --device {result.out}"
    return table
