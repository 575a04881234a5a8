"""Attention of a few query rows that leaves the key/value heads where they are.

transformers repeats keys and values up to the number of query heads as soon as a step has a mask, that is for
every verify step and for no plain step. Folding the query heads of a group into rows gives the same sums
without the copy: at 8K positions of a 9-query-head, 3-key-head layer, 8 rows cost 2.4 ms instead of 10 ms.

All layers of a forward get one mask. Its additive form, which torch's kernel would make again in every layer,
is made once.

Shape legend: N batch, H query heads, G key/value heads, R query rows, L key rows, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "longdraft_folded"
_MAX_ROWS = 64

#: mask of a forward -> (query heads of a group, its additive form); an entry lives as long as its mask
_biases: Any = WeakTensorKeyDictionary()


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention [N, R, H, E] of query [N, H, R, E] over key and value [N, G, L, E].

    Few rows are folded; a prefill, an additive bias or a mask per head goes to transformers' own function.
    """
    N, H, R, E = query.shape
    G = key.shape[1]
    one_mask = attention_mask is None or attention_mask.shape[1] == 1
    few = R == 1 or (attention_mask is not None and R <= _MAX_ROWS)
    if not few or not one_mask or kwargs.get("position_bias") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    bias = None if attention_mask is None else _bias(attention_mask, H // G, query.dtype)
    mixed = F.scaled_dot_product_attention(
        query.reshape(N, G, H // G * R, E), key, value, attn_mask=bias, scale=scaling
    )
    return mixed.reshape(N, H, R, E).transpose(1, 2), None


def _bias(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """What to add to the scores of folded rows, [N, 1, group * R, L]."""
    known = _biases.get(mask)
    if known is not None and known[0] == group:
        bias: Tensor = known[1]
        return bias
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    else:
        bias = mask
    bias = bias.repeat(1, 1, group, 1)
    _biases[mask] = (group, bias)
    return bias


def register() -> str:
    """Make the function known to transformers; returns the name for `attn_implementation`."""
    AttentionInterface.register(NAME, folded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
