"""What the reader and the writer of a feature store agree on: the manifest and the parts it implies."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from pipelines.files import write_json_atomically
from pipelines.rowfile import HEADER_BYTES, StoreError, sealed_bytes
from pipelines.rowformat import DTYPES, FEATURES, LAST, RowFormat, row_formats

SCHEMA_VERSION = 2
_READABLE_VERSIONS = (1, 2)  # 1: all rows, no last hidden states, no e4m3
TAP_CONVENTION = (
    "target_layer_ids are 0-based decoder-layer OUTPUTS (the residual stream after layer l, before any final "
    "norm); a feature row is the concatenation of these taps in listed order"
)
_TAGS = {FEATURES: "part", LAST: "last"}
KEEP_ALL: dict[str, Any] = {"rule": "all"}


@dataclass(frozen=True)
class Manifest:
    """manifest.json.

    Attributes:
        target: name or path of the target.
        target_fingerprint: `pipelines.target.config_fingerprint` of it.
        tokenizer_fingerprint: `pipelines.target.tokenizer_fingerprint` of it.
        target_layer_ids: taps, strictly increasing 0-based layer outputs.
        hidden_size: width of one tap.
        dtype: dtype of the stored rows.
        target_dtype: dtype that the target ran in.
        keep: which rows of a sample are stored: {"rule": "all"}, or {"rule": "windows", "window",
            "neighbourhoods", "neighbourhood_length", "label_reach", "seed"} (`pipelines.keep`).
        last_hidden: the target's state before its final norm is stored at label rows.
        backend: engine that made the rows.
        settings: everything else that decides the content (sampling, length limit), as given.
        command: the command that made the store.
        parity: how far the rows of the two backends were apart on the first sample; {} if not compared.
        counts: samples, tokens, supervised tokens, rows, rejected records; written when a run ends.
    """

    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    target_layer_ids: list[int]
    hidden_size: int
    dtype: str = "bfloat16"
    target_dtype: str = "bfloat16"
    keep: dict[str, Any] = field(default_factory=lambda: dict(KEEP_ALL))
    last_hidden: bool = False
    backend: str = "none"
    settings: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    parity: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    tap_convention: str = TAP_CONVENTION

    @property
    def feature_width(self) -> int:
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the rows that a reader gets; bfloat16 where e4m3 is stored."""
        return self.formats[FEATURES].dtype

    @property
    def formats(self) -> dict[str, RowFormat]:
        """Family of parts -> how its rows are stored."""
        taps = len(self.target_layer_ids)
        return row_formats(self.dtype, taps, self.hidden_size, last_hidden=self.last_hidden)

    @classmethod
    def load(cls, store: Path) -> Manifest:
        """Read and check the manifest of `store`; that of an older schema version as its equal in this one.

        Raises:
            StoreError: missing, unreadable, or of another schema version.
        """
        path = store / "manifest.json"
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise StoreError(f"{store} is not a feature store: it has no manifest.json") from None
        except (json.JSONDecodeError, OSError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from None
        if content.get("schema_version") not in _READABLE_VERSIONS:
            raise StoreError(
                f"{path} has schema version {content.get('schema_version')}, expected one of "
                f"{_READABLE_VERSIONS}"
            )
        known = {item.name for item in fields(cls)}
        try:
            manifest = cls(**{key: value for key, value in content.items() if key in known})
        except TypeError as error:
            raise StoreError(f"{path} lacks a field: {error}") from None
        if manifest.dtype not in DTYPES:
            raise StoreError(f"{path}: dtype {manifest.dtype!r}, expected one of {sorted(DTYPES)}")
        return replace(manifest, schema_version=SCHEMA_VERSION)

    def save(self, store: Path) -> None:
        write_json_atomically(store / "manifest.json", asdict(self))

    def difference(self, other: Manifest) -> str | None:
        """Why rows of `other` must not be mixed with rows of this store; None if they may.

        The command, the counts and the target's path may differ; its fingerprints may not.
        """
        for name in (
            "target_fingerprint", "tokenizer_fingerprint", "target_layer_ids", "hidden_size", "dtype",
            "target_dtype", "keep", "last_hidden", "settings",
        ):  # fmt: skip
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: the store has {mine!r}, this run {theirs!r}"
        return None


def part_name(family: str, shard: int, number: int) -> str:
    return f"shard-{shard:06d}.{_TAGS[family]}-{number:03d}.safetensors"


def part_family(name: str) -> str:
    """The family that a part's name says it belongs to."""
    tag = name.split(".")[1].partition("-")[0]
    return next(family for family, known in _TAGS.items() if known == tag)


def part_path(store: Path, name: str) -> Path:
    """Where a committed part lies."""
    return store / part_family(name) / name


def part_problem(store: Path, name: str, rows: int, manifest: Manifest) -> str | None:
    """What is wrong with a sealed part, judged by its size alone; None if nothing."""
    path = part_path(store, name)
    expected = sealed_bytes(rows, manifest.formats[part_family(name)])
    if not path.is_file():
        return f"{name}: missing"
    found = path.stat().st_size
    if found != expected:
        return f"{name}: {found} bytes, expected {expected} ({HEADER_BYTES} + {rows} rows)"
    return None
