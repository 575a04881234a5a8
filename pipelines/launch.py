"""Training on several ranks of this machine, started here, or as one rank of a launcher outside.

Ranks are started through `torch.distributed.run`'s agent. When one dies, the agent ends the others and the
error names the rank; when this process is told to stop, every rank saves and ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from csbp.transport import WireError
from pipelines.ranks import LostPeerError
from pipelines.run_folder import check_same_run, complete
from pipelines.runfile import load_run
from pipelines.train_result import TrainResult
from pipelines.trainer import run_train

SHUTDOWN_SECONDS = 45  # for saving, or for noticing that a peer is gone; then ranks are killed
LOST_PEER = 75  # exit code of a rank that ended because another had
HOUSE = ("drafter", "csbp", "pipelines")


class LaunchError(RuntimeError):
    """A rank failed, or ranks cannot be started as asked."""


def train_on_ranks(
    run_file: Path | str, overrides: Mapping[str, Any], ranks: int | None = None
) -> TrainResult | None:
    """Run `run_train` on this rank, or on `ranks` ranks that are started here.

    Args:
        run_file: YAML file.
        overrides: values by dotted key that win over it.
        ranks: ranks to start on this machine; None under torchrun or deepspeed, and for one rank.

    Returns:
        The result of the run; None on ranks other than the first.

    Raises:
        RunFileError: before anything is started, if the run file cannot be used.
        LaunchError: a rank failed; the message names it, and how it ended.
    """
    config = complete(load_run(run_file, overrides))
    check_same_run(config)
    outside = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks is not None and outside > 1:
        raise LaunchError(
            f"a launcher has started {outside} ranks already (WORLD_SIZE), so none are started here; leave "
            "--nproc-per-node out"
        )
    if ranks is None or ranks == 1:
        result = run_train(config)
        return result if int(os.environ.get("RANK", "0")) == 0 else None
    with tempfile.TemporaryDirectory(prefix="longdraft-") as folder:
        result_file = Path(folder) / "result.json"
        _start(ranks, [str(run_file), json.dumps(overrides, default=str), str(result_file)], config.out)
        return TrainResult(**json.loads(result_file.read_text()))


def _start(ranks: int, arguments: list[str], run: Path) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"longdraft-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "pipelines.launch", *arguments)
    except ChildFailedError as error:
        raise LaunchError(_failure(error, run)) from None
    except SignalException as stopped:
        if not Path(arguments[-1]).is_file():
            raise LaunchError(f"stopped by {stopped.sigval.name} before all ranks had saved") from None


def _failure(error: Any, run: Path) -> str:
    rank, failure = min(error.failures.items(), key=lambda item: _blame(item[1]))
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return (
        f"rank {rank} (process {failure.pid}) {how}; the other ranks were ended. The same command goes on "
        f"from the newest checkpoint in {run}"
    )


def _blame(failure: Any) -> tuple[bool, float]:
    """Smallest for the rank that ended first by itself.

    Times are whole seconds, and the agent may see a dead rank and those that lost it at once.
    """
    return failure.exitcode in (LOST_PEER, -signal.SIGTERM), failure.timestamp


def _rank_main(run_file: str, overrides: str, result_file: str) -> int:
    """What a started rank does; errors of this project are one line, on the rank that has them."""
    rank = os.environ["RANK"]
    try:
        result = run_train(load_run(run_file, json.loads(overrides)))
    except Exception as error:
        if type(error).__module__.split(".")[0] not in HOUSE:
            raise
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - no log yet
        return LOST_PEER if isinstance(error, LostPeerError | WireError) else 1
    if rank == "0":
        Path(result_file).write_text(json.dumps(result.to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(_rank_main(*sys.argv[1:]))
