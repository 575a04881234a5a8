"""The target's embedding and head, which the drafter shares and never changes.

Shape legend: V vocabulary, D hidden, A blocks, B rows of a block.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.errors import CheckpointError

_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight")


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
    """

    embedding: Tensor
    head: Tensor
    frequent_ids: Tensor | None = None
    product: Callable[[Tensor], Tensor] | None = None

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
        config = json.loads((directory / "config.json").read_text())
        text = config.get("text_config") or config
        tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
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
        return FrozenHead(embedding, head, frequent)

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


def _find(files: dict[str, Path], endings: tuple[str, ...]) -> str | None:
    for ending in endings:
        found = [name for name in files if name == ending or name.endswith("." + ending)]
        if found:
            return min(found, key=len)
    return None
