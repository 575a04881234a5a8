"""PeakTracker against allocations whose sizes are known."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from csbp.memory import PeakTracker

KIB = 256  # float32 elements


def test_counts_allocations_and_frees():
    with PeakTracker() as tracker:
        a = torch.zeros(4 * KIB)
        b = torch.ones(2 * KIB)
        assert tracker.live_bytes == 6 * 1024
        del a
        assert tracker.live_bytes == 2 * 1024
        c = b + 1
        assert tracker.live_bytes == 4 * 1024
        del b, c
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 6 * 1024


def test_views_and_in_place_operators_count_once():
    with PeakTracker() as tracker:
        a = torch.zeros(KIB, 4)
        b = a.t()[:2].unsqueeze(0)
        a.add_(1)
        torch.add(a, 1, out=a)
        assert tracker.live_bytes == 4 * 1024
        del a
        assert tracker.live_bytes == 4 * 1024  # the view keeps the storage
        del b
        assert tracker.live_bytes == 0


def test_tensors_made_before_count_only_when_tracked():
    before = torch.zeros(8 * KIB)
    with PeakTracker() as tracker:
        view = before[:10]
        assert tracker.live_bytes == 0
        tracker.track([before, view])
        assert tracker.live_bytes == 8 * 1024
        del before, view
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 8 * 1024


def test_sees_tensors_saved_for_backward_and_gradients():
    """x -> exp -> exp saves two results; the backward pass of n elements needs one gradient beside them."""
    x = torch.zeros(KIB, requires_grad=True)
    with PeakTracker() as tracker:
        y = x.exp().exp()
        assert tracker.live_bytes == 2 * 1024
        loss = y.sum()
        assert tracker.live_bytes == 2 * 1024 + 4
        del y
        loss.backward()
        assert tracker.live_bytes == 1024 + 4  # the gradient and the loss; the graph is gone
        assert tracker.peak_bytes > 3 * 1024
    assert x.grad is not None


def test_sees_allocations_inside_the_backward_of_a_custom_function():
    class Scratch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            scratch = torch.empty(64 * KIB)
            return grad + scratch.fill_(0)[: grad.numel()]

    x = torch.zeros(KIB, requires_grad=True)
    with PeakTracker() as tracker:
        loss = Scratch.apply(x).sum()
        assert tracker.peak_bytes < 4 * 1024
        loss.backward()
    assert 64 * 1024 < tracker.peak_bytes < 70 * 1024


def test_checkpointing_lowers_the_peak():
    """Recomputation keeps one segment alive instead of all of them."""
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(1024, 64, requires_grad=True)

    def segment(h):
        for _ in range(8):
            h = torch.tanh(h @ weight)
        return h

    def peak(recompute):
        with PeakTracker() as tracker:
            h = x
            for _ in range(4):
                h = checkpoint(segment, h, use_reentrant=False) if recompute else segment(h)
            h.sum().backward()
        return tracker.peak_bytes

    assert peak(recompute=True) < 0.6 * peak(recompute=False)


def test_torch_tensor_and_resized_storages_are_followed():
    with PeakTracker() as tracker:
        a = torch.tensor([0.0] * KIB)
        assert tracker.live_bytes == 1024
        a.resize_(2 * KIB)
        assert tracker.live_bytes == 2048


def test_two_steps_do_not_accumulate():
    layer = torch.nn.Linear(64, 64)
    peaks = []
    for _ in range(3):
        layer.zero_grad()
        with PeakTracker() as tracker:
            layer(torch.ones(128, 64)).square().mean().backward()
        peaks.append(tracker.peak_bytes)
        gc.collect()
    assert len(set(peaks)) == 1


def test_overhead_is_small_beside_a_real_operator():
    """Tens of microseconds an operator: a 256-wide product of 2,048 rows takes milliseconds."""
    x = torch.zeros(8)
    count = 2000
    with PeakTracker():
        started = time.perf_counter()
        for _ in range(count):
            x + 1
        elapsed = time.perf_counter() - started
    assert elapsed / count < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_reads_the_allocator():
    with PeakTracker("cuda") as tracker:
        a = torch.zeros(1 << 20, device="cuda")
        assert tracker.live_bytes >= a.numel() * 4
    assert tracker.peak_bytes >= 1 << 22
