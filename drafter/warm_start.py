"""First weights of a drafter, taken from its target.

Shape legend: T rows, D hidden, F feature width, Q output width of a query or key projection.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from drafter.errors import CheckpointError
from drafter.frozen import read_tensor, tensor_files
from drafter.model import Drafter, Layer

WarmStart = Literal["random", "layers", "aligned"]

_COPIED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
_COPIED_IF_BOTH_HAVE_THEM = (
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
    "self_attn.o_proj.bias",
)


@torch.no_grad()
def initialise_from_target(
    drafter: Drafter, target_dir: str | Path, strategy: WarmStart, features_TF: Tensor | None = None
) -> None:
    """Set the drafter's weights from its target's, in place.

    "random" keeps what a new drafter has. "layers" copies the target's last layers and final norm. "aligned"
    also lets every layer read the last tap as the target's next layer would: `fc` is the identity on it,
    `hidden_norm` is that layer's input norm, and where the target does not norm queries and keys, the gains
    of `q_norm` and `k_norm` are the root mean square of what the target computes.

    Args:
        drafter: with `feature_scale` already set, where there is one.
        target_dir: HF checkpoint of the target.
        strategy: see above.
        features_TF: some captured features, to measure these root mean squares on; without them inputs are
            taken to be white.

    Raises:
        CheckpointError: the target's layers have other shapes or names than the drafter's.
    """
    if strategy == "random":
        return
    target = _Target(Path(target_dir))
    first = drafter.config.num_target_layers - len(drafter.layers)
    for index, layer in enumerate(drafter.layers):
        target.copy_layer(first + index, layer)
    target.copy("norm.weight", drafter.norm.weight)
    if strategy == "layers":
        return
    width, tap = drafter.config.hidden_size, drafter.config.target_layer_ids[-1]
    drafter.fc.weight.zero_()
    identity = torch.eye(width, device=drafter.fc.weight.device)
    if drafter.feature_scale is not None:
        identity = identity / drafter.feature_scale[-width:]
    drafter.fc.weight[:, -width:] = identity
    target.copy(f"layers.{tap + 1}.input_layernorm.weight", drafter.hidden_norm.weight)
    if not target.has(f"layers.{first}.self_attn.q_norm.weight"):
        rows_TD = None if features_TF is None else features_TF[:, -width:].to(drafter.fc.weight)
        for layer in drafter.layers:
            assert isinstance(layer, Layer)
            _set_gains(layer, rows_TD)


class _Target:
    """Tensors of the target by their name inside the decoder, whatever prefix its checkpoint uses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        kind = json.loads((directory / "config.json").read_text()).get("model_type", "")
        if kind.startswith("gemma"):
            raise CheckpointError(f"{directory}: {kind} norms scale by 1 + weight; use warm start 'random'")
        self.files = tensor_files(directory)
        anchor = "layers.0.input_layernorm.weight"
        names = [name for name in self.files if name.endswith(anchor)]
        if not names:
            raise CheckpointError(f"{directory}: no tensor *{anchor}; use warm start 'random'")
        self.prefix = min(names, key=len).removesuffix(anchor)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.files

    def copy(self, name: str, parameter: Tensor) -> None:
        if not self.has(name):
            raise CheckpointError(f"{self.directory}: no tensor {self.prefix}{name}; use warm start 'random'")
        tensor = read_tensor(self.files, self.prefix + name)
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                f"{self.directory}: {self.prefix}{name} is {list(tensor.shape)}, the drafter's is "
                f"{list(parameter.shape)}; use warm start 'random' or the target's sizes"
            )
        parameter.copy_(tensor)

    def copy_layer(self, index: int, layer: nn.Module) -> None:
        parameters = dict(layer.named_parameters())
        for name in _COPIED:
            self.copy(f"layers.{index}.{name}", parameters[name])
        for name in _COPIED_IF_BOTH_HAVE_THEM:
            if name in parameters and self.has(f"layers.{index}.{name}"):
                self.copy(f"layers.{index}.{name}", parameters[name])


def _set_gains(layer: Layer, rows_TD: Tensor | None) -> None:
    """Give q_norm and k_norm the root mean square of projected, normed rows as gain."""
    for projection, norm in (
        (layer.self_attn.q_proj, layer.self_attn.q_norm),
        (layer.self_attn.k_proj, layer.self_attn.k_norm),
    ):
        if rows_TD is None:
            scaled_QD = projection.weight * layer.input_layernorm.weight
            rms = scaled_QD.square().sum(1).mean().sqrt()
        else:
            rms = projection(layer.input_layernorm(rows_TD)).square().mean().sqrt()
        norm.weight.fill_(float(rms))
