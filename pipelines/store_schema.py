"""What the reader and the writer of a feature store agree on: manifest, table columns, checks of one part."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipelines.files import write_json_atomically
from pipelines.rowfile import DTYPES, HEADER_BYTES, StoreError, sealed_bytes

SCHEMA_VERSION = 1
TAP_CONVENTION = (
    "target_layer_ids are 0-based decoder-layer OUTPUTS (the residual stream after layer l, before any final "
    "norm); a feature row is the concatenation of these taps in listed order"
)

SEGMENT = pa.struct([
    ("part", pa.string()),
    ("part_row", pa.int64()),
    ("rows", pa.int64()),
    ("sha256", pa.string()),
])  # fmt: skip
SAMPLE_SCHEMA = pa.schema([
    ("id", pa.string()),
    ("conversation", pa.string()),
    ("source", pa.string()),
    ("prompt_length", pa.int64()),
    ("token_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.bool_())),
    ("document_starts", pa.list_(pa.int64())),
    ("rows", pa.int64()),
    ("digest", pa.string()),
    ("segments", pa.list_(SEGMENT)),
])  # fmt: skip
_PARTS_KEY = b"longdraft.parts"


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
        window_rule: which rows of a sample are stored; "all".
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
    window_rule: str = "all"
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
        return DTYPES[self.dtype]

    @classmethod
    def load(cls, store: Path) -> Manifest:
        """Read and check the manifest of `store`.

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
        if content.get("schema_version") != SCHEMA_VERSION:
            raise StoreError(
                f"{path} has schema version {content.get('schema_version')}, expected {SCHEMA_VERSION}"
            )
        known = {item.name for item in fields(cls)}
        try:
            manifest = cls(**{key: value for key, value in content.items() if key in known})
        except TypeError as error:
            raise StoreError(f"{path} lacks a field: {error}") from None
        if manifest.dtype not in DTYPES:
            raise StoreError(f"{path}: dtype {manifest.dtype!r}, expected one of {sorted(DTYPES)}")
        return manifest

    def save(self, store: Path) -> None:
        write_json_atomically(store / "manifest.json", asdict(self))

    def difference(self, other: Manifest) -> str | None:
        """Why rows of `other` must not be mixed with rows of this store; None if they may.

        The command, the counts and the target's path may differ; its fingerprints may not.
        """
        for name in (
            "target_fingerprint", "tokenizer_fingerprint", "target_layer_ids", "hidden_size", "dtype",
            "target_dtype", "window_rule", "settings",
        ):  # fmt: skip
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: the store has {mine!r}, this run {theirs!r}"
        return None


@dataclass(frozen=True)
class TokenSample:
    """Tokens of a sample to be written.

    Attributes:
        id: unique content hash.
        token_ids: int64 [L], L >= 2.
        loss_mask: bool [L].
        document_starts: int64 [documents], the first is 0, strictly increasing; None means one document.
        conversation: id shared by the samples of a conversation; None means the sample's own id.
        source: file and line of the record.
    """

    id: str
    token_ids: Tensor
    loss_mask: Tensor
    document_starts: Tensor | None = None
    conversation: str | None = None
    source: str = ""

    def table_row(self, num_rows: int, segments: list[dict[str, Any]]) -> dict[str, Any]:
        """The sample as a row of the samples table.

        Raises:
            StoreError: lengths, document starts or the number of feature rows do not fit together.
        """
        length = len(self.token_ids)
        starts = [0] if self.document_starts is None else self.document_starts.tolist()
        increasing = all(a < b for a, b in pairwise(starts))
        if len(self.loss_mask) != length:
            raise StoreError(f"sample {self.id}: {length} token ids but {len(self.loss_mask)} mask entries")
        if not starts or starts[0] != 0 or not increasing or starts[-1] >= length:
            raise StoreError(
                f"sample {self.id}: document_starts must begin with 0 and increase below {length}, "
                f"found {starts}"
            )
        if num_rows not in (length, length - 1):
            raise StoreError(
                f"sample {self.id}: {num_rows} feature rows for {length} tokens, "
                f"expected {length} or {length - 1}"
            )
        mask = self.loss_mask.to(torch.bool).tolist()
        row = {
            "id": self.id,
            "conversation": self.conversation or self.id,
            "source": self.source,
            "prompt_length": mask.index(True) if True in mask else length,
            "token_ids": self.token_ids.tolist(),
            "loss_mask": mask,
            "document_starts": starts,
            "rows": num_rows,
            "segments": segments,
        }
        row["digest"] = row_digest(row)
        return row


def row_digest(row: dict[str, Any]) -> str:
    """sha256 over the tokens, mask, document starts and segments of a table row."""
    digest = hashlib.sha256(row["id"].encode())
    digest.update(np.asarray(row["token_ids"], dtype=np.int32).tobytes())
    digest.update(np.asarray(row["loss_mask"], dtype=np.bool_).tobytes())
    digest.update(np.asarray(row["document_starts"], dtype=np.int64).tobytes())
    digest.update(json.dumps(row["segments"], sort_keys=True).encode())
    return digest.hexdigest()


def samples_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows of `TokenSample.table_row` as a table."""
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def write_shard(path: Path, table: pa.Table, parts: dict[str, int]) -> None:
    """Write a samples table to `path` and fsync it (the caller renames). `parts`: part name -> its rows."""
    schema = SAMPLE_SCHEMA.with_metadata({_PARTS_KEY: json.dumps(parts).encode()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table.combine_chunks().replace_schema_metadata(schema.metadata))
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def read_shard(path: Path) -> tuple[pa.Table, dict[str, int]]:
    """(samples table, part name -> rows) of one shard, memory-mapped.

    Raises:
        StoreError: the file is not a complete table of this schema.
    """
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        parts = json.loads(table.schema.metadata[_PARTS_KEY])
    except (pa.ArrowInvalid, OSError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged ({error}); capture again with --verify: it makes its samples anew"
        ) from None
    return table, parts


def part_problem(path: Path, rows: int, manifest: Manifest) -> str | None:
    """What is wrong with a sealed part, judged by its size alone; None if nothing."""
    expected = sealed_bytes(rows, manifest.feature_width, manifest.torch_dtype)
    if not path.is_file():
        return f"{path.name}: missing"
    found = path.stat().st_size
    if found != expected:
        return f"{path.name}: {found} bytes, expected {expected} ({HEADER_BYTES} + {rows} rows)"
    return None
