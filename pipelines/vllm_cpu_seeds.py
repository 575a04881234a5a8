"""vLLM 0.32 on a CPU ends when a request with a seed is prefilled in chunks; a repair for our own processes.

A chunk that is not the last one is sampled from too, and the token dropped. The runner then winds the
request's generator back by its offset, which only a GPU's generator has.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def repair() -> None:
    """Patch the runner of this process, once, on a CPU; do nothing elsewhere or where it has no such step."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = getattr(GPUModelRunner, "_bookkeeping_sync", None)
    if not current_platform.is_cpu() or original is None or hasattr(original, "repaired"):
        return

    def bookkeeping(runner: Any, *args: Any, **kwargs: Any) -> Any:
        dropped = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
        with wound_back(runner.input_batch.generators, [int(index) for index in dropped]):
            return original(runner, *args, **kwargs)

    bookkeeping.repaired = True  # type: ignore[attr-defined]
    GPUModelRunner._bookkeeping_sync = bookkeeping


@contextmanager
def wound_back(generators: MutableMapping[int, torch.Generator], dropped: list[int]) -> Iterator[None]:
    """Put the generators of dropped tokens back to their seeds, and hide them from the runner for a while.

    Before its first token a request has drawn nothing else. One that was preempted after some tokens begins
    its draws again, so its answer may differ from that of an engine with room for all.
    """
    hidden = {index: generators.pop(index) for index in dropped if index in generators}
    for generator in hidden.values():
        generator.manual_seed(generator.initial_seed())
    try:
        yield
    finally:
        generators.update(hidden)
