"""What a report has to carry so that somebody else can get the same figures, or see why not."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from eval.block_drafter import read_config
from eval.cache_size import draft_cache
from eval.draft_length import AcceptanceModel
from eval.options import EvalOptions, adaptive_of, blocks_of, named
from pipelines.target import config_fingerprint, target_config, tokenizer_fingerprint

_NOT_SETTINGS = {
    "data", "limit", "out", "target", "drafter", "device", "contexts", "compare", "allow_differences",
    "adaptive",
}  # fmt: skip


def settings_of(options: EvalOptions, checkpoint: Path) -> dict[str, Any]:
    """Everything that a response depends on; not which prompts are asked nor where results go."""
    kept = options.model_dump(mode="json", exclude=_NOT_SETTINGS)
    blocks = blocks_of(options)
    return {
        **kept,
        "target": {
            "name": options.target,
            "config": config_fingerprint(checkpoint),
            "tokenizer": tokenizer_fingerprint(checkpoint),
            "weights": _weights_hash(checkpoint),
        },
        "drafters": {name: _weights_hash(folder) for name, folder in map(named, options.drafter)},
        "adaptive": {
            name: vars(AcceptanceModel.load(path, blocks[name] - 1))
            for name, path in adaptive_of(options).items()
        },
        "methods": {name: {"block": block} for name, block in blocks.items()},
        "device": options.torch_device().type,
        "threads": torch.get_num_threads(),
    }


def draft_caches(options: EvalOptions, checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Bytes that each drafter keeps, by method; its v1 and its adaptive form keep the same."""
    element = getattr(torch, options.dtype).itemsize
    found: dict[str, dict[str, Any]] = {}
    for name, folder in map(named, options.drafter):
        size = draft_cache(read_config(folder), target_config(checkpoint), element).to_dict()
        labels = (name, f"{name} as v1", f"{name} adaptive")
        found |= {label: size for label in labels if label in blocks_of(options)}
    return found


def _weights_hash(directory: Path) -> str:
    """Hash of both configs, and of names, sizes and end megabytes of the weights: cheap at any size."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    generation = directory / "generation_config.json"  # names the stop tokens
    digest.update(generation.read_bytes() if generation.is_file() else b"")
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def machine(options: EvalOptions) -> dict[str, Any]:
    """Hardware and versions."""
    device = options.torch_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "hardware": {
            "device": device.type,
            "name": name,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
            "code": _code_hash(),
        },
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _code_hash() -> str:
    """Hash of the project's own sources that a figure depends on: a checkout has no version number."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for package in ("drafter", "eval") for path in (root / package).glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
