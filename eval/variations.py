"""A drafter changed in one of the ways in which exports and engines have been seen to go wrong.

Each variation keeps the weights and changes one thing about how they are used. Applied to the project's own
loop it says two things: one that raises acceptance tells what the export should have said, and one that
reproduces an engine's drafts tells what the engine did. The list is that of public reports on
drafters that train well and serve badly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drafter.config import FULL, SLIDING, DrafterConfig
from drafter.model import Drafter
from drafter.rope import Rotary
from eval.block_drafter import without_dflash2

_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)


@dataclass(frozen=True)
class Variation:
    """One change.

    Attributes:
        what: the change in words, as the end of "the same weights with ...".
        advice: what to do if this is it.
        drafter: makes the changed drafter.
        taps: the layers whose features it is given.
    """

    what: str
    advice: str
    drafter: Callable[[], Drafter]
    taps: tuple[int, ...]


def variations(
    drafter: Drafter, *, target_layers: int, target_rope: dict[str, Any] | None, mask_ids: Sequence[int]
) -> Iterator[Variation]:
    """All variations that make sense for a drafter.

    Args:
        drafter: as exported.
        target_layers: decoder layers of the target.
        target_rope: its rope, if a drafter can have it (`drafter.rope.normalise_rope`).
        mask_ids: tokens that might have been the mask in training.
    """
    config = drafter.config
    yield from _taps(drafter, target_layers)
    yield from _positions(drafter, target_rope)
    yield from _masks(drafter)
    yield from _parts(drafter)
    for token in mask_ids:
        if token != config.mask_token_id:
            yield Variation(
                f"mask id {token} in place of {config.mask_token_id}",
                f"put the mask id of training into dflash_config.mask_token_id; it seems to be {token}",
                lambda token=token: _with_config(drafter, mask_token_id=token),  # type: ignore[misc]
                config.target_layer_ids,
            )


def taps_needed(config: DrafterConfig, target_layers: int) -> list[int]:
    """Every layer that some variation reads."""
    around = {layer + shift for layer in config.target_layer_ids for shift in (-1, 0, 1)}
    return sorted(layer for layer in around if 0 <= layer < target_layers)


def _taps(drafter: Drafter, target_layers: int) -> Iterator[Variation]:
    taps = drafter.config.target_layer_ids
    for shift, where in ((-1, "lower"), (1, "higher")):
        moved = tuple(layer + shift for layer in taps)
        if min(moved) >= 0 and max(moved) < target_layers:
            yield Variation(
                f"features of one layer {where} ({list(moved)} in place of {list(taps)})",
                "target_layer_ids count decoder layers from 0 and mean their outputs; vLLM's own ids are one "
                "higher",
                lambda: drafter,
                moved,
            )


def _positions(drafter: Drafter, target_rope: dict[str, Any] | None) -> Iterator[Variation]:
    config = drafter.config
    ropes = [] if target_rope is None else [target_rope]
    ropes += [{"rope_type": "default", "rope_theta": theta} for theta in _THETAS]
    tried = [config.rope]
    for rope in ropes:
        if rope in tried:
            continue
        tried.append(rope)
        whose = "the target's rope" if rope is target_rope else "rope"
        yield Variation(
            f"{whose} {rope} in place of {config.rope}",
            "write the rope of training into rope_parameters (and rope_theta)",
            lambda rope=rope: _with_rope(drafter, rope),  # type: ignore[misc]
            config.target_layer_ids,
        )
    for shift in (-1, 1):
        yield Variation(
            f"blocks {abs(shift)} position {'earlier' if shift < 0 else 'later'}",
            "a block's first row is the anchor and stands at the anchor's own position, right after the "
            "context; look for a shift in the training data",
            lambda shift=shift: _shifted(drafter, shift),  # type: ignore[misc]
            config.target_layer_ids,
        )
    yield Variation(
        "drafts read one row earlier, the anchor's row giving the first",
        "the drafter was trained to draft from the anchor's row (sample_from_anchor), which is not DFlash's "
        "layout",
        lambda: _from_anchor(drafter),
        config.target_layer_ids,
    )


def _masks(drafter: Drafter) -> Iterator[Variation]:
    config = drafter.config
    causal = {mask.causal for mask in config.layer_masks}
    for wanted in (True, False):
        if causal != {wanted}:
            yield Variation(
                f"attention inside the block {'causal' if wanted else 'in both directions'}",
                f"write is_causal: {str(wanted).lower()} into config.json, or serve it so",
                lambda wanted=wanted: _with_config(drafter, is_causal=wanted),  # type: ignore[misc]
                config.target_layer_ids,
            )
    if SLIDING in config.layer_types:
        settled = config.layer_masks[0].causal if config.is_causal is None else config.is_causal
        yield Variation(
            "sliding layers looking at the whole context",
            "layer_types, sliding_window and use_sliding_window have to say what training did, and the "
            "engine must honour them",
            lambda: _with_config(drafter, layer_types=(FULL,) * config.num_hidden_layers, is_causal=settled),
            config.target_layer_ids,
        )


def _parts(drafter: Drafter) -> Iterator[Variation]:
    config, taps = drafter.config, drafter.config.target_layer_ids
    served = "the engine has to be one that knows this part of the drafter"
    yield Variation("no norm after fc", served, lambda: _replaced(drafter, hidden_norm=nn.Identity()), taps)
    if config.version == 2:
        yield Variation("neither convolutions nor selector", served, lambda: without_dflash2(drafter), taps)
        yield Variation("no selector", served, lambda: _replaced(drafter, candidate_selector=None), taps)
        yield Variation("no convolutions", served, lambda: _without_convolutions(drafter), taps)
    if config.output_multiplier != 1.0 or config.final_logit_softcapping is not None:
        yield Variation(
            "logits neither scaled nor capped",
            "output_multiplier and final_logit_softcapping have to be in dflash_config",
            lambda: _with_config(drafter, output_multiplier=1.0, final_logit_softcapping=None),
            taps,
        )
    for scale in {1.0, config.hidden_size**0.5} - {config.input_embedding_scale}:
        yield Variation(
            f"input_embedding_scale {scale:.4g} in place of {config.input_embedding_scale:.4g}",
            "write the scale of training into dflash_config.input_embedding_scale",
            lambda scale=scale: _with_config(drafter, input_embedding_scale=scale),  # type: ignore[misc]
            taps,
        )


def _replaced(drafter: Drafter, **modules: nn.Module | None) -> Drafter:
    """A drafter that shares all weights and has other parts in some places."""
    varied = copy.copy(drafter)
    varied._modules = {**drafter._modules, **modules}
    return varied


def _with_config(drafter: Drafter, **changes: Any) -> Drafter:
    varied = _replaced(drafter)
    varied.config = replace(drafter.config, **changes)
    return varied


def _with_rope(drafter: Drafter, rope: dict[str, Any]) -> Drafter:
    varied = _replaced(drafter)
    varied.rotary = Rotary(rope, drafter.config.head_dim, drafter.config.max_position_embeddings)
    return varied


def _without_convolutions(drafter: Drafter) -> Drafter:
    layers = []
    for layer in drafter.layers:
        bare = copy.copy(layer)
        bare._modules = {**layer._modules, "attention_conv": None, "mlp_conv": None}
        layers.append(bare)
    return _replaced(drafter, layers=nn.ModuleList(layers))


def _shifted(drafter: Drafter, shift: int) -> Drafter:
    varied = _replaced(drafter)

    def forward(
        context: Any, context_positions: Tensor, blocks: Tensor, block_positions: Tensor, attention: Any
    ) -> Tensor:
        positions = (block_positions + shift).clamp(min=0)
        hidden: Tensor = drafter(context, context_positions, blocks, positions, attention)
        return hidden

    varied.forward = forward  # type: ignore[assignment, method-assign]
    return varied


def _from_anchor(drafter: Drafter) -> Drafter:
    varied = _replaced(drafter)

    def forward(*inputs: Any) -> Tensor:
        hidden_ABD: Tensor = drafter(*inputs)
        return torch.cat([hidden_ABD[:, :1], hidden_ABD[:, :-1]], dim=1)

    varied.forward = forward  # type: ignore[assignment, method-assign]
    return varied
