"""The attention backend of a run: as asked, the only one that can run, or the one measured to be faster."""

from __future__ import annotations

import torch

from csbp import flash
from csbp.backends import BackendName, choose_backend
from csbp.race import race, share_of_a_rank
from csbp.topology import Grid
from drafter.config import DrafterConfig
from drafter.precision import compute_dtype
from pipelines.corpus import Corpus
from pipelines.grid import largest_micro_step
from pipelines.plan import drafter_shape
from pipelines.ranks import from_first_rank
from pipelines.runfile import RunConfig


def backend_of(
    config: RunConfig, corpus: Corpus, drafter: DrafterConfig, grid: Grid, device: torch.device
) -> tuple[BackendName, str]:
    """The backend's name, the same on every rank, and why it was taken; no reason if it was asked for.

    On a GPU, `auto` lets `triton` and `flash` compute the attention of the run's largest micro-step, on the
    first rank. With `parallel.deterministic` a clock decides nothing.
    """
    asked, dtype = config.parallel.attention_backend, compute_dtype(config.precision, device)
    name, reason = choose_backend(asked, device, dtype)
    if asked != "auto" or name != "triton" or config.parallel.deterministic:
        return name, reason
    try:
        flash.check(device.type, dtype, drafter.head_dim)
    except ValueError as error:
        return name, str(error)
    seconds: dict[BackendName, float] = {}
    if grid.rank == 0:
        work = largest_micro_step(config, corpus.longest, corpus.most_documents, drafter.num_drafts)
        rivals: tuple[BackendName, ...] = ("triton", "flash")
        seconds = race(
            rivals, drafter_shape(drafter), share_of_a_rank(work, grid.context_ranks), dtype, device
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the step needs is not what was measured
    seconds = from_first_rank(seconds)
    text = ", ".join(f"{rival} {1e3 * spent:.2f} ms" for rival, spent in seconds.items())
    return min(seconds, key=seconds.__getitem__), f"attention of a micro-step takes {text}"
