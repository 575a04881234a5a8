"""Several runs in one set of gloo ranks, since starting ranks takes longer than tiny runs do."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from csbp.processes import run_ranks
from pipelines.runfile import RunConfig, load_run, save_run
from pipelines.trainer import run_train


def train_all(runs: Sequence[RunConfig | Sequence[RunConfig]], ranks: int) -> list[dict | str]:
    """Train every run on the same `ranks` ranks; several configurations for one run go to a rank each.

    Returns:
        Per run the result of rank 0 as a dict, or the error as text, which every rank has to raise.
    """
    files = []
    for number, run in enumerate(runs):
        configs = [run] * ranks if isinstance(run, RunConfig) else list(run)
        paths = [config.out.parent / f"run-{number}-{rank}.yaml" for rank, config in enumerate(configs)]
        for config, path in zip(configs, paths, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_run(config, path)
        files.append([str(path) for path in paths])
    outcomes = run_ranks(_worker, ranks, files)
    return [_one(list(each)) for each in zip(*outcomes, strict=True)]


def _one(outcomes: list[dict | str]) -> dict | str:
    kinds = {type(outcome) for outcome in outcomes}
    assert len(kinds) == 1, outcomes
    return outcomes[0]


def _worker(runs: list[list[str]]) -> list[dict | str]:
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    outcomes: list[dict | str] = []
    for paths in runs:
        try:
            outcomes.append(run_train(load_run(paths[rank])).to_dict())
        except (ValueError, RuntimeError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes
