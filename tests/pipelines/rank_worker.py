"""Several runs in one set of gloo ranks, since starting ranks takes longer than tiny runs do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from csbp.processes import run_ranks
from pipelines.runfile import RunConfig, load_run, save_run
from pipelines.trainer import run_train


def train_all(configs: Sequence[RunConfig], ranks: int) -> list[dict | str]:
    """Train every run on the same `ranks` ranks.

    Returns:
        Per run the result of rank 0 as a dict, or the error as text, which every rank has to raise.
    """
    paths = []
    for number, config in enumerate(configs):
        paths.append(config.out.parent / f"{config.out.name}-{number}.yaml")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        save_run(config, paths[-1])
    outcomes = run_ranks(_worker, ranks, [[str(path)] * ranks for path in paths])
    return [_one(list(each)) for each in zip(*outcomes, strict=True)]


def train_apart(configs: Sequence[RunConfig], folder: Path) -> list[dict | str]:
    """Start one run with another run file on every rank; the outcome of each rank."""
    paths = [str(folder / f"rank-{rank}.yaml") for rank in range(len(configs))]
    for config, path in zip(configs, paths, strict=True):
        save_run(config, Path(path))
    return [outcome for (outcome,) in run_ranks(_worker, len(configs), [paths])]


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
