"""What a capture is asked to do, and what follows from it before anything runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drafter.config import ConfigError, DrafterConfig
from drafter.taps import default_layer_ids, tap_problem
from pipelines.keep import WindowRule, keep_dict
from pipelines.store import Manifest
from pipelines.target import config_fingerprint, target_config, tokenizer_fingerprint

FEATURE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
_WINDOW = 2048  # of the released drafters


class CaptureError(RuntimeError):
    """A capture cannot be done as asked."""


class CaptureOptions(BaseModel):
    """Options of `longdraft capture`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(description="Folder or hub id of the target.")
    data: list[str] = Field(
        min_length=1,
        description="JSON lines, JSON, parquet, a folder of these, or a hub data set (`name[:split]`).",
    )
    out: Path = Field(description="Folder of the store; an existing one is continued.")
    regenerate: bool = Field(
        default=False, description="Let the target write the answers, captured in the same pass."
    )
    max_new_tokens: int = Field(default=512, ge=1, description="Longest answer of a turn with --regenerate.")
    temperature: float = Field(default=0.0, ge=0, description="Of the answers; 0 is greedy.")
    seed: int = Field(
        default=0, description="Of the neighbourhoods, and of the answers when the temperature is above 0."
    )
    drafter: Path | None = Field(
        default=None, description="Drafter folder or config.json whose taps are captured."
    )
    taps: list[int] = Field(
        default=[], description="Layer outputs to capture, 0-based; default: --num-taps evenly spread ones."
    )
    num_taps: int = Field(default=5, ge=1, description="Number of evenly spread taps.")
    max_length: int | None = Field(
        default=None, ge=2, description="Longest sample in tokens; longer records are listed and skipped."
    )
    limit: int | None = Field(default=None, ge=1, description="Use only the first records of the data.")
    backend: Literal["vllm", "hf"] = Field(
        default="vllm", description="Engine; hf runs any transformers target, slower."
    )
    target_dtype: str = Field(
        default="auto", description="dtype that the target runs in; auto is its checkpoint's."
    )
    feature_dtype: Literal["bf16", "fp16", "fp32", "fp8"] = Field(
        default="bf16", description="dtype of the stored rows; fp8 is e4m3 with a scale per row and tap."
    )
    keep: Literal["all", "windows"] = Field(
        default="all",
        description="Rows that are stored: all, or those that a drafter of sliding layers can see from the "
        "answers.",
    )
    window: int | None = Field(
        default=None,
        ge=1,
        description=f"Rows that a layer sees, for --keep windows; by default the drafter's or {_WINDOW}.",
    )
    neighbourhoods: int = Field(
        default=8, ge=1, description="Chosen, with --keep windows, in samples that are supervised widely."
    )
    neighbourhood_length: int = Field(
        default=2048, ge=1, description="Tokens of a neighbourhood; anchors are drawn only there."
    )
    last_hidden: bool = Field(
        default=False,
        description="Also store the target's last hidden states where a block predicts the next token, for "
        "losses that compare with the target's own distribution.",
    )
    disk_budget: float | None = Field(
        default=None, gt=0, description="GiB; refuse to begin if the store could grow beyond this."
    )
    kv_cache_gib: float | None = Field(default=None, gt=0, description="Key/value cache of vLLM on a CPU.")
    hidden_cache: Literal["auto", "paged", "bounded"] = Field(
        default="auto",
        description="vLLM's pages for hidden states: paged keeps running samples whole and reuses common "
        "prefixes, bounded needs the same memory at any length; auto is bounded above 16,384 tokens.",
    )
    max_concurrent: int = Field(default=128, ge=1, description="Sequences that run at once in vLLM.")
    step_tokens: int = Field(default=2048, ge=1, description="Tokens of one engine step (prefill chunk).")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs that share the target in vLLM.")
    template_args: list[str] = Field(
        default=[],
        description="Variables of the chat template as key=value, for instance enable_thinking=false.",
    )
    parity: bool = Field(
        default=True, description="Compare the first sample of a vLLM run with transformers before the run."
    )
    verify: bool = Field(
        default=False,
        description="Check all checksums of an existing store first; recapture what is damaged.",
    )
    part_bytes: int = Field(
        default=1 << 30, ge=1 << 12, description="Size at which a part of the store ends."
    )

    def template_variables(self) -> dict[str, Any]:
        """`template_args` as a dictionary; a value that is JSON is taken as such.

        Raises:
            CaptureError: an entry without `=`.
        """
        variables: dict[str, Any] = {}
        for entry in self.template_args:
            key, equals, value = entry.partition("=")
            if not equals:
                raise CaptureError(f"template_args: expected key=value, found {entry!r}")
            try:
                variables[key] = json.loads(value)
            except ValueError:
                variables[key] = value
        return variables


def choose_taps(options: CaptureOptions, target: Path) -> list[int]:
    """Taps as given, those of the drafter, or evenly spread ones.

    Raises:
        CaptureError: they do not increase, do not exist in the target, or are given twice.
    """
    layers = int(target_config(target)["num_hidden_layers"])
    if options.taps and options.drafter is not None:
        raise CaptureError("give either taps or a drafter that names them, not both")
    taps = options.taps or default_layer_ids(layers, options.num_taps)
    drafter = _drafter_config(options)
    if drafter is not None:
        taps = list(drafter.target_layer_ids)
    problem = tap_problem(taps, layers)
    if problem:
        raise CaptureError(problem)
    return taps


def window_rule(options: CaptureOptions) -> WindowRule:
    """The rule `windows` with the options' figures, whether it is asked for or not.

    Raises:
        CaptureError: it is asked for, and a layer of the drafter sees more than the window.
    """
    drafter = _drafter_config(options)
    windows = [mask.window for mask in drafter.layer_masks] if drafter is not None else []
    sliding = [window for window in windows if window is not None]
    window = options.window or max(sliding, default=_WINDOW)
    seen = ", ".join("everything" if w is None else str(w) for w in windows)
    if options.keep == "windows" and (len(sliding) < len(windows) or window < max(sliding, default=0)):
        raise CaptureError(
            f"--keep windows stores what layers with a window of {window} see, but those of "
            f"{options.drafter} see {seen}; give a larger --window or --keep all"
        )
    return WindowRule(window, options.neighbourhoods, options.neighbourhood_length, options.seed)


def _drafter_config(options: CaptureOptions) -> DrafterConfig | None:
    if options.drafter is None:
        return None
    file = options.drafter / "config.json" if options.drafter.is_dir() else options.drafter
    try:
        return DrafterConfig.from_dict(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, ConfigError) as error:
        raise CaptureError(f"{file} is not a drafter's config.json: {error}") from None


def length_limit(options: CaptureOptions, target: Path) -> int:
    """Longest sample: as asked, at most what the target has positions for (vLLM needs one more for its
    token).

    Raises:
        CaptureError: more is asked than the target can read.
    """
    positions = target_config(target).get("max_position_embeddings")
    if positions is None:
        return options.max_length or 1 << 20
    if options.max_length is not None and options.max_length >= positions:
        raise CaptureError(
            f"max_length {options.max_length} must be below the target's {positions} positions: one stays "
            "free for the token that vLLM samples"
        )
    return options.max_length or int(positions) - 1


def new_manifest(options: CaptureOptions, target: Path, taps: list[int]) -> Manifest:
    """The manifest of a store made with these options."""
    config = target_config(target)
    settings: dict[str, Any] = {"regenerate": options.regenerate, "template": options.template_variables()}
    if options.regenerate:
        settings.update(
            max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=options.seed
        )
    return Manifest(
        target=options.target,
        target_fingerprint=config_fingerprint(target),
        tokenizer_fingerprint=tokenizer_fingerprint(target),
        target_layer_ids=taps,
        hidden_size=int(config["hidden_size"]),
        dtype=FEATURE_DTYPES[options.feature_dtype],
        target_dtype=_run_dtype(options, config),
        keep=keep_dict(window_rule(options) if options.keep == "windows" else None),
        last_hidden=options.last_hidden,
        backend=options.backend,
        settings=settings,
        command=shlex.join(sys.argv),
    )


def _run_dtype(options: CaptureOptions, config: dict[str, Any]) -> str:
    if options.target_dtype != "auto":
        return options.target_dtype
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
