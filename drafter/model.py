"""The drafter: a few Qwen3-style layers whose attention also reads the target's own hidden states.

Parameter names and shapes are those of released checkpoints (arXiv 2602.06036; PyPI dflash 0.1.0), so a state
dict is a checkpoint. Embedding and head are the target's and live in `drafter.frozen.FrozenHead`.

Shape legend: A blocks, B rows of a block, T context rows, D hidden, F width of a context feature,
H query heads, G key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafter.attention import BlockAttention
from drafter.config import DrafterConfig
from drafter.context import CHUNK, Features, project
from drafter.convolution import GroupedDynamicCausalConv
from drafter.norm import RMSNorm
from drafter.rope import Rotary, rotate
from drafter.selector import CandidateSelector
from drafter.swiglu import SwiGLU

INITIALIZER_STD = 0.02

Angles = tuple[Tensor, Tensor]


KeysValues = tuple[Tensor, Tensor]


class Context(NamedTuple):
    """The context rows [T, D] that one layer projects, with their angles."""

    rows: Tensor
    angles: Angles


class Attention(nn.Module):
    """Projections of one layer; context and block share the key and value matrices."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, rows: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return normed, rotated keys and values [..., G, E] of context or block rows [..., D]."""
        heads = (-1, self.head_dim)
        return (
            rotate(self.k_norm(self.k_proj(rows).unflatten(-1, heads)), *angles),
            self.v_proj(rows).unflatten(-1, heads),
        )

    def queries(self, rows: Tensor, angles: Angles) -> Tensor:
        """Return normed, rotated queries [..., H, E] of block rows [..., D]."""
        return rotate(self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.head_dim))), *angles)


class Layer(nn.Module):
    """Attention and MLP, each between the two halves of a convolution in DFlash2."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv: GroupedDynamicCausalConv | None = None
        self.mlp_conv: GroupedDynamicCausalConv | None = None
        if config.version == 2:
            kernel = (config.hidden_size, config.conv_kernel_size, config.conv_group_size)
            self.attention_conv = GroupedDynamicCausalConv(*kernel)
            self.mlp_conv = GroupedDynamicCausalConv(*kernel)

    def before_attention(self, h_ABD: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return (queries, keys, values) of block rows, and the coefficients of the second convolution."""
        rows, delta = self.input_layernorm(h_ABD), None
        if self.attention_conv is not None:
            rows, delta = self.attention_conv.before(rows)
        return (self.self_attn.queries(rows, angles), *self.self_attn.keys_values(rows, angles), delta)

    def after_attention(self, h_ABD: Tensor, mixed_ABHE: Tensor, delta: Tensor | None) -> Tensor:
        """Return the layer's output from its input and what attention mixed."""
        rows = self.self_attn.o_proj(mixed_ABHE.flatten(-2))
        if self.attention_conv is not None and delta is not None:
            h_ABD = self.attention_conv.after(rows, delta, h_ABD)
        else:
            h_ABD = h_ABD + rows
        rows = self.post_attention_layernorm(h_ABD)
        if self.mlp_conv is None:
            return h_ABD + self.mlp(rows)
        rows, delta = self.mlp_conv.before(rows)
        return self.mlp_conv.after(self.mlp(rows), delta, h_ABD)

    def forward(
        self,
        h_ABD: Tensor,
        block_angles: Angles,
        context: KeysValues,
        attention: BlockAttention,
        layer: int,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """One layer. With `recompute` only its input and the attention's own tensors wait for the backward
        pass, which makes the rest again; attention is not repeated, because ranks meet in it.
        """
        run = _again if recompute and torch.is_grad_enabled() else _once
        q_ABHE, k_block, v_block, delta = run(self.before_attention, h_ABD, block_angles)
        mixed_ABHE = attention(layer, q_ABHE, k_block, v_block, *context)
        output_ABD: Tensor = run(self.after_attention, h_ABD, mixed_ABHE, delta)
        return output_ABD


def _once(function: Callable[..., Any], *tensors: Any) -> Any:
    return function(*tensors)


def _again(function: Callable[..., Any], *tensors: Any) -> Any:
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


class Drafter(nn.Module):
    """DFlash (version 1) or DFlash2 (version 2); a new DFlash2 drafter computes what DFlash computes.

    With `config.feature_scaling` there is one training-only buffer, `feature_scale` [F], that multiplies the
    columns of `fc`: features whose sizes differ by orders of magnitude then train at one rate. An export
    folds it into `fc`.

    Attributes:
        recompute: block activations are made again in the backward pass, layer by layer.
    """

    feature_scale: Tensor | None
    recompute: bool = False

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config) if config.version == 2 else None
        scale = torch.ones(config.feature_width) if config.feature_scaling else None
        self.register_buffer("feature_scale", scale)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw linear weights from N(0, 0.02); convolutions are the identity and the selector adds zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIALIZER_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, (GroupedDynamicCausalConv, CandidateSelector)):
                module.reset_parameters()

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [cast("Layer", layer).self_attn for layer in self.layers]

    def fuse(self, features_TF: Tensor) -> Tensor:
        """Project taps, side by side in `target_layer_ids` order, to context rows [T, D] of all layers."""
        weight = self.fc.weight if self.feature_scale is None else self.fc.weight * self.feature_scale
        # autocast narrows both; a stored row gets no gradient
        widen = features_TF.dtype != weight.dtype and not torch.is_autocast_enabled(features_TF.device.type)
        if widen:
            fused_TD = _Fuse.apply(features_TF, weight)
        elif weight is self.fc.weight:
            fused_TD = self.fc(features_TF)  # at decoding it may be a layer with a kernel for few rows
        else:
            fused_TD = F.linear(features_TF, weight)
        context_TD: Tensor = self.hidden_norm(fused_TD)
        return context_TD

    def forward(
        self,
        context: Tensor | Features,
        context_positions_T: Tensor,
        block_embeddings_ABD: Tensor,
        block_positions_AB: Tensor,
        attention: BlockAttention,
    ) -> Tensor:
        """Return final-normed hidden states [A, B, D] of all block rows; row j predicts its own position.

        Args:
            context: fused features [T, D] of the context rows at hand, from `fuse`, or `Features` to be
                fused and projected in chunks and once more in the backward pass; T may be 0.
            context_positions_T: int64 [T], rotary positions of these rows.
            block_embeddings_ABD: from `drafter.frozen.embed_blocks`; A may be 0.
            block_positions_AB: int64 [A, B], rotary positions of the block rows.
            attention: mixes each block with what it may see of the context and of itself.
        """
        h_ABD = block_embeddings_ABD.to(self.norm.weight.dtype)
        block_angles = self.rotary(block_positions_AB, h_ABD.dtype)
        keys_values = self._keys_values(context, context_positions_T, attention)
        for index, (layer, pair) in enumerate(zip(self.layers, keys_values, strict=True)):
            h_ABD = layer(h_ABD, block_angles, pair, attention, index, recompute=self.recompute)
        normed: Tensor = self.norm(h_ABD)
        return normed

    def _keys_values(
        self, context: Tensor | Features, positions_T: Tensor, attention: BlockAttention
    ) -> Iterator[KeysValues]:
        """Keys and values of the context, layer by layer."""
        selections = [attention.context_rows(layer) for layer in range(len(self.layers))]
        if isinstance(context, Features):
            yield from project(self, context, positions_T, selections)
            return
        everything = Context(context, self.rotary(positions_T, self.norm.weight.dtype))
        rows, selection = everything, None
        for attend, wanted in zip(self.attentions, selections, strict=True):
            if wanted is not selection:
                # layers with one mask share one selection; gathering it once saves its copies and gradients
                rows, selection = _select(everything, wanted), wanted
            yield attend.keys_values(*rows)


class _Fuse(torch.autograd.Function):
    """A product with rows of a narrower dtype, of which only a chunk is widened at a time."""

    @staticmethod
    def forward(ctx: FunctionCtx, features_TF: Tensor, weight_DF: Tensor) -> Tensor:
        ctx.save_for_backward(features_TF, weight_DF)
        fused_TD = weight_DF.new_empty(len(features_TF), len(weight_DF))
        for features, fused in zip(features_TF.split(CHUNK), fused_TD.split(CHUNK), strict=True):
            torch.mm(features.to(weight_DF.dtype), weight_DF.T, out=fused)
        return fused_TD

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[None, Tensor]:
        features_TF, weight_DF = ctx.saved_tensors
        weight = torch.zeros_like(weight_DF)
        for features, gradient in zip(features_TF.split(CHUNK), gradient_TD.split(CHUNK), strict=True):
            weight.addmm_(gradient.T, features.to(weight.dtype))
        return None, weight


def _select(context: Context, wanted: Tensor | None) -> Context:
    if wanted is None:
        return context
    cos, sin = context.angles
    rows = context.rows.index_select(0, wanted)  # its backward adds rows; indexing with a tensor is slower
    return Context(rows, (cos[wanted], sin[wanted]))
