"""Context rows as keys and values of all layers, made chunk by chunk and made again in the backward pass.

`Drafter.fuse` and the projections of each layer keep, for every context row, its fused state, the inputs of
two norms and the angles: more than its keys and values. A row of the context depends on its own features
alone, so all of that can be made again from the features, a chunk at a time, once the gradients of the keys
and values of all layers are there. What stays per row is its features and its keys and values; the price is
one more forward pass of the context rows.

Shape legend: T context rows, F feature width, G key/value heads, E head size, n rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from drafter.model import Drafter

CHUNK = 4096


@dataclass(frozen=True)
class Features:
    """Context features for `Drafter.forward` to fuse and project itself, in chunks of rows.

    Attributes:
        rows: [T, F], stored dtype.
        chunk: rows n that are wide at a time.
    """

    rows: Tensor
    chunk: int = CHUNK


def project(
    drafter: Drafter, features: Features, positions_T: Tensor, wanted: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Return every layer's keys and values [T_layer, G, E] of the context.

    Args:
        drafter: whose weights are used and get gradients.
        features: of the context rows; they get no gradient.
        positions_T: int64 [T], rotary positions.
        wanted: per layer, ascending indices of the rows that it projects, or None for all.
    """
    parameters = _parameters(drafter)
    flat = _Project.apply(drafter, features, positions_T, list(wanted), *parameters)
    return list(zip(flat[0::2], flat[1::2], strict=True))


def _parameters(drafter: Drafter) -> list[nn.Parameter]:
    modules: list[nn.Module] = [drafter.fc, drafter.hidden_norm]
    for attention in drafter.attentions:
        modules += [attention.k_proj, attention.v_proj, attention.k_norm]
    return [p for module in modules for p in module.parameters() if p.requires_grad]


@dataclass(frozen=True)
class _Chunk:
    """Rows [start, stop) of the context; per layer, the picked ones (None: all) and where they go."""

    start: int
    stop: int
    picked: list[Tensor | None]
    places: list[slice]


def _chunks(rows: int, size: int, wanted: Sequence[Tensor | None]) -> list[_Chunk]:
    edges = [*range(0, rows, size), rows] if rows else [0, 0]  # gradients of zero still have to be there
    bounds = {
        id(index): torch.searchsorted(index, torch.tensor(edges, device=index.device)).tolist()
        for index in wanted
        if index is not None
    }
    chunks = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        picked: list[Tensor | None] = []
        places = []
        for index in wanted:
            if index is None:
                picked.append(None)
                places.append(slice(start, stop))
            else:
                place = slice(bounds[id(index)][number], bounds[id(index)][number + 1])
                picked.append(index[place] - start)
                places.append(place)
        chunks.append(_Chunk(start, stop, picked, places))
    return chunks


def _project_chunk(drafter: Drafter, features: Features, positions_T: Tensor, chunk: _Chunk) -> list[Tensor]:
    """The chunk's keys and values, layer after layer: k_0, v_0, k_1, v_1, ..."""
    span = slice(chunk.start, chunk.stop)
    fused_nD = drafter.fuse(features.rows[span])
    cos, sin = drafter.rotary(positions_T[span], drafter.norm.weight.dtype)
    found: list[Tensor] = []
    for attention, picked in zip(drafter.attentions, chunk.picked, strict=True):
        if picked is None:
            found += attention.keys_values(fused_nD, (cos, sin))
        else:
            found += attention.keys_values(fused_nD.index_select(0, picked), (cos[picked], sin[picked]))
    return found


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        drafter: Drafter,
        features: Features,
        positions_T: Tensor,
        wanted: list[Tensor | None],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(features.rows, positions_T, *parameters)
        ctx.drafter, ctx.chunk, ctx.wanted = drafter, features.chunk, wanted
        device = features.rows.device.type
        ctx.autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        rows = len(features.rows)
        found: list[Tensor] = []
        for chunk in _chunks(rows, features.chunk, wanted):
            made = _project_chunk(drafter, features, positions_T, chunk)
            if not found:
                sizes = [rows if index is None else len(index) for index in wanted for _ in range(2)]
                found = [
                    part.new_empty(size, *part.shape[1:]) for part, size in zip(made, sizes, strict=True)
                ]
            for whole, part, layer in zip(found, made, _twice(range(len(wanted))), strict=True):
                whole[chunk.places[layer]] = part
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows_TF, positions_T, *parameters = ctx.saved_tensors
        features = Features(rows_TF, ctx.chunk)
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        enabled, dtype = ctx.autocast
        for chunk in _chunks(len(rows_TF), ctx.chunk, ctx.wanted):
            with torch.enable_grad(), torch.autocast(rows_TF.device.type, dtype, enabled=enabled):
                made = _project_chunk(ctx.drafter, features, positions_T, chunk)
            parts = [
                gradient[chunk.places[layer]]
                for gradient, layer in zip(gradients, _twice(range(len(ctx.wanted))), strict=True)
            ]
            found = torch.autograd.grad(made, parameters, parts)
            for total, part in zip(sums, found, strict=True):
                total.add_(part)
        return (None, None, None, None, *sums)


def _twice(layers: Sequence[int]) -> list[int]:
    """Each layer for its keys and for its values."""
    return [layer for layer in layers for _ in range(2)]
