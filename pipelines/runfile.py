"""The run file: everything that decides a training run, in one YAML file that can be run again.

Each section is owned by the module that acts on it. Unknown keys are refused with the nearest valid name
and the place where they stand; flags override the file by dotted keys. The resolved file is saved beside
the run.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from csbp.backends import BackendName
from csbp.choice import Placement
from csbp.footprint import Recompute
from csbp.plan import Mode
from csbp.routes import Transport
from drafter.objective import ObjectiveConfig
from drafter.precision import Precision
from pipelines.corpus import DataConfig
from pipelines.drafter_source import DrafterSource
from pipelines.draw import AnchorConfig
from pipelines.files import write_text_atomically
from pipelines.optimization import OptimizerConfig, ScheduleConfig
from pipelines.sampler import BatchConfig
from pipelines.training_state import CheckpointConfig
from pipelines.validation import ValidationConfig

# Sections and keys that may differ when a run goes on: where and how fast it runs, not what it computes.
FREE_ON_RESUME = (
    "checkpoint",
    "validation",
    "logging",
    "parallel",
    "batch.micro",
    "data.prefetch",
    "data.upload_ahead",
    "out",
)


AnyTransport = Transport | Literal["auto"]


class RunFileError(ValueError):
    """A run file, or a flag over it, cannot be used."""


class ParallelConfig(BaseModel):
    """How ranks share the work."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context_ranks: int | Literal["auto"] = Field(
        default=1,
        description="Ranks that share the sequences of one replica; the rest of the world is replicas. "
        "`auto` takes the fewest whose memory fits.",
    )
    zero: Literal[0, 1, 2] = Field(
        default=0,
        description="DeepSpeed ZeRO stage, over all ranks: 0 shards nothing, 1 the optimizer state, 2 also "
        "gradients.",
    )
    mode: Mode = Field(
        default="csbp",
        description="Who computes what: `csbp`, or a baseline that it is compared with. All give the same "
        "run.",
    )
    placement: Placement | Literal["auto"] = Field(
        default="auto", description="How blocks and context rows are dealt to the ranks of a replica."
    )
    transport: AnyTransport | tuple[AnyTransport, ...] = Field(
        default="auto",
        description="How context keys and values reach the blocks: one way for all layers, or a list of one "
        "a layer.",
    )
    retain: int | None = Field(
        default=None,
        ge=1,
        description="Received shards that a ring keeps for the backward pass; null keeps all, 1 bounds a "
        "layer's memory to two shards and sends the others again.",
    )
    recompute: Recompute = Field(
        default="none",
        description="What the backward pass makes again instead of keeping it: `context` rows, chunk by "
        "chunk, which bounds them to features, keys and values; activations of `blocks`, layer by layer; "
        "`all`. Same gradients, less memory, more time.",
    )
    attention_backend: BackendName | Literal["auto"] = Field(
        default="auto",
        description="`triton` kernels on a GPU, `flash` PyTorch's FlashAttention where tiles are dense, "
        "`torch` the plain form, of the drafter's other kernels too; `auto` takes, for half "
        "precision on a GPU, the faster of the first two at the run's own shape, `torch` elsewhere, and "
        "says why.",
    )
    deterministic: bool = Field(
        default=False,
        description="Only operations whose results do not depend on the order of parallel sums; slower.",
    )
    device: str = Field(
        default="auto",
        description="Rates that placement, transports and `context_ranks: auto` go by: a preset of `plan "
        "--device`, or a .json file of `bench device --out`; `auto` takes the preset nearest to this "
        "machine.",
    )

    @property
    def transports(self) -> tuple[AnyTransport, ...]:
        """One transport for all layers, or one a layer."""
        return (self.transport,) if isinstance(self.transport, str) else self.transport

    @model_validator(mode="after")
    def _baselines_decide_alone(self) -> ParallelConfig:
        if self.mode == "csbp":
            return self
        if self.placement != "auto" or set(self.transports) != {"auto"}:
            raise ValueError(f"mode {self.mode} has its own placement and transport; leave both auto")
        if self.context_ranks == "auto":
            raise ValueError(f"memory of mode {self.mode} is not planned; give context_ranks a number")
        return self


class LoggingConfig(BaseModel):
    """What is written while a run goes on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=10, ge=1, description="Optimizer steps that one line of metrics.jsonl pools.")
    tensorboard: bool = Field(default=True, description="Write event files to <out>/tensorboard.")


class RunConfig(BaseModel):
    """A training run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    out: Path = Field(
        description="Folder of the run: checkpoints, exports, logs. A run found there is continued."
    )
    seed: int = Field(
        default=0, ge=0, description="Names every random draw: initial weights, data order, anchors."
    )
    precision: Precision = Field(
        default="fp32",
        description="Operands of matrix products; sums, parameters and moments are float32 in any case. On "
        "a CPU `bf16` pays where it has AMX.",
    )
    data: DataConfig
    drafter: DrafterSource = Field(default_factory=DrafterSource)
    anchors: AnchorConfig = Field(default_factory=AnchorConfig)
    objective: ObjectiveConfig = Field(default_factory=lambda: ObjectiveConfig.model_validate({}))
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig
    batch: BatchConfig = Field(default_factory=lambda: BatchConfig.model_validate({}))
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)


def load_run(path: Path | str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a run file.

    Args:
        path: YAML file.
        overrides: values by dotted key (``{"optimizer.lr": 1e-3}``); they win over the file.

    Raises:
        RunFileError: the file is missing or not YAML, a key is unknown, or a value does not fit; the
        message names
            the file and line, or the flag, the key, what was expected and, for a key, the nearest valid one.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunFileError(f"cannot read the run file {path}: {error}") from None
    try:
        content = yaml.safe_load(text) or {}
        lines = _key_lines(yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise RunFileError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise RunFileError(f"{path} must hold a mapping of sections, found {type(content).__name__}")
    places = {key: f"{path}:{line}" for key, line in lines.items()}
    for key, value in (overrides or {}).items():
        _set_dotted(content, key, value)
        places[key] = f"flag --{key}"
    return _validated(content, places, str(path))


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """``["--optimizer.lr", "1e-3", "--out=runs/a"]`` as values by dotted key; values are read as YAML.

    Raises:
        RunFileError: an argument is no flag, or a flag has no value.
    """
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise RunFileError(f"expected a flag like --optimizer.lr 1e-3, found {flag!r}")
        key, has_value, text = flag[2:].partition("=")
        if not has_value:
            if not rest:
                raise RunFileError(f"flag --{key} has no value; write --{key} VALUE")
            text = rest.pop(0)
        values[key.replace("-", "_")] = yaml.safe_load(text)
    return values


def save_run(config: RunConfig, path: Path) -> None:
    """Write the resolved run file, which `load_run` reads back to an equal configuration."""
    content = config.model_dump(mode="json")
    write_text_atomically(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110))


def settings_by_key(config: RunConfig) -> dict[str, Any]:
    """Every setting by its dotted key."""
    return _flat(config.model_dump(mode="json"))


def differences(saved: RunConfig, given: RunConfig) -> list[str]:
    """Keys that decide what a run computes and differ between the two, as ``key: saved -> given``."""
    one, other = settings_by_key(saved), settings_by_key(given)
    return [
        f"{key}: {one.get(key)} -> {other.get(key)}"
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key) and not _is_free(key)
    ]


def resolve_paths(config: RunConfig) -> RunConfig:
    """The same run with absolute paths, so that its saved file works from any folder."""
    drafter = config.drafter.with_absolute_paths()
    data = config.data.model_copy(update={"stores": [path.absolute() for path in config.data.stores]})
    return config.model_copy(update={"out": config.out.absolute(), "data": data, "drafter": drafter})


def _validated(content: dict[str, Any], places: Mapping[str, str], path: str) -> RunConfig:
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        problems = [_problem(item, places, path) for item in error.errors()]
        raise RunFileError("\n".join(dict.fromkeys(problems))) from None


def _problem(item: Any, places: Mapping[str, str], path: str) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    place = next((places[k] for k in _prefixes(location) if k in places), path)
    if item["type"] == "extra_forbidden":
        valid = _valid_keys(location[:-1])
        near = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.4)
        hint = f"did you mean {'.'.join([*location[:-1], near[0]])!r}? " if near else ""
        return f"{place}: unknown key {key!r}; {hint}Valid here: {', '.join(valid)}"
    if item["type"] == "missing":
        return f"{place}: required key {key!r} is missing; add it or give --{key}"
    return f"{place}: {key or 'run'}: {item['msg']}, found {item['input']!r}"


def _prefixes(location: Sequence[str]) -> list[str]:
    return [".".join(location[:end]) for end in range(len(location), 0, -1)]


def _valid_keys(section: Sequence[str]) -> list[str]:
    """Field names of the section at a dotted place, through optional and nested models."""
    model: Any = RunConfig
    for name in section:
        fields = getattr(model, "model_fields", {})
        if name not in fields:
            break
        annotation = fields[name].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return list(model.model_fields)


def _set_dotted(content: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    node = content
    for name in sections:
        child = node.setdefault(name, {})
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            raise RunFileError(f"flag --{key}: {name!r} is not a section but {child!r}")
        node = child
    node[last] = value


def _key_lines(node: yaml.Node | None, prefix: str = "") -> dict[str, int]:
    """Line (from 1) of every key of a YAML document, by dotted key."""
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}{key_node.value}"
            lines[key] = key_node.start_mark.line + 1
            lines |= _key_lines(value_node, f"{key}.")
    return lines


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in FREE_ON_RESUME)
