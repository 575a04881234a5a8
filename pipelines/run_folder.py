"""What lies in the folder of a training run, and whether a call may go on with it.

run.yaml        the resolved run file
facts.json      versions, device, data fingerprint, sizes
metrics.jsonl   figures while it trained
tensorboard/    the same as events
checkpoints/    `pipelines.training_state`
export/         drafters ready to serve: best, last
result.json     written when the run has finished
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from pathlib import Path
from typing import Any

import torch

from csbp.topology import Grid
from drafter.model import Drafter
from pipelines.corpus import Corpus
from pipelines.files import write_json_atomically
from pipelines.runfile import RunConfig, RunFileError, differences, load_run, resolve_paths, save_run
from pipelines.store_schema import Manifest
from pipelines.training_state import (
    CheckpointError,
    TrainingState,
    find_checkpoint,
    list_checkpoints,
    read_state,
)

RUN_FILE = "run.yaml"
PACKAGES = ("longdraft", "torch", "deepspeed", "transformers", "safetensors", "numpy")


def complete(config: RunConfig) -> RunConfig:
    """The run with absolute paths and its stores' target, so that its file works from any folder."""
    config = resolve_paths(config)
    target = config.drafter.target or Manifest.load(config.data.stores[0]).target
    return resolve_paths(
        config.model_copy(update={"drafter": config.drafter.model_copy(update={"target": target})})
    )


def check_same_run(config: RunConfig) -> None:
    """Let a call go on only with the run that it describes.

    Raises:
        RunFileError: the folder holds a run whose settings differ, or checkpoints without a run file.
    """
    saved = config.out / RUN_FILE
    if not saved.is_file():
        if list_checkpoints(config.out):
            raise RunFileError(f"{config.out} holds checkpoints but no {RUN_FILE}; choose another out")
        return
    changed = differences(load_run(saved), config)
    if changed:
        raise RunFileError(
            f"{config.out} holds a run with other settings:\n  " + "\n  ".join(changed) + "\n"
            "Choose another out to start a new run, or the old settings to go on with this one"
        )


def starting_point(config: RunConfig, corpus: Corpus) -> tuple[TrainingState, Path | None]:
    """The newest complete checkpoint of the run and its state; a fresh state and None for a new run.

    Raises:
        CheckpointError: the newest checkpoint cannot be read or was made from other data.
    """
    steps = list_checkpoints(config.out)
    if not steps:
        return TrainingState.fresh(config.seed, corpus.fingerprint), None
    checkpoint = find_checkpoint(config.out)
    state = read_state(checkpoint)
    if state.data != corpus.fingerprint:
        raise CheckpointError(
            f"{checkpoint} was trained on data with fingerprint {state.data[:12]}, data.stores hold "
            f"{corpus.fingerprint[:12]}; bring the data back, or choose another out to start a new run"
        )
    return state, checkpoint


def open_folder(
    config: RunConfig, corpus: Corpus, drafter: Drafter, grid: Grid, device: torch.device
) -> None:
    """Write the run file and the facts, and remove what killed saves left; called by one rank."""
    config.out.mkdir(parents=True, exist_ok=True)
    for leftover in [*config.out.glob("checkpoints/*.part"), *config.out.glob("export/*.part")]:
        shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
    save_run(config, config.out / RUN_FILE)
    write_json_atomically(config.out / "facts.json", _facts(corpus, drafter, grid, device))


def _facts(corpus: Corpus, drafter: Drafter, grid: Grid, device: torch.device) -> dict[str, Any]:
    return {
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "ranks": grid.world,
        "context_ranks": grid.context_ranks,
        "data": {
            "fingerprint": corpus.fingerprint,
            "target": corpus.manifest.target,
            "target_fingerprint": corpus.manifest.target_fingerprint,
            "training_samples": len(corpus.train),
            "held_out_samples": len(corpus.held_out),
            "samples_without_anchors": corpus.unusable,
        },
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
