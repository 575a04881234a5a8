"""Device constants: presets say what they assume, measured ones are positive and survive a file."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from csbp.cost import DrafterShape
from csbp.device import PRESETS, DeviceConstants, DeviceError, device_constants
from csbp.measure import measure_device, measure_link
from drafter.attention import LayerMask

TINY = DrafterShape(64, 128, 4, 2, 16, 512, 128, 4, (LayerMask(16, causal=False),))


@pytest.mark.parametrize("name", ["h100-80gb", "h200"])
def test_presets_name_the_data_sheet_and_the_assumption(name):
    device = device_constants(name)
    assert "data sheet" in device.source
    assert "assumed" in device.source
    assert device.matmul_flops == 989.4e12
    assert 0 < device.attention_efficiency <= device.matmul_efficiency < 1
    assert device.memory_bandwidth < 0.81 * 4.8e12


def test_measured_device_survives_a_file(tmp_path):
    torch.set_num_threads(1)
    device = measure_device(TINY, rows=64, link=False, disk=tmp_path)
    assert device.matmul_efficiency == 1.0
    rates = (device.matmul_flops, device.attention_efficiency, device.memory_bandwidth, device.memory_bytes)
    assert all(rate > 0 for rate in rates)
    assert device.disk_read > 1e6
    assert "link not measured" in device.source
    device.save(tmp_path / "here" / "device.json")
    assert device_constants(str(tmp_path / "here" / "device.json")) == device


@pytest.mark.ranks
def test_link_of_two_processes_is_measured():
    bandwidth, latency = measure_link("cpu", size=1 << 20)
    assert 1e6 < bandwidth < 1e12
    assert 0 < latency < 1


def test_a_memory_budget_replaces_the_devices_own():
    assert PRESETS["h200"].with_memory(1e9) == dataclasses.replace(PRESETS["h200"], memory_bytes=1e9)


@pytest.mark.parametrize("content", ["not json", "[]", '{"name": "x"}'])
def test_a_wrong_file_is_refused_with_its_keys(tmp_path, content):
    path = tmp_path / "device.json"
    path.write_text(content)
    with pytest.raises(DeviceError, match="matmul_flops"):
        DeviceConstants.load(path)


def test_an_unknown_name_lists_the_presets():
    with pytest.raises(DeviceError, match="h100-80gb"):
        device_constants("a100")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(DeviceError, match="--device cpu"):
        measure_device(TINY, device="cuda")
