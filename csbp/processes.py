"""Real processes that form a gloo world on this machine, for checks and benchmarks."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RanksError(RuntimeError):
    """A spawned rank failed, or did not end in time."""


def run_ranks(
    worker: Callable[..., Any], ranks: int, *arguments: object, timeout: float = 600.0, threads: int = 1
) -> list[Any]:
    """Call `worker(*arguments)` in `ranks` new processes that share a gloo process group.

    Args:
        worker: a module-level function; its result must be something `torch.save` can write.
        ranks: processes to start.
        arguments: passed to every rank, pickled.
        timeout: seconds after which all ranks are ended. A rank waits at most this long for a peer.
        threads: compute threads of each rank.

    Returns:
        The ranks' results, in rank order.

    Raises:
        RanksError: a rank raised (its traceback is in the message), died, or the time is over.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="longdraft-ranks-") as folder:
        processes = [
            context.Process(
                target=_rank, args=(worker, arguments, rank, ranks, folder, timeout, threads), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            _watch(processes, Path(folder), time.monotonic() + timeout)
            return [torch.load(_result(folder, rank), weights_only=False) for rank in range(ranks)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _watch(processes: list[Any], folder: Path, deadline: float) -> None:
    """Return when all have ended well; raise for the first that has not."""
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            break
        if time.monotonic() > deadline:
            alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
            raise RanksError(f"expected every rank to end in time, but ranks {alive} are still running")
        time.sleep(0.02)
    failed = [(rank, process.exitcode) for rank, process in enumerate(processes) if process.exitcode]
    if failed:
        time.sleep(0.2)  # let the others write what they saw
        reports = [report.read_text() for report in sorted(folder.glob("failure-*"))]
        raise RanksError(f"ranks ended badly (rank, exit code): {failed}\n" + "\n".join(reports))


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result-{rank}.pt"


def _rank(
    worker: Callable[..., Any],
    arguments: tuple[object, ...],
    rank: int,
    ranks: int,
    folder: str,
    timeout: float,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        result = worker(*arguments)
        torch.save(result, _result(folder, rank))
        dist.barrier()
    except BaseException:
        (Path(folder) / f"failure-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
