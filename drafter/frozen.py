"""The target's embedding and head, which the drafter shares and never changes.

Shape legend: V vocabulary, D hidden, A blocks, B rows of a block.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.errors import CheckpointError

_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight")
# transformers 5.19: models whose RMS norms multiply by 1 + weight (names of their text parts included)
_ONE_PLUS_NORMS = (
    "gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma", "t5gemma", "t5gemma2",
    "t5gemma2_text", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp",
    "qwen4_exp_text", "muse_glimmer", "muse_glimmer_text", "minimax_m3_vl", "minimax_m3_vl_text", "step3p5",
    "step3p7",
)  # fmt: skip
_OTHER_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True)
class LogitScale:
    """From a product with the head to a logit: a factor, then an optional soft cap s * tanh(z / s)."""

    multiplier: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: DrafterConfig) -> LogitScale:
        return cls(config.output_multiplier, config.final_logit_softcapping)

    def __call__(self, products: Tensor) -> Tensor:
        """Return logits in float32 or wider."""
        logits = products.to(torch.promote_types(products.dtype, torch.float32)) * self.multiplier
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """What the target does to its last hidden state before its head: an RMS norm; and to logits after it.

    Attributes:
        weight: [D], factors of the normed state; 1 + the stored weight where the target has it so.
        eps: of the norm.
        scale: of the target's logits.
    """

    weight: Tensor
    eps: float
    scale: LogitScale

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> TargetOutput:
        """Read the final norm of an HF checkpoint, in float32.

        Raises:
            CheckpointError: there is no RMS norm beside the embedding, or logits are scaled in a way that
                this implementation does not know.
        """
        directory = Path(directory)
        files, config = tensor_files(directory), _text_config(directory)
        embedding = _find(files, _EMBEDDING_NAMES) or ""
        prefix = next((embedding.removesuffix(e) for e in _EMBEDDING_NAMES if embedding.endswith(e)), "")
        names = [name for name in (f"{prefix}norm.weight", f"{prefix}final_norm.weight") if name in files]
        eps = config.get("rms_norm_eps")
        if not names or eps is None or names[0].replace(".weight", ".bias") in files:
            raise CheckpointError(
                f"{directory}: no final RMS norm ({prefix}norm.weight and rms_norm_eps); the target's own "
                "distribution cannot be made from its last hidden states, train on labels"
            )
        scaled = {key: config[key] for key in _OTHER_SCALES if config.get(key) not in (None, 1, 1.0)}
        if scaled:
            raise CheckpointError(
                f"{directory}: config.json scales logits by {scaled}, which is not supported; train on labels"
            )
        weight = read_tensor(files, names[0], torch.float32)
        if config.get("model_type") in _ONE_PLUS_NORMS:
            weight = weight + 1.0
        softcap = config.get("final_logit_softcapping") or None
        return cls(weight, float(eps), LogitScale(config.get("output_multiplier") or 1.0, softcap))

    def normed(self, states_mD: Tensor, dtype: torch.dtype) -> Tensor:
        """The states as the head gets them, [m, D]; computed in `dtype`."""
        wide_mD = states_mD.to(dtype)
        mean_m = torch.linalg.vecdot(wide_mD, wide_mD) / wide_mD.shape[1]
        return wide_mD * (mean_m + self.eps).rsqrt().unsqueeze(1) * self.weight.to(dtype)

    def to(self, device: torch.device | str | None) -> TargetOutput:
        return replace(self, weight=self.weight.to(device))


@dataclass(eq=False)
class FrozenHead:
    """Frozen tables of the target.

    Attributes:
        embedding: [V, D], rows that blocks are embedded with.
        head: [V, D], rows that hidden states are scored against; the same tensor when the target ties them.
        frequent_ids: int64 [n], the tokens that occur most in the training responses, the most frequent one
            first. Only a sampled-vocabulary loss reads them.
        product: rows [R, D] -> their products with the whole of `head`, [R, V], by a kernel that suits a few
            rows. Drafting takes it in place of its own product; losses never do.
        output: how the target makes its logits; only losses on its distribution need it.
    """

    embedding: Tensor
    head: Tensor
    frequent_ids: Tensor | None = None
    product: Callable[[Tensor], Tensor] | None = None
    output: TargetOutput | None = None

    @classmethod
    def from_checkpoint(cls, directory: str | Path, dtype: torch.dtype | None = None) -> FrozenHead:
        """Read only these two tensors from the safetensors of an HF checkpoint.

        Raises:
            CheckpointError: no safetensors there, or none of the known names in them.
        """
        directory = Path(directory)
        files = tensor_files(directory)
        embedding_name = _find(files, _EMBEDDING_NAMES)
        if embedding_name is None:
            raise CheckpointError(
                f"{directory}: no tensor named *{' or *'.join(_EMBEDDING_NAMES)} in its safetensors"
            )
        tied = bool(_text_config(directory).get("tie_word_embeddings", False))
        head_name = None if tied else _find(files, _HEAD_NAMES)
        if head_name is None and not tied:
            raise CheckpointError(
                f"{directory}: no tensor named *{' or *'.join(_HEAD_NAMES)}, and config.json does not tie "
                "the head to the embedding (tie_word_embeddings)"
            )
        embedding = read_tensor(files, embedding_name, dtype)
        head = embedding if head_name is None else read_tensor(files, head_name, dtype)
        return cls(embedding=embedding, head=head)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> FrozenHead:
        """Return the tables elsewhere, without `product`; tied ones stay one tensor."""
        embedding = self.embedding.to(device=device, dtype=dtype)
        head = embedding if self.head is self.embedding else self.head.to(device=device, dtype=dtype)
        frequent = None if self.frequent_ids is None else self.frequent_ids.to(device)
        output = None if self.output is None else self.output.to(device)
        return FrozenHead(embedding, head, frequent, output=output)

    @cached_property
    def narrow_head(self) -> Tensor:
        """The head in bfloat16, for a search whose operands are rounded anyway."""
        return self.head.to(torch.bfloat16)

    @cached_property
    def embedding_rms(self) -> float:
        """Root mean square of all embedding entries, the unit in which a low-rank selector reads them."""
        total = sum(float(rows.double().square().sum()) for rows in self.embedding.split(8192))
        return float((total / self.embedding.numel()) ** 0.5)


def embed_blocks(
    head: FrozenHead, config: DrafterConfig, anchor_ids_A: Tensor, block_size: int | None = None
) -> Tensor:
    """Embed blocks [x_a, M, ..., M] as [A, B, D], times `input_embedding_scale`, in the table's dtype.

    Args:
        head: the target's tables.
        config: gives the mask id M and, unless `block_size` is given, B.
        anchor_ids_A: int64 [A], the token at each anchor.
        block_size: rows of these blocks, when a shorter block is drafted than was trained.
    """
    rows = block_size or config.block_size
    blocks_ABD = head.embedding[config.mask_token_id].expand(len(anchor_ids_A), rows, -1).clone()
    blocks_ABD[:, 0] = head.embedding[anchor_ids_A]
    if config.input_embedding_scale != 1.0:
        blocks_ABD *= config.input_embedding_scale
    return blocks_ABD


def tensor_files(directory: Path) -> dict[str, Path]:
    """Map every tensor name of a safetensors checkpoint, sharded or not, to its file.

    Raises:
        CheckpointError: the directory holds no safetensors.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), path)
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors found; expected a checkpoint directory")
    return files


def read_tensor(files: dict[str, Path], name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Read one tensor of `tensor_files`, cast to `dtype` if given."""
    with safe_open(files[name], "pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor if dtype is None else tensor.to(dtype)


def _text_config(directory: Path) -> dict[str, Any]:
    """config.json with the text model's fields on top, for targets that also see."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return {**config, **(config.get("text_config") or {})}


def _find(files: dict[str, Path], endings: tuple[str, ...]) -> str | None:
    for ending in endings:
        found = [name for name in files if name == ending or name.endswith("." + ending)]
        if found:
            return min(found, key=len)
    return None
