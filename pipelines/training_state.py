"""Checkpoints of a training run: complete, atomic, the same for every number of ranks and ZeRO stage.

A checkpoint is a folder ``checkpoints/step-00001200`` with

    weights.safetensors   the parameters in float32, as they are trained
    drafter.json          the drafter's configuration
    moments.safetensors   AdamW's moments in float32, by parameter name, unsharded
    state.json            step, sampler position, epoch, elapsed seconds, best validation, keys of the run

There is no random-generator state: anchors, data order and sampled vocabularies are functions of (seed,
step or epoch, sample), so the step is all that has to be kept. The folder gets its name in one rename after
everything is on disk; what a killed save leaves behind ends in ``.part`` and is never read.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.files import folder_made_atomically, write_text_atomically

_NAME = re.compile(r"step-(\d{8,})")


class CheckpointConfig(BaseModel):
    """When the state of a run is saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(
        default=500, ge=1, description="Optimizer steps between checkpoints; the last step always saves."
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept on disk.")
    stop_at: int | None = Field(
        default=None,
        ge=1,
        description="Save and stop after this step; a later call with another value goes on.",
    )


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or belongs to another run."""


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands.

    Attributes:
        step: finished optimizer steps.
        samples: training samples consumed (the sampler's position, whatever the number of ranks).
        epoch: passes over the training samples that have ended.
        elapsed: seconds of training, over all resumptions.
        best_step: step of the best validation so far; -1 before the first validation.
        best_accepted: its accepted drafts per block.
        seed: of the run; with `step` it names every random draw.
        data: fingerprint of the training data.
    """

    step: int
    samples: int
    epoch: int
    elapsed: float
    best_step: int
    best_accepted: float
    seed: int
    data: str

    @classmethod
    def fresh(cls, seed: int, data: str) -> TrainingState:
        """Before the first step."""
        return cls(0, 0, 0, 0.0, -1, -1.0, seed, data)


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[int]:
    """Steps of the complete checkpoints of a run, ascending."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def find_checkpoint(run: Path, which: str = "last") -> Path:
    """Folder of the checkpoint named by ``last`` or by a step number.

    Raises:
        CheckpointError: there is none.
    """
    steps = list_checkpoints(run)
    wanted = steps[-1:] if which == "last" else [step for step in steps if str(step) == which]
    if not wanted:
        raise CheckpointError(
            f"no checkpoint {which!r} in {run}/checkpoints; found {steps or 'none'}. Name one, or 'last'"
        )
    return checkpoint_path(run, wanted[0])


def read_state(path: Path) -> TrainingState:
    """state.json of a checkpoint.

    Raises:
        CheckpointError: it is missing or not what this version writes.
    """
    try:
        return TrainingState(**json.loads((path / "state.json").read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a usable checkpoint ({error}); remove it to use an older one"
        ) from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Parameters of a checkpoint, float32, by name."""
    return load_file(path / "weights.safetensors")


def read_moments(path: Path) -> dict[str, Tensor]:
    """AdamW moments of a checkpoint, float32, by ``exp_avg.<parameter>`` and ``exp_avg_sq.<parameter>``."""
    return load_file(path / "moments.safetensors")


class CheckpointWriter:
    """Writes checkpoints of one run and removes old ones."""

    def __init__(self, run: Path, config: CheckpointConfig) -> None:
        self._run = run
        self._config = config

    def save(
        self,
        state: TrainingState,
        drafter: dict[str, Any],
        weights: dict[str, Tensor],
        moments: dict[str, Tensor],
    ) -> Path:
        """Write one checkpoint; a checkpoint of the same step that exists is kept as it is.

        Args:
            state: where the run stands.
            drafter: configuration of the drafter.
            weights: its parameters by name.
            moments: of `Engine.moments`.
        """
        path = checkpoint_path(self._run, state.step)
        if not path.exists():
            with folder_made_atomically(path) as staged:
                (staged / "drafter.json").write_text(json.dumps(drafter, indent=2) + "\n")
                save_file(weights, staged / "weights.safetensors")
                save_file(moments, staged / "moments.safetensors")
                (staged / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
        write_text_atomically(path.parent / "latest", path.name + "\n")
        self._remove_old()
        return path

    def _remove_old(self) -> None:
        for step in list_checkpoints(self._run)[: -self._config.keep]:
            shutil.rmtree(checkpoint_path(self._run, step))
