"""Rotary positions: which frequencies a config asks for, and angles that stay right at a million tokens.

Shape legend: ... any leading shape, H heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from drafter.errors import ConfigError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0


def normalise_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read either rope schema of an HF config into one flat dict with `rope_type` and `rope_theta`.

    transformers 5 nests everything in `rope_parameters`; older configs have a top-level `rope_theta` and an
    optional `rope_scaling` (whose kind is called `rope_type` or, older still, `type`). Targets that give each
    layer type its own dict (`full_attention`, `sliding_attention`) are read at their full-attention entry.

    Raises:
        ConfigError: the kind of rope is none of `SUPPORTED_ROPE_TYPES`, or rotates a part of the head only.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    legacy_type = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or legacy_type or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    if rope["rope_type"] not in SUPPORTED_ROPE_TYPES:
        raise ConfigError(
            f"rope_type {rope['rope_type']!r} is not one of {SUPPORTED_ROPE_TYPES}: others depend on the "
            "length of the sequence or rotate parts of the head; give the drafter an explicit rope"
        )
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and float(partial) != 1.0:
        raise ConfigError(
            f"partial_rotary_factor {partial} is not supported, a drafter rotates whole heads; give the "
            "drafter an explicit rope"
        )
    if rope["rope_type"] in ("llama3", "yarn") and rope.get("original_max_position_embeddings") is None:
        # transformers' own default; written out so that a changed position limit cannot change frequencies
        rope["original_max_position_embeddings"] = config.get("max_position_embeddings")
    return {key: value for key, value in rope.items() if value is not None}


def position_limit(rope: Mapping[str, Any], max_position_embeddings: int) -> int:
    """Positions that an engine serves with this rope (vLLM 0.32 derives its rotary cache the same way)."""
    if rope["rope_type"] == "yarn":
        return int(rope["original_max_position_embeddings"] * rope["factor"])
    if rope["rope_type"] == "linear":
        return int(max_position_embeddings * rope["factor"])
    return max_position_embeddings


def inverse_frequencies(
    rope: Mapping[str, Any], head_dim: int, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Return float32 [E/2] inverse frequencies and the factor on cos and sin, as transformers has them."""
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    carrier = Qwen3Config(
        head_dim=head_dim, max_position_embeddings=max_position_embeddings, rope_parameters=dict(rope)
    )
    with torch.device("cpu"):  # a drafter may be built on the meta device, its angles may not
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](carrier, torch.device("cpu"))
    return frequencies.float(), float(scaling)


class Rotary:
    """Cosines and sines of absolute positions.

    Not a module and without buffers: `module.to(torch.bfloat16)` would round inverse frequencies to eight
    bits, and positions past 256 would collapse onto their neighbours. The product position x frequency is
    taken in float64: in float32 it is off by up to 0.06 rad at position 1e6.
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> None:
        frequencies, self.scaling = inverse_frequencies(rope, head_dim, max_position_embeddings)
        self.frequencies = frequencies.double()
        self._on_device: dict[torch.device, Tensor] = {self.frequencies.device: self.frequencies}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of int64 positions, each [..., 1, E/2], in the wider of `dtype` and float32."""
        if positions.device not in self._on_device:
            self._on_device[positions.device] = self.frequencies.to(positions.device)
        angles = positions.double()[..., None, None] * self._on_device[positions.device]
        wide = torch.promote_types(dtype, torch.float32)
        return (angles.cos() * self.scaling).to(wide), (angles.sin() * self.scaling).to(wide)


class _Rotate(torch.autograd.Function):
    """Half rotation with two output passes; the gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _half_rotation(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _half_rotation(gradient, cos, -sin), None, None


def _half_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    wide = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    out_first, out_second = wide.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., H, E] (neox halves) by the angles of `Rotary`; computed in float32 or wider."""
    rotated: Tensor = _Rotate.apply(x, cos, sin)
    return rotated
