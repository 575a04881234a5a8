"""What an evaluation is asked to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from eval.block_drafter import read_config
from eval.errors import EvalError
from eval.responses import PLAIN

_DEFAULT_BLOCK = 8


class EvalOptions(BaseModel):
    """What to evaluate and how."""

    model_config = ConfigDict(extra="forbid")

    target: str = Field(default="", description="Target checkpoint directory or hub id")
    drafter: list[str] = Field(
        default=[], description="Drafter directories, each optionally as NAME=DIRECTORY"
    )
    data: list[str] = Field(
        default=["builtin"],
        description="builtin, humaneval, stdlib, hub:ID[@split] or JSONL files, each optionally as NAME=FILE",
    )
    limit: int | None = Field(
        default=None, ge=1, description="Prompts per data set, spread over its categories"
    )
    max_new_tokens: int = Field(default=256, ge=2, description="Longest response, in tokens")
    temperature: float = Field(default=0.0, ge=0.0, description="0 decodes greedily")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Of the target; drafters never apply it")
    top_k: int = Field(default=0, ge=0, description="Of the target; 0 keeps all tokens")
    block: int | None = Field(
        default=None,
        ge=2,
        description="Rows of a block, anchor included; default: as each drafter was trained",
    )
    adaptive: list[str] = Field(
        default=[],
        description="Acceptance models (replay --adaptive), NAME=FILE or FILE for the only drafter: decode "
        "once more with blocks cut where verifying one more draft costs more than it gives",
    )
    baseline: list[Literal["lookup", "v1", "none"]] = Field(
        default=["lookup"],
        description="lookup: n-gram prompt lookup; v1: each drafter without convolutions and selector; none: "
        "only plain decoding and the drafters",
    )
    backend: Literal["hf", "vllm"] = Field(
        default="hf", description="hf: this project's own loops; vllm: real engines, one at a time"
    )
    concurrency: list[PositiveInt] = Field(
        default=[1, 4], min_length=1, description="Requests in flight at once in vllm, one figure for each"
    )
    engine_args: dict[str, Any] = Field(default={}, description="Further arguments of vllm's EngineArgs")
    batch_size: int = Field(
        default=1, ge=1, description="Prompts that the hf backend decodes together; tokens stay the same"
    )
    repeats: int = Field(default=1, ge=1, description="Timed runs of every method on every prompt")
    seed: int = Field(default=0, description="Of prompt choice, sampling and resampling")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Of all weights")
    device: str = Field(default="auto", description="auto, cpu or cuda")
    attention: str = Field(
        default="auto",
        description="Of the hf backend's target: folded, or an attn_implementation of transformers; auto "
        "takes flash_attention_2 in half precision on a GPU where flash-attn is installed, else folded",
    )
    prepack: bool = Field(
        default=True, description="Keep packed copies of the weights for few-row steps on a CPU"
    )
    contexts: str | None = Field(
        default=None,
        description="Edges of the report's context buckets, as 2k,4k,7k; default 2k,8k,32k,128k,512k,1m",
    )
    template_args: dict[str, Any] = Field(default={}, description="Arguments of the target's chat template")
    stop: bool = Field(default=True, description="End responses at the target's stop tokens")
    out: Path = Field(default=Path("runs/eval"), description="Folder of responses, report and plots")
    compare: tuple[Path, Path] | None = Field(
        default=None, description="Evaluate nothing; compare two report.json, paired by prompt"
    )
    allow_differences: list[str] = Field(
        default=[], description="Settings that the two compared reports may differ in, or all"
    )

    @model_validator(mode="after")
    def _has_something_to_do(self) -> EvalOptions:
        if not self.target and self.compare is None:
            raise ValueError("--target: expected a checkpoint to evaluate, or --compare with two reports")
        return self

    @model_validator(mode="after")
    def _adapts_what_it_can(self) -> EvalOptions:
        if self.adaptive and (self.backend != "hf" or self.batch_size > 1):
            raise ValueError("--adaptive cuts blocks in the hf backend with --batch-size 1 only")
        if self.adaptive and self.temperature > 0:
            raise ValueError(
                "--adaptive needs --temperature 0: drawn drafts that are kept for what they are would change "
                "the distribution of responses"
            )
        return self

    @field_validator("baseline")
    @classmethod
    def _none_stands_alone(cls, baseline: list[str]) -> list[str]:
        if "none" in baseline and len(baseline) > 1:
            raise ValueError(
                f"`none` beside other baselines ({', '.join(baseline)}): give `none` or the others"
            )
        return [name for name in baseline if name != "none"]

    def torch_device(self) -> torch.device:
        """The device that `device` names."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


def blocks_of(options: EvalOptions) -> dict[str, int]:
    """Every speculative method, in the order to show them, and the rows of its block.

    Raises:
        EvalError: no method, or two of one name.
    """
    blocks: list[tuple[str, int]] = []
    adaptive = adaptive_of(options)
    if "lookup" in options.baseline:
        blocks.append(("lookup", options.block or _DEFAULT_BLOCK))
    for given in options.drafter:
        name, folder = named(given)
        config = read_config(folder)
        block = options.block or config.block_size
        blocks.append((name, block))
        if "v1" in options.baseline and config.version == 2:
            blocks.append((f"{name} as v1", block))
        if name in adaptive:
            blocks.append((f"{name} adaptive", block))
    names = [PLAIN, *(name for name, _ in blocks)]
    if len(names) == 1:
        raise EvalError("nothing to compare with plain decoding: give a drafter or the baseline `lookup`")
    if len(set(names)) < len(names):
        raise EvalError(f"two methods share a name among {', '.join(names)}; give drafters as NAME=DIRECTORY")
    return dict(blocks)


def adaptive_of(options: EvalOptions) -> dict[str, Path]:
    """The acceptance model of each drafter that has one.

    Raises:
        EvalError: a model for no drafter.
    """
    drafters = [name for name, _ in map(named, options.drafter)]
    found = {}
    for given in options.adaptive:
        name, mark, file = given.rpartition("=")
        if not mark and len(drafters) == 1:
            name = drafters[0]
        if name not in drafters:
            raise EvalError(
                f"--adaptive {given}: expected NAME=FILE with a drafter among {', '.join(drafters)}"
            )
        found[name] = Path(file)
    return found


def named(given: str) -> tuple[str, Path]:
    """Split NAME=DIRECTORY; a directory alone is named by its last part."""
    name, _, place = given.rpartition("=")
    return name or Path(place).name, Path(place)
