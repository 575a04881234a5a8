"""The claim of csbp, checked: every way to share a step gives the loss and the gradients of one rank.

Scenarios times masks times plans, each a whole step of a drafter in real processes, compared with one rank
that holds everything and attends under an explicit mask in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from csbp.layout import BlockLayout
from csbp.plan import plan_step
from csbp.topology import Grid
from csbp.transport import Wire
from drafter.attention import BlockAttention, LayerMask

BLOCK = 4
WINDOW = 6
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FULL = LayerMask(None, causal=False)

MASKS: dict[str, tuple[LayerMask, ...]] = {
    "full": (FULL, FULL),
    "sliding, bidirectional": (LayerMask(WINDOW, causal=False),) * 2,
    "sliding, causal": (LayerMask(WINDOW, causal=True),) * 2,
    "mixed": (LayerMask(WINDOW, causal=True), FULL, LayerMask(WINDOW, causal=True)),
    "window over several shards": (LayerMask(33, causal=False),) * 2,
    "window shorter than a block": (LayerMask(3, causal=False), FULL),
    "window longer than the context": (LayerMask(500, causal=True),) * 2,
}

PLANS: dict[str, dict[str, Any]] = {
    "auto": {},
    "auto, rows made again": {"again": True},
    "dealt, local": {"placement": "dealt", "transport": "local"},
    "dealt, gather": {"placement": "dealt", "transport": "gather"},
    "dealt, ring": {"placement": "dealt", "transport": "ring"},
    "dealt, ring that sends again": {"placement": "dealt", "transport": "ring", "retain": 1},
    "dealt, query ring": {"placement": "dealt", "transport": "query-ring"},
    "contiguous, local": {"placement": "contiguous", "transport": "local"},
    "contiguous, halo": {"placement": "contiguous", "transport": "halo"},
    "contiguous, ring": {"placement": "contiguous", "transport": "ring"},
    "contiguous, query ring": {"placement": "contiguous", "transport": "query-ring"},
    "cp": {"mode": "cp"},
    "replicated": {"mode": "replicated"},
    "query-sharded": {"mode": "query-sharded"},
}

REPLICA_PLANS = ("auto", "replicated")


class ExactStep(Protocol):
    """A drafter with the features and labels of one layout; the same numbers on every rank.

    Attributes:
        parameters: trained tensors by name.
        slots: supervised slots of all blocks.
    """

    parameters: dict[str, Tensor]
    slots: int

    def loss_sum(
        self,
        attention: BlockAttention,
        rows: Sequence[tuple[int, int]],
        positions: Tensor,
        own: Tensor,
        *,
        again: bool = False,
    ) -> Tensor:
        """Differentiable sum of the losses of blocks `own`, from the features of `rows` alone; `again`:
        context and block rows are made again in the backward pass.
        """
        ...

    def reference_sum(self) -> Tensor:
        """The same for all blocks with all rows, under a dense mask in float64."""
        ...


class StepFactory(Protocol):
    def __call__(
        self, layout: BlockLayout, masks: Sequence[LayerMask], dtype: torch.dtype, seed: int
    ) -> ExactStep: ...


def layouts(ranks: int) -> dict[str, BlockLayout]:
    """Where blocks may stand: every case that has broken a sharded trainer somewhere."""
    return {
        # 61 is prime, so no number of ranks divides it; anchors 1 and 59 are the first and last legal ones
        "one document, first and last anchor": _layout([61], [1, 4, 5, 17, 18, 30, 42, 44, 59]),
        "fewer blocks than ranks": _layout([37], [20] if ranks < 3 else [7, 20]),
        "packed documents": _layout([23, 1, 17, 30], [1, 9, 20, 25, 31, 39, 42, 43, 55, 68]),
        "batch of two, one neighbourhood": _layout([40, 35], [30, 31, 33, 34, 36, 70, 71, 72]),
        "all blocks on one document": _layout([50, 29], [2, 11, 12, 13]),
    }


def _layout(documents: Sequence[int], anchors: Sequence[int]) -> BlockLayout:
    ends = torch.tensor(documents).cumsum(0)
    starts = ends - torch.tensor(documents)
    at = torch.tensor(anchors)
    return BlockLayout(at, starts[torch.searchsorted(ends, at, right=True)], int(ends[-1]), BLOCK)


@dataclass(frozen=True)
class Result:
    """One case.

    Attributes:
        name: scenario, masks and plan.
        ranks: N.
        context_ranks: P.
        transports: what was planned, per layer.
        max_rel_err: largest over loss and parameters of the greatest deviation over the greatest entry.
        worst: where that was.
        sent: bytes that rank 0 sent, by kind.
    """

    name: str
    ranks: int
    context_ranks: int
    transports: tuple[str, ...]
    max_rel_err: float
    worst: str
    sent: dict[str, int] = field(default_factory=dict)


def check_rank(
    factory: StepFactory, dtype: torch.dtype, context_ranks: Sequence[int], only: Sequence[str]
) -> list[Result]:
    """Run every case whose name contains one of `only`, on this rank of an existing world."""
    results: list[Result] = []
    for ranks in context_ranks:
        grid = Grid.from_environment(ranks)
        for scenario, layout in layouts(ranks).items():
            for kind, masks in MASKS.items():
                # several replicas add nothing to a transport; they prove the rule for losses and gradients
                names = PLANS if ranks == grid.world > 1 else REPLICA_PLANS
                plans = {name: PLANS[name] for name in names}
                cases = {f"{scenario} | {kind} | {plan}": options for plan, options in plans.items()}
                cases = {
                    name: options for name, options in cases.items() if any(text in name for text in only)
                }
                if cases:
                    results += _check(factory, layout, masks, dtype, grid, cases)
    return results


def _check(
    factory: StepFactory,
    layout: BlockLayout,
    masks: Sequence[LayerMask],
    dtype: torch.dtype,
    grid: Grid,
    plans: dict[str, dict[str, Any]],
) -> Iterator[Result]:
    """Replicas have their own features and labels for the same blocks; the reference adds them up."""
    references = [factory(layout, masks, torch.float64, seed) for seed in range(grid.replicas)]
    slots = sum(reference.slots for reference in references)
    loss = sum(reference.reference_sum() for reference in references) / slots
    assert isinstance(loss, Tensor)
    wanted = {"loss": loss.detach()}
    for name in references[0].parameters:
        copies = [reference.parameters[name] for reference in references]
        grads = torch.autograd.grad(loss, copies, retain_graph=True, materialize_grads=True)
        wanted[name] = torch.stack(grads).sum(0)
    step = factory(layout, masks, dtype, grid.replica)
    for name, options in plans.items():
        wire = Wire(grid)
        again = bool(options.get("again"))
        planned = {key: value for key, value in options.items() if key != "again"}
        plan = plan_step(layout, masks, grid, wire=wire, **planned)
        local = step.loss_sum(plan.attention(), plan.rows, plan.row_positions, plan.own, again=again)
        local = local * plan.loss_scale * grid.world / slots
        grads = torch.autograd.grad(local, list(step.parameters.values()), materialize_grads=True)
        averaged = wire.add_up(torch.cat([x.flatten() for x in (local.detach(), *grads)]), "gradients")
        found = averaged.double().div(grid.world).split([value.numel() for value in wanted.values()])
        errors = {
            name: _relative(value.view(wanted[name].shape), wanted[name])
            for name, value in zip(wanted, found, strict=True)
        }
        worst = max(errors, key=lambda name: errors[name])
        yield Result(
            name, grid.world, grid.context_ranks, plan.transports, errors[worst], worst, wire.sent_by_kind()
        )


def _relative(found: Tensor, wanted: Tensor) -> float:
    """Greatest deviation over greatest entry; of a gradient that is zero, the deviation itself."""
    greatest = float(wanted.abs().max())
    return float((found - wanted).abs().max()) / (greatest or 1.0)
