"""The target model as the decode loops see it: one sequence, cached, with feature taps.

Shape legend: T prompt tokens, N sequences, R rows of one forward, V vocabulary, F feature width (taps x
hidden).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafter.frozen import FrozenHead
from eval.errors import EvalError
from eval.folded_attention import register
from eval.kv_cache import open_cache
from eval.prepack import PackedLinear, can_prepack, prepack_linears

#: A long prompt is read in parts. These bound a part's activations and the cells of its mask, whose additive
#: form takes 4 bytes each (128 MiB); a part has at least the last number of rows.
_PREFILL_ROWS = 4096
_PREFILL_CELLS = 1 << 25
_PREFILL_ROWS_LEAST = 256

Observe = Callable[[Tensor], None]


def choose_attention(device: torch.device, dtype: torch.dtype, *, batched: bool) -> str:
    """The attention of a target: flash-attn where it runs, else `folded`.

    Args:
        device: of the target.
        dtype: of its weights.
        batched: several prompts of their own lengths in one step need a mask, which flash-attn does not take.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda" and half and not batched and find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return "folded"


class Target:
    """A causal language model of transformers with hooks on the layers that a drafter reads."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.config: Any = model.config.get_text_config()
        self.layers: Any = model.get_decoder().layers
        self._tapped: dict[int, Tensor] = {}
        self._hooked: set[int] = set()

    @classmethod
    def load(
        cls, path: str | Path, *, dtype: torch.dtype, device: torch.device, attention: str, prepack: bool
    ) -> Target:
        """Load a checkpoint directory or hub name.

        Args:
            path: what `AutoModelForCausalLM.from_pretrained` takes.
            dtype: of the weights.
            device: where it runs.
            attention: `folded` (see folded_attention.py) or any `attn_implementation` of transformers.
            prepack: keep oneDNN copies of the large weights; ignored where there is no such kernel.

        Raises:
            EvalError: the checkpoint cannot be loaded.
        """
        from transformers import AutoModelForCausalLM

        implementation = register() if attention == "folded" else attention
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=implementation
            )
        except (OSError, ValueError) as error:
            raise EvalError(
                f"target {path} could not be loaded as a causal language model: {error}"
            ) from error
        model.to(device)
        if prepack and can_prepack(device, dtype):
            prepack_linears(model)
        return cls(model)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def embedding(self) -> Tensor:
        """The input embedding table, [V, D]."""
        table: Tensor = self.model.get_input_embeddings().weight
        return table

    @property
    def head_weight(self) -> Tensor:
        """The table of the output projection, [V, D]."""
        table: Tensor = self.model.get_output_embeddings().weight
        return table

    @property
    def head_product(self) -> Callable[[Tensor], Tensor] | None:
        """The packed product with `head_weight`, [..., D] -> [..., V]; None where there is none."""
        head = self.model.get_output_embeddings()
        return head if isinstance(head, PackedLinear) and head.bias is None else None

    @property
    def frozen_head(self) -> FrozenHead:
        """The two tables that drafters share, with this target's own kernel for the output projection."""
        return FrozenHead(self.embedding.detach(), self.head_weight.detach(), product=self.head_product)

    @property
    def max_positions(self) -> int:
        return int(self.config.max_position_embeddings)

    def stop_ids(self, tokenizer: Any) -> frozenset[int]:
        """Token ids that end a response: those of the generation config and the tokenizer's own."""
        return _with_own(self.model.generation_config.eos_token_id, tokenizer)

    def open(self, taps: Sequence[int] = ()) -> Session:
        """Start a sequence; `taps` are the decoder layers (0-based) whose outputs its forwards return."""
        for layer in taps:
            if not 0 <= layer < len(self.layers):
                raise EvalError(
                    f"the drafter reads the output of target layer {layer}, but this target has layers "
                    f"0 to {len(self.layers) - 1}; evaluate it with the target that it was trained for"
                )
            if layer not in self._hooked:
                self.layers[layer].register_forward_hook(self._hook(layer))
                self._hooked.add(layer)
        return Session(self, tuple(taps))

    def _hook(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # A hook sees the raw residual; `hidden_states[-1]` would be the normed one for the last layer.
            self._tapped[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    def take_features(self, taps: Sequence[int]) -> Tensor | None:
        """The tapped rows of the last forward side by side, [N, R, F]; None without taps."""
        features = torch.cat([self._tapped[layer] for layer in taps], dim=-1) if taps else None
        self._tapped.clear()
        return features


class Session:
    """The cache of one sequence and the forwards that fill it."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        self._target = target
        self._taps = taps
        self._cache = open_cache(target.config)
        self._model = target.model

    @property
    def layers(self) -> Any:
        """The cache's layers, for whoever takes over this sequence."""
        return self._cache.layers

    def prefill(self, ids_T: Tensor, observe: Observe | None = None) -> Tensor:
        """Run the prompt; features go to `observe` part by part; returns the last position's logits, [V]."""
        logits_V = ids_T.new_empty(0)
        for part in ids_T.split(prefill_parts(len(ids_T))):
            logits, features_RF = self.forward(part, logits_to_keep=1)
            self.drop(0)
            if observe is not None and features_RF is not None:
                observe(features_RF)
            logits_V = logits[-1]
        return logits_V

    def forward(self, ids_R: Tensor, logits_to_keep: int = 0) -> tuple[Tensor, Tensor | None]:
        """Append R tokens; returns logits [R, V] (or of the last rows only) and features [R, F]."""
        output = self._model(
            ids_R[None], past_key_values=self._cache, use_cache=True, logits_to_keep=logits_to_keep
        )
        features_NRF = self._target.take_features(self._taps)
        return output.logits[0], None if features_NRF is None else features_NRF[0]

    def drop(self, rows: int) -> None:
        """Forget the last rows; to be called after every forward, also with 0, so that window layers trim."""
        self._cache.crop(-rows)


def prefill_parts(tokens: int) -> list[int]:
    """Rows of each part of a prompt: fewer the more keys they look back at."""
    parts = []
    done = 0
    while done < tokens:
        rows = min(
            _PREFILL_ROWS, max(_PREFILL_CELLS // (done + _PREFILL_ROWS), _PREFILL_ROWS_LEAST), tokens - done
        )
        parts.append(rows)
        done += rows
    return parts


def stop_tokens(checkpoint: Path, tokenizer: Any) -> frozenset[int]:
    """`Target.stop_ids` of a checkpoint whose weights are not loaded."""
    generation = checkpoint / "generation_config.json"
    source = generation if generation.is_file() else checkpoint / "config.json"
    return _with_own(json.loads(source.read_text()).get("eos_token_id"), tokenizer)


def _with_own(given: int | Sequence[int] | None, tokenizer: Any) -> frozenset[int]:
    ids = [] if given is None else [given] if isinstance(given, int) else list(given)
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(ids if own is None else [*ids, own])
