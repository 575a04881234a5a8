"""How the ranks of a run are arranged: as asked, or by the planner."""

from __future__ import annotations

import torch
import torch.distributed as dist

from csbp.cost import Workload
from csbp.footprint import StepSettings
from csbp.topology import Grid
from drafter.config import DrafterConfig
from pipelines.corpus import Corpus
from pipelines.plan import auto_context_ranks, drafter_shape
from pipelines.ranks import TIMEOUT
from pipelines.runfile import RunConfig


def make_grid(
    config: RunConfig, corpus: Corpus, drafter: DrafterConfig, head_is_tied: bool, device: torch.device
) -> Grid:
    """Replicas and context ranks of the world that has been joined.

    Raises:
        TopologyError: `parallel.context_ranks` does not divide the number of ranks.
        PlanError: it is `auto` and no number of context ranks fits in memory.
    """
    context_ranks = config.parallel.context_ranks
    if context_ranks == "auto":
        chosen = 0
        if dist.get_rank() == 0:  # free memory is not the same on every rank; the choice has to be
            chosen = _auto_context_ranks(config, corpus, drafter, head_is_tied)
        shared = torch.tensor(chosen, device=device)
        dist.broadcast(shared, 0)
        context_ranks = int(shared)
    return Grid.from_environment(context_ranks, timeout=TIMEOUT)


def _auto_context_ranks(config: RunConfig, corpus: Corpus, drafter: DrafterConfig, head_is_tied: bool) -> int:
    longest = corpus.longest
    work = Workload(
        context=longest,
        anchors=min(config.anchors.per_document * corpus.most_documents, longest - 1),
        sequences=config.batch.micro,
    )
    settings = StepSettings(
        compute_bytes=2 if config.precision == "bf16" else 4,
        feature_bytes=corpus.manifest.torch_dtype.itemsize,
        zero_stage=config.parallel.zero,
        vocabulary_sample=config.objective.vocabulary_sample,
        selector_fraction=config.objective.selector_blocks_fraction,
        accumulate=config.batch.samples > config.batch.micro,
    )
    shape = drafter_shape(drafter, tied_head=head_is_tied)
    return auto_context_ranks(shape, work, settings, dist.get_world_size())
