"""How the ranks of a run are arranged and what their work costs: as asked, or by the planner."""

from __future__ import annotations

import torch
import torch.distributed as dist

from csbp.cost import Workload
from csbp.footprint import StepSettings
from csbp.ownership import StepCost
from csbp.planner import step_cost
from csbp.topology import Grid
from drafter.config import DrafterConfig
from drafter.precision import compute_dtype
from pipelines.corpus import Corpus
from pipelines.plan import auto_context_ranks, drafter_shape, this_device
from pipelines.ranks import TIMEOUT, from_first_rank, ranks_of_this_machine
from pipelines.runfile import RunConfig


def make_grid(
    config: RunConfig, corpus: Corpus, drafter: DrafterConfig, head_is_tied: bool, device: torch.device
) -> Grid:
    """Replicas and context ranks of the world that has been joined.

    Raises:
        TopologyError: `parallel.context_ranks` does not divide the number of ranks.
        PlanError: it is `auto` and no number of context ranks fits in memory.
    """
    asked = config.parallel.context_ranks
    if asked != "auto":
        return Grid.from_environment(asked, timeout=TIMEOUT)
    chosen = 0
    if dist.get_rank() == 0:  # free memory is not the same on every rank; the choice has to be
        chosen = _auto_context_ranks(config, corpus, drafter, head_is_tied, device)
    return Grid.from_environment(from_first_rank(chosen), timeout=TIMEOUT)


def make_cost(config: RunConfig, drafter: DrafterConfig, device: torch.device) -> StepCost:
    """What a step's parts cost on this device, as `plan` prices them; rank 0's, so that ranks deal alike."""
    rates = this_device(ranks_of_this_machine(), config.parallel.device)
    return from_first_rank(
        step_cost(drafter_shape(drafter), rates, compute_dtype(config.precision, device).itemsize)
    )


def step_settings(config: RunConfig, feature_bytes: int, device: torch.device) -> StepSettings:
    """The run's step, as far as memory and time depend on it.

    Args:
        config: of the run.
        feature_bytes: of a stored feature element.
        device: where a step is computed. A GPU's prefetched features wait in the host's memory, but for the
            micro-batch that `data.upload_ahead` copies.
    """
    waiting = int(config.data.upload_ahead) if device.type == "cuda" else config.data.prefetch
    return StepSettings(
        compute_bytes=compute_dtype(config.precision, device).itemsize,
        feature_bytes=feature_bytes,
        zero_stage=config.parallel.zero,
        vocabulary_sample=config.objective.vocabulary_sample,
        selector_fraction=config.objective.selector_blocks_fraction,
        prefetch=waiting,
        accumulate=config.batch.size > config.batch.limit(replicas=1),
        tensor_cores=device.type == "cuda",
        retain=config.parallel.retain,
        recompute_context=config.parallel.recompute in ("context", "all"),
        recompute_blocks=config.parallel.recompute in ("blocks", "all"),
        placement=config.parallel.placement,
        transports=config.parallel.transports,
    )


def largest_micro_step(config: RunConfig, longest: int, documents: int, drafts: int) -> Workload:
    """What one replica takes at once, at most: as many of the longest samples as its share of a step allows.

    Args:
        config: of the run.
        longest: tokens of the longest sample.
        documents: that a sample packs, at most.
        drafts: slots of a block.
    """
    rule = config.anchors
    anchors = min(rule.per_document * documents, longest - 1)
    limit = config.batch.limit(replicas=1)
    sizes = {"samples": 1, "tokens": longest, "slots": anchors * drafts}
    local = rule.rule == "locality"
    return Workload(
        context=longest,
        anchors=anchors,
        sequences=max(1, limit // sizes[config.batch.unit]),
        anchor_rule="locality" if local else "uniform",
        neighbourhoods=min(rule.neighbourhoods * documents, anchors) if local else 1,
    )


def _auto_context_ranks(
    config: RunConfig, corpus: Corpus, drafter: DrafterConfig, head_is_tied: bool, device: torch.device
) -> int:
    work = largest_micro_step(config, corpus.longest, corpus.most_documents, drafter.num_drafts)
    settings = step_settings(config, corpus.manifest.torch_dtype.itemsize, device)
    rates = this_device(ranks_of_this_machine(), config.parallel.device)
    shape = drafter_shape(drafter, tied_head=head_is_tied)
    return auto_context_ranks(shape, work, settings, dist.get_world_size(), rates)
