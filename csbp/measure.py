"""Measures `DeviceConstants` on the machine at hand: products, attention, memory, link of two ranks, disk."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import scaled_dot_product_attention

from csbp.cost import DrafterShape
from csbp.device import DeviceConstants, DeviceError

_REPEATS = 5
_ASSUMED_LINK = (25e9, 10e-6)  # bytes a second, seconds: PCIe 4.0 x16 after protocol overhead


def measure_device(
    shape: DrafterShape,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    rows: int = 256,
    link: bool = True,
    disk: Path | None = None,
) -> DeviceConstants:
    """Time what a step of `shape` does on this device.

    Args:
        shape: the drafter whose product sizes are timed.
        device: `cpu` or `cuda`.
        dtype: of the products, the copies' elements are bytes.
        rows: rows of a product.
        link: time two processes that send to each other (gloo on CPU, NCCL between two CUDA devices).
        disk: a folder to read from; None leaves the disk out.

    Returns:
        Medians of five timings after one warm-up. Without `link` (or with fewer than two CUDA devices) the
        link is assumed to be PCIe 4.0 x16, which the source then says.

    Raises:
        DeviceError: `cuda` without a CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda' was asked for and torch sees no CUDA device; use --device cpu")
    matmul = _matmul_rate(shape, device, dtype, rows)
    attention = _attention_rate(shape, device, dtype)
    two_ranks = link and (device == "cpu" or torch.cuda.device_count() > 1)
    bandwidth, latency = measure_link(device) if two_ranks else _ASSUMED_LINK
    threads = f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name()
    return DeviceConstants(
        name=f"{device} ({threads})",
        source=f"measured, {dtype}, torch {torch.__version__}"
        + ("" if two_ranks else "; link not measured, assumed PCIe 4.0 x16: 25 GB/s"),
        matmul_flops=matmul,
        matmul_efficiency=1.0,
        attention_efficiency=attention / matmul,
        memory_bandwidth=_copy_rate(device),
        memory_bytes=_memory_bytes(device),
        link_bandwidth=bandwidth,
        link_latency=latency,
        disk_read=None if disk is None else _disk_rate(disk),
    )


def _seconds(call: Callable[[], object], device: str) -> float:
    def once() -> float:
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(_REPEATS))


def _matmul_rate(shape: DrafterShape, device: str, dtype: torch.dtype, rows: int) -> float:
    """Operations a second over the layer's five products, forward only, weighted by their work."""
    widths = [
        (shape.hidden, shape.query_width + 2 * shape.kv_width),
        (shape.query_width, shape.hidden),
        (shape.hidden, 2 * shape.intermediate),
        (shape.intermediate, shape.hidden),
    ]
    work = elapsed = 0.0
    for inner, outer in widths:
        x = torch.randn(rows, inner, device=device, dtype=dtype)
        weight = torch.randn(outer, inner, device=device, dtype=dtype)
        elapsed += _seconds(lambda x=x, weight=weight: x @ weight.t(), device)  # type: ignore[misc]
        work += 2 * rows * inner * outer
    return work / elapsed


def _attention_rate(shape: DrafterShape, device: str, dtype: torch.dtype) -> float:
    """Operations a second (7 products a pair) of one neighbourhood of blocks over 512 shared keys."""
    queries, keys = 16 * shape.block_size, 512
    q = torch.randn(1, shape.heads, queries, shape.head_size, device=device, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(1, shape.kv_heads, keys, shape.head_size, device=device, dtype=dtype, requires_grad=True)
        for _ in range(2)
    )

    def step() -> None:
        out = scaled_dot_product_attention(q, k, v, enable_gqa=shape.heads != shape.kv_heads)
        torch.autograd.grad(out.sum(), (q, k, v))

    return 14 * shape.query_width * queries * keys / _seconds(step, device)


def _copy_rate(device: str) -> float:
    """Bytes a second read and written by a copy of 128 MiB."""
    source = torch.zeros(1 << 27, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device)


def _memory_bytes(device: str) -> float:
    return float(torch.cuda.mem_get_info()[1] if device == "cuda" else psutil.virtual_memory().total)


def _disk_rate(folder: Path) -> float:
    """Bytes a second of a cold sequential read of 256 MiB: the pages are dropped from the cache first."""
    size = 1 << 28
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        file.seek(0)
        while file.read(1 << 24):
            pass
        return size / (time.perf_counter() - started)


def measure_link(device: str = "cpu", size: int = 1 << 24) -> tuple[float, float]:
    """Bandwidth (bytes a second, one direction) and latency (seconds) between two processes of this machine.

    Both send `size` bytes at once, as the hops of a ring do.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, result = Path(folder) / "store", Path(folder) / "result"
        mp.spawn(_ping, args=(device, str(store), str(result), size), nprocs=2)
        bandwidth, latency = (float(word) for word in result.read_text().split())
    return bandwidth, latency


def _ping(rank: int, device: str, store: str, result: str, size: int) -> None:
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)

    def exchange(count: int) -> float:
        sent = torch.zeros(count, dtype=torch.uint8, device=place)
        received = torch.empty_like(sent)

        def hop() -> None:
            pair = [
                dist.P2POp(dist.isend, sent, 1 - rank),
                dist.P2POp(dist.irecv, received, 1 - rank),
            ]
            for request in dist.batch_isend_irecv(pair):
                request.wait()

        return _seconds(hop, device)

    latency, elapsed = exchange(8), exchange(size)
    if rank == 0:
        transfer = elapsed - latency if elapsed > 2 * latency else elapsed  # a busy machine blurs the two
        Path(result).write_text(f"{size / transfer} {latency}")
    dist.destroy_process_group()
