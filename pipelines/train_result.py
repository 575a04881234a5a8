"""What a training call did, as a value, as result.json and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from pipelines.files import write_json_atomically

RESULT = "result.json"


@dataclass(frozen=True)
class TrainResult:
    """What a call of `run_train` did.

    Attributes:
        status: ``finished``; ``stopped`` by a signal or checkpoint.stop_at (the same call goes on); or
            ``already finished`` (nothing was done).
        out: folder of the run.
        step: optimizer steps done.
        total_steps: optimizer steps of the run; None where the clock decides.
        epochs: passes over the training samples.
        train: pooled figures of the last logged steps.
        validation: figures of the last validation.
        best_step: step of the best validation, -1 without any.
        best_accepted: its accepted drafts per block.
        seconds: of training, over all resumptions.
        slots_per_second: supervised slots of this call's steps over their seconds.
        feature_bytes_read: feature rows read from stores by all ranks in this call's steps.
        union_bytes: of the rows that the blocks of each replica could see, each row once a micro-batch.
        state_bytes_read: last hidden states read by all ranks in this call's steps.
        breakdown: share of the seconds of this call's steps spent on data, forward, backward, update, other.
        exports: link name to folder.
    """

    status: str
    out: str
    step: int
    total_steps: int | None
    epochs: float
    train: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    best_step: int = -1
    best_accepted: float = 0.0
    seconds: float = 0.0
    slots_per_second: float = 0.0
    feature_bytes_read: int = 0
    union_bytes: int = 0
    state_bytes_read: int = 0
    breakdown: dict[str, float] = field(default_factory=dict)
    exports: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self) -> None:
        write_json_atomically(Path(self.out) / RESULT, self.to_dict())


def read_result(run: Path) -> TrainResult | None:
    """The result of a run that finished; None if it has not."""
    path = run / RESULT
    return TrainResult(**json.loads(path.read_text())) if path.is_file() else None


def render_train(result: TrainResult) -> Table:
    """A training result as a table for the terminal."""
    table = Table(title=f"training {result.status}", show_header=False)
    planned = f" of {result.total_steps}" if result.total_steps else ""
    table.add_row("steps", f"{result.step}{planned} ({result.epochs:.2f} epochs, {result.seconds:.0f} s)")
    if result.slots_per_second:
        table.add_row("supervised slots/s", f"{result.slots_per_second:,.0f}")
    if result.union_bytes:
        share = result.feature_bytes_read / result.union_bytes
        read = f"{result.feature_bytes_read / 2**20:,.1f} MiB, {share:.3f} x the union of windows"
        table.add_row("features read", read)
    if result.breakdown:
        parts = ", ".join(f"{name} {100 * share:.0f} %" for name, share in result.breakdown.items())
        table.add_row("time", parts)
    if result.train:
        table.add_row("training loss", f"{result.train['loss']:.4f}")
    if result.validation:
        length = result.validation["acceptance_length"]
        table.add_row("acceptance length, held out", f"{length:.3f} (1 + accepted drafts per block)")
        table.add_row("best", f"{1 + result.best_accepted:.3f} at step {result.best_step}")
    for name, path in result.exports.items():
        table.add_row(f"export {name}", path)
    return table
