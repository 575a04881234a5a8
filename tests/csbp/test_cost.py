"""The closed forms against published counts, brute force and simulation."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from csbp.cost import (
    DrafterShape,
    ShapeError,
    Workload,
    gathering_bytes,
    reduction_bytes,
    step_flops,
    union_rows,
)
from drafter.attention import LayerMask

SLIDING = LayerMask(2048, causal=False)
QWEN = DrafterShape(
    hidden=5120,
    intermediate=17408,
    heads=32,
    kv_heads=8,
    head_size=128,
    vocabulary=248320,
    feature_width=5 * 5120,
    block_size=8,
    masks=(SLIDING,) * 5,
    conv_kernel=2,
    conv_group=16,
    selector_rank=256,
    selector_top_k=16,
)


def test_parameter_count_of_the_released_drafter():
    """z-lab/Qwen3.8-27B-DFlash2 holds 1,924,404,480 elements."""
    assert QWEN.parameter_count == 1_924_404_480


def test_convolution_count_of_the_published_ablation():
    """The authors' figure for width 2560 and five layers: 16.5 million added parameters."""
    shape = dataclasses.replace(QWEN, hidden=2560)
    assert shape.parameters()["convolution"] == pytest.approx(16.5e6, rel=2e-3)


def test_version_1_has_no_convolution_and_no_selector():
    shape = dataclasses.replace(QWEN, conv_kernel=0, selector_rank=0)
    parts = shape.parameters()
    assert parts["convolution"] == parts["selector"] == 0
    assert QWEN.parameter_count - shape.parameter_count == 65_740_800 + 128_450_560


def _simulated_union(work: Workload, window: int, block: int, draws: int) -> float:
    generator = torch.Generator().manual_seed(0)
    total = 0
    for _ in range(draws):
        if work.anchor_rule == "uniform":
            anchors = torch.randperm(work.context - 1, generator=generator)[: work.anchors] + 1
        else:
            first = window - 1
            anchors = first + block * torch.arange(work.anchors)
        seen = torch.zeros(work.context, dtype=torch.bool)
        for a in anchors.tolist():
            seen[max(0, a - window + 1) : a] = True
        total += int(seen.sum())
    return total / draws


@pytest.mark.parametrize(
    ("length", "anchors", "window"), [(200, 5, 16), (500, 60, 32), (64, 8, 100), (300, 1, 8)]
)
def test_union_of_uniform_windows_is_the_expected_value(length, anchors, window):
    work = Workload(length, anchors)
    simulated = _simulated_union(work, window, 8, draws=600)
    assert union_rows(work, window, 8) == pytest.approx(simulated, rel=0.03)  # 600 draws: about 1 % noise


@pytest.mark.parametrize(("anchors", "block", "window"), [(10, 8, 64), (3, 40, 16), (1, 8, 16)])
def test_union_of_a_neighbourhood_is_exact(anchors, block, window):
    work = Workload(1000, anchors, anchor_rule="locality")
    assert union_rows(work, window, block) == _simulated_union(work, window, block, draws=1)


def test_union_at_a_million_tokens():
    """A neighbourhood of 2,048 blocks needs 18.4 thousand rows, 1.8 %; uniform anchors need 98 %."""
    local = union_rows(Workload(1 << 20, 2048, anchor_rule="locality"), 2048, 8)
    assert local == 2047 * 8 + 2047
    assert union_rows(Workload(1 << 20, 2048), 2048, 8) / (1 << 20) == pytest.approx(0.981, abs=2e-3)


def test_union_grows_with_anchors_and_window_and_never_passes_the_axis():
    rows = [union_rows(Workload(4096, a), 64, 8) for a in (1, 4, 16, 64, 512, 4095)]
    assert rows == sorted(rows)
    assert rows[-1] == pytest.approx(4095)  # the last row is seen by no anchor
    rows = [union_rows(Workload(4096, 16), w, 8) for w in (2, 8, 64, 512, 8192)]
    assert rows == sorted(rows)
    assert union_rows(Workload(4096, 16, sequences=3), None, 8) == 3 * 4096


def test_flops_follow_the_published_split():
    """About 260 TFLOP a replica-step at 64K, 2,048 anchors: layers 164, head 73, context 15, attention 8."""
    rows = union_rows(Workload(65536, 2048, anchor_rule="locality"), 2048, 8)
    pairs = 2048 * 8 * (2047 + 8)
    parts = step_flops(QWEN, blocks=2048, fused_rows=rows, projected_rows=(rows,) * 5, pairs=(pairs,) * 5)
    layers = sum(parts[name].total for name in ("block_projections", "mlp", "convolution"))
    assert layers / 1e12 == pytest.approx(164, rel=0.02)
    assert parts["vocabulary"].total / 1e12 == pytest.approx(73, rel=0.02)
    assert (parts["fuse"].total + parts["context_kv"].total) / 1e12 == pytest.approx(15, rel=0.3)
    assert parts["attention"].total / 1e12 == pytest.approx(8, rel=0.3)


def test_a_ring_reduction_sends_nothing_alone_and_two_buffers_at_most():
    assert reduction_bytes(100, 1) == 0
    assert reduction_bytes(100, 2) == 400
    assert reduction_bytes(100, 64) < 800


def test_weights_are_gathered_with_half_of_the_bytes_of_a_sum():
    assert gathering_bytes(100, 1) == 0
    assert gathering_bytes(100, 2) == 200


@pytest.mark.parametrize("numbers", [(1, 1, 1), (8, 0, 1), (8, 8, 1), (8, 1, 0)])
def test_impossible_steps_are_refused(numbers):
    with pytest.raises(ShapeError):
        Workload(*numbers)
