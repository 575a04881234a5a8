"""What a device and its links can do: figures of data sheets, or of a file that `csbp.measure` made.

The planner needs rates that a training step reaches, so a preset holds the data sheet's peak and, apart from
it, the fraction that is assumed to be reached. A measured device holds what was reached.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


class DeviceError(ValueError):
    """A device file or name that cannot be used."""


@dataclasses.dataclass(frozen=True)
class DeviceConstants:
    """Rates and sizes of one rank's device.

    Attributes:
        name: what it is.
        source: where the figures come from, with every assumption in words.
        matmul_flops: peak floating-point operations a second of matrix products in the step's dtype.
        matmul_efficiency: fraction of it that large products of a step reach.
        attention_efficiency: fraction of it that block attention reaches.
        memory_bandwidth: bytes a second of device memory that element-wise work reaches.
        memory_bytes: memory of one device.
        link_bandwidth: bytes a second that a rank sends to a neighbour, one direction.
        link_latency: seconds before the first byte arrives.
        disk_read: bytes a second that a rank reads features at, or None if unknown.
    """

    name: str
    source: str
    matmul_flops: float
    matmul_efficiency: float
    attention_efficiency: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float
    link_latency: float
    disk_read: float | None = None

    def with_memory(self, memory_bytes: float) -> DeviceConstants:
        """The same device with another memory budget."""
        return dataclasses.replace(self, memory_bytes=memory_bytes)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> DeviceConstants:
        """Read a file that `save` wrote.

        Raises:
            DeviceError: the file is not JSON, or its keys are not these attributes.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(**values)
        except (OSError, TypeError, json.JSONDecodeError) as error:
            wanted = ", ".join(field.name for field in dataclasses.fields(cls))
            raise DeviceError(
                f"{path} is not a device file ({error}); expected a JSON object with the keys {wanted}, as "
                "`bench device --out` writes it"
            ) from error


_ASSUMED = (
    "assumed reached: 40 % of peak in matrix products (published training figures of a 1.9 G drafter on H100 "
    "imply 38 %), 25 % in block attention, 80 % of memory bandwidth, 80 % of NVLink"
)


def _hopper(name: str, memory_gib: float, memory_bandwidth: float) -> DeviceConstants:
    return DeviceConstants(
        name=name,
        source=(
            f"data sheet of {name}: 989.4 TFLOP/s bf16 dense, {memory_bandwidth / 1e12:g} TB/s, NVLink "
            f"450 GB/s each way, {memory_gib:g} GiB as the driver reports it; {_ASSUMED}"
        ),
        matmul_flops=989.4e12,
        matmul_efficiency=0.40,
        attention_efficiency=0.25,
        memory_bandwidth=0.8 * memory_bandwidth,
        memory_bytes=memory_gib * 2**30,
        link_bandwidth=0.8 * 450e9,
        link_latency=10e-6,
    )


PRESETS = {
    "h100-80gb": _hopper("NVIDIA H100 SXM 80GB", 79.6, 3.35e12),
    "h200": _hopper("NVIDIA H200 SXM 141GB", 140.4, 4.8e12),
    "cpu": DeviceConstants(
        name="one CPU core",
        source="assumed: one AVX-512 core, fp32, and gloo over loopback; `bench device` measures",
        matmul_flops=60e9,
        matmul_efficiency=1.0,
        attention_efficiency=0.5,
        memory_bandwidth=10e9,
        memory_bytes=8 * 2**30,
        link_bandwidth=1e9,
        link_latency=100e-6,
    ),
}


def device_constants(name: str) -> DeviceConstants:
    """A preset by name, or a measured device by the path of its file.

    Raises:
        DeviceError: neither.
    """
    if name in PRESETS:
        return PRESETS[name]
    if name.endswith(".json"):
        return DeviceConstants.load(Path(name))
    raise DeviceError(
        f"no device {name!r}; expected one of {', '.join(PRESETS)}, or the path of a .json file that "
        "`bench device --out` wrote"
    )
