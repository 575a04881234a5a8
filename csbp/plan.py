"""One micro-step planned: blocks and rows of a rank, and how context K/V reach its blocks in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from csbp.backends import BACKENDS, load_backend
from csbp.baselines import BASELINES, baseline
from csbp.choice import Choice, Placement, choose
from csbp.function import PlannedAttention
from csbp.layout import BlockLayout
from csbp.ownership import StepCost
from csbp.routes import RouteBuilder, Transport
from csbp.rows import RowSet
from csbp.topology import Grid
from csbp.transport import Wire
from csbp.upload import upload
from drafter.attention import LayerMask

Mode = Literal["csbp", "cp", "replicated", "query-sharded"]


class PlanError(ValueError):
    """A step cannot be planned as asked."""


@dataclass(frozen=True)
class StepPlan:
    """One rank's part of a micro-step.

    Attributes:
        layout: the blocks of the whole replica.
        own: int64 [A_own], ascending indices into the layout: the blocks whose loss this rank computes.
        rows: axis ranges [start, stop) whose features this rank reads and fuses.
        row_positions: int64 [T], rotary position of each of those rows, counted from its document's start.
        placement: how blocks and rows were dealt out; the mode's name for a baseline.
        transports: per layer, how context K/V reach the blocks.
        loss_scale: factor on this rank's loss sum and metric sums, such that sums over ranks count every
            block once. With it, `loss_sum · N / Z` averaged over all N ranks is exact, and so is its
            gradient.
        seam: what `attention()` returns.
    """

    layout: BlockLayout
    own: Tensor
    rows: list[tuple[int, int]]
    row_positions: Tensor
    placement: str
    transports: tuple[Transport, ...]
    loss_scale: float
    seam: PlannedAttention

    def attention(self) -> PlannedAttention:
        """The `BlockAttention` of this step. Every context rank must call it in every layer and run the
        backward pass, also a rank without blocks: the others wait for its rows.
        """
        return self.seam


def plan_step(
    layout: BlockLayout,
    masks: Sequence[LayerMask],
    grid: Grid,
    *,
    mode: Mode = "csbp",
    placement: Placement | Literal["auto"] = "auto",
    transport: Transport | Literal["auto"] | Sequence[Transport | Literal["auto"]] = "auto",
    cost: StepCost | None = None,
    retain: int | None = None,
    wire: Wire | None = None,
    device: torch.device | str = "cpu",
    backend: str = "torch",
) -> StepPlan:
    """Plan one micro-step; all context ranks of a replica get matching plans from the same layout.

    Args:
        layout: blocks on the context axis, identical on all context ranks.
        masks: one per draft layer.
        grid: where this rank stands.
        mode: `csbp`, or a baseline of `csbp.baselines`.
        placement: who owns what; `auto` takes the cheaper by predicted time and bytes.
        transport: for all layers, or one per layer; `auto` chooses.
        cost: relative costs that ownership and choice go by.
        retain: received shards that a ring keeps for its backward pass. None keeps all; 1 bounds its memory
            to two shards and sends the others again.
        wire: where bytes are counted; a fresh one by default.
        device: where the tensors of the step live.
        backend: kernels of context parts, a name of `csbp.backends.BACKENDS`.

    Raises:
        PlanError: a name is unknown, a baseline is asked for another placement or transport, or anchors do
            not ascend.
    """
    cost = cost or StepCost()
    asked = [transport] * len(masks) if isinstance(transport, str) else list(transport)
    _check(layout, masks, mode, placement, asked, backend)
    if mode == "csbp":
        choice = choose(layout, masks, grid.context_ranks, cost, placement, asked)
    else:
        choice = baseline(mode, layout, masks, grid.context_ranks, cost)
    builder = RouteBuilder(
        layout,
        choice.ownership,
        grid.context_rank,
        retain=grid.context_ranks if retain is None else max(1, retain),
        compact=mode in ("csbp", "replicated"),
        carry_blocks=mode == "cp",
        device=device,
    )
    return StepPlan(
        layout=layout,
        own=choice.ownership.blocks[grid.context_rank],
        rows=(rows := _rows(builder, masks, choice)).ranges,
        row_positions=upload(_row_positions(layout, rows), device),
        placement=choice.placement,
        transports=choice.transports,
        loss_scale=1 / grid.context_ranks if mode == "replicated" else 1.0,
        seam=_seam(builder, masks, choice, rows, backend, wire or Wire(grid)),
    )


def _check(
    layout: BlockLayout,
    masks: Sequence[LayerMask],
    mode: str,
    placement: str,
    asked: Sequence[str],
    backend: str,
) -> None:
    for name, values, known in (
        ("mode", [mode], ("csbp", *BASELINES)),
        ("placement", [placement], ("auto", *get_args(Placement))),
        ("transport", asked, ("auto", *get_args(Transport))),
        ("backend", [backend], BACKENDS),
    ):
        if unknown := sorted(set(values) - set(known)):
            raise PlanError(f"{name} must be one of {known}, found {unknown}")
    if len(asked) != len(masks):
        raise PlanError(
            f"transport must name one way, or one for each of {len(masks)} layers, found {len(asked)}"
        )
    if mode != "csbp" and {placement, *asked} != {"auto"}:
        raise PlanError(
            f"mode {mode} has its own placement and transport; leave both auto, found {placement}, {asked}"
        )
    if (layout.anchors[1:] < layout.anchors[:-1]).any():
        raise PlanError("anchors of a layout must ascend along the axis; sort them before planning")


def _rows(builder: RouteBuilder, masks: Sequence[LayerMask], choice: Choice) -> RowSet:
    rows = RowSet.of([])
    for mask, transport in set(zip(masks, choice.transports, strict=True)):
        rows = rows.union(builder.projected(builder.me, mask, transport))
    return rows


def _row_positions(layout: BlockLayout, rows: RowSet) -> Tensor:
    """Count from the document's first row; rows that no block sees, from a known one before them."""
    index = rows.indices()
    starts = torch.unique(torch.cat([torch.zeros(1, dtype=torch.int64), layout.starts]))
    return index - starts[torch.searchsorted(starts, index, right=True) - 1]


def _seam(
    builder: RouteBuilder,
    masks: Sequence[LayerMask],
    choice: Choice,
    rows: RowSet,
    backend: str,
    wire: Wire,
) -> PlannedAttention:
    layers = list(zip(masks, choice.transports, strict=True))
    # Layers with equal masks and transports share a route, and so its key ranges and tiles.
    routes = {layer: builder.route(*layer) for layer in set(layers)}
    projected = {layer: builder.projected(builder.me, *layer).within(rows) for layer in set(layers)}
    return PlannedAttention(
        tuple(masks),
        tuple(routes[layer] for layer in layers),
        tuple(
            None if (index := projected[layer]) is None else upload(index, builder.device) for layer in layers
        ),
        load_backend(backend),
        wire,
    )
