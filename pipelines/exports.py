"""Drafters ready to serve, from a running run or from any of its checkpoints; no GPU needed.

``<run>/export/best`` and ``<run>/export/last`` are links to folders named by their step, swapped in one
rename: a server that opens one of them never sees half of a drafter.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from drafter.checkpoint import check_export, save_drafter, used_special_tokens
from drafter.config import DrafterConfig
from drafter.frozen import FrozenHead
from drafter.model import Drafter
from pipelines.files import folder_made_atomically, sync_folder
from pipelines.runfile import load_run
from pipelines.target import resolve_target, target_config
from pipelines.training_state import CheckpointError, find_checkpoint, read_weights

LINKS = ("best", "last")


def export_checkpoint(run: Path | str, which: str, out: Path | str) -> Path:
    """Write the drafter of a checkpoint in the released layout.

    Args:
        run: folder of the run.
        which: ``last``, ``best`` (as validated) or the step of a checkpoint that is still there.
        out: folder to create.

    Raises:
        CheckpointError: no such checkpoint, or `out` exists.
        ExportError: the drafter cannot be served with its target.
    """
    run, out = Path(run), Path(out)
    if out.exists():
        raise CheckpointError(f"{out} exists; name a folder that does not")
    if which == "best":
        best = run / "export" / "best"
        if not best.is_dir():
            raise CheckpointError(f"{run} has no best drafter yet: no validation has run")
        with folder_made_atomically(out) as staged:
            shutil.copytree(best, staged, dirs_exist_ok=True)
        return out
    checkpoint = find_checkpoint(run, which)
    drafter = drafter_of(checkpoint)
    target = load_run(run / "run.yaml").drafter.target
    if target is None:
        raise CheckpointError(f"{run}/run.yaml names no target; add drafter.target to it")
    write_drafter(drafter, resolve_target(target), target, out)
    return out


def write_drafter(
    drafter: Drafter, target: Path, target_name: str, out: Path, head: FrozenHead | None = None
) -> None:
    """Check that the drafter can be served with its target, then write it; `out` appears in one rename."""
    check_servable(drafter, target)
    save_drafter(drafter, out, target_name=target_name, head=head or FrozenHead.from_checkpoint(target))


def check_servable(drafter: Drafter, target: Path) -> None:
    """Refuse a drafter that engines would serve wrongly; run before training, not only after it.

    Raises:
        ExportError: every problem found.
    """
    check_export(drafter, target_config(target), special_tokens=used_special_tokens(target))


def publish(run: Path, link: str, step: int, write: Any) -> Path:
    """Point ``<run>/export/<link>`` to the drafter of `step`.

    Args:
        run: folder of the run.
        link: ``best`` or ``last``.
        step: finished optimizer steps.
        write: called with the folder to create, unless the other link has made it already.
    """
    folder = run / "export"
    made = folder / f"step-{step:08d}"
    if not made.is_dir():
        write(made)
    staged = folder / f"{link}.part"
    staged.unlink(missing_ok=True)
    staged.symlink_to(made.name)
    staged.replace(folder / link)
    sync_folder(folder)
    kept = {(folder / name).readlink().name for name in LINKS if (folder / name).is_symlink()}
    for path in folder.glob("step-*"):
        if path.name not in kept:
            shutil.rmtree(path)
    return folder / link


def drafter_of(checkpoint: Path) -> Drafter:
    """The drafter of a training checkpoint, on the CPU."""
    drafter = Drafter(read_drafter_config(checkpoint))
    drafter.load_state_dict(read_weights(checkpoint))
    return drafter


def read_drafter_config(checkpoint: Path) -> DrafterConfig:
    """The drafter's configuration in a checkpoint folder, keys of training among them.

    Raises:
        CheckpointError: the file is missing or not of this version.
    """
    path = checkpoint / "drafter.json"
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        for name in ("target_layer_ids", "layer_types"):
            fields[name] = tuple(fields[name])
        return DrafterConfig(**fields)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not describe a drafter: {error}") from error
