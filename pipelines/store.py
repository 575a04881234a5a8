"""The feature store: token ids, loss masks and metadata as Arrow tables, feature rows as safetensors parts.

    manifest.json                        what was captured: target, taps, dtype, counts, command
    samples/shard-000000.arrow           a row per sample (readable by `datasets`); appears last
    features/shard-000000.part-000.safetensors   tensor `features` [rows, taps * hidden]
    staging/                             the shard being written; nothing in it is ever read as data
    rejected.jsonl                       records that gave no sample, with the reason

A feature row is the concatenation of the taps in the order of `target_layer_ids`. The last token of a sample
may have no stored row, because a generated token that ended the sample was never an input of the target;
readers get zeros for it. No block can see that row: an anchor has at least one token after it and only rows
before it.

This module needs neither vLLM nor transformers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipelines.rowfile import TENSOR, StoreError, segment_digest
from pipelines.store_schema import Manifest, TokenSample, part_problem, read_shard, row_digest
from pipelines.store_writer import StoreWriter

__all__ = ["FeatureStore", "Manifest", "Sample", "StoreError", "StoreWriter", "TokenSample"]

_OPEN_PARTS = 256  # memory maps kept open per store


@dataclass(frozen=True)
class Sample:
    """One captured sequence.

    Attributes:
        id: content hash of the record it came from.
        token_ids: int64 [L].
        loss_mask: bool [L]; true where the token was produced by the target (or is a given answer).
        document_starts: int64 [documents]; the first is 0.
        conversation: id shared by all samples of one conversation; hold-out splits go by it.
        num_rows: feature rows stored, L or L - 1.
        metadata: `source` (file and line) and `prompt_length` (tokens before the first supervised one).
    """

    id: str
    token_ids: Tensor
    loss_mask: Tensor
    document_starts: Tensor
    conversation: str
    num_rows: int
    metadata: dict[str, Any]


@dataclass(frozen=True)
class _Segment:
    part: str
    part_row: int
    sample_row: int
    rows: int
    sha256: str


class FeatureStore:
    """Reader. Samples are ordered by id, so the order does not depend on how the capture ran."""

    def __init__(self, path: Path, manifest: Manifest, shards: list[pa.Table]) -> None:
        self.path = path
        self.manifest = manifest
        self._shards = shards  # memory maps, one record batch each
        places = [(shard, row) for shard, table in enumerate(shards) for row in range(len(table))]
        ids = [sample_id for table in shards for sample_id in table.column("id").to_pylist()]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        self.ids = [ids[at] for at in order]  # sample ids in the store's order
        self._places = [places[at] for at in order]
        self._segments: dict[int, list[_Segment]] = {}
        self._parts: OrderedDict[str, Any] = OrderedDict()

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = False) -> FeatureStore:
        """Open a store for reading.

        Args:
            path: the store's folder.
            verify: also compare every sample with its checksums (reads everything).

        Raises:
            StoreError: no store there, no complete sample yet, or a part or a sample is damaged; the message
                names each damaged part and what to do.
        """
        path = Path(path)
        manifest = Manifest.load(path)
        shards: list[pa.Table] = []
        problems: list[str] = []
        for file in sorted((path / "samples").glob("shard-*.arrow")):
            table, parts = read_shard(file)
            shards.append(table)
            for name, rows in parts.items():
                problem = part_problem(path / "features" / name, rows, manifest)
                if problem:
                    problems.append(problem)
        if problems:
            raise StoreError(_damage_message(path, problems))
        if not shards:
            raise StoreError(f"{path} holds no complete sample; run `longdraft capture` with it as --out")
        store = cls(path, manifest, shards)
        if verify:
            damaged = store.damaged_samples()
            if damaged:
                found = [f"{part}: sample {sample_id} ({what})" for sample_id, part, what in damaged]
                raise StoreError(_damage_message(path, found))
        return store

    def __len__(self) -> int:
        return len(self._places)

    @property
    def feature_width(self) -> int:
        """Elements of a feature row: taps * hidden size."""
        return self.manifest.feature_width

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of stored rows."""
        return self.manifest.torch_dtype

    @property
    def lengths(self) -> Tensor:
        """int64 [samples]: tokens of each sample, without reading the tokens."""
        per_shard = [np.diff(_values(table, "token_ids").offsets.to_numpy()) for table in self._shards]
        return torch.tensor([int(per_shard[shard][row]) for shard, row in self._places], dtype=torch.int64)

    def sample(self, index: int) -> Sample:
        """Everything but the features of sample `index` (0 <= index < len(store))."""
        fields = self._fields(index)
        return Sample(
            id=fields["id"][0].as_py(),
            token_ids=self._list_tensor("token_ids", index).to(torch.int64),
            loss_mask=self._list_tensor("loss_mask", index),
            document_starts=torch.tensor(fields["document_starts"][0].as_py(), dtype=torch.int64),
            conversation=fields["conversation"][0].as_py(),
            num_rows=fields["rows"][0].as_py(),
            metadata={
                "source": fields["source"][0].as_py(),
                "prompt_length": fields["prompt_length"][0].as_py(),
            },
        )

    def rows(self, index: int, start: int, stop: int) -> Tensor:
        """Feature rows [stop - start, taps * hidden] of sample `index` in the stored dtype.

        Only the pages of those rows are read. The last token's row is zeros if it has none (see the module).

        Raises:
            StoreError: the range is not inside the sample, or a part cannot be read.
        """
        segments = self._sample_segments(index)
        stored = segments[-1].sample_row + segments[-1].rows
        length = self._length(index)
        if not 0 <= start <= stop <= length:
            raise StoreError(
                f"rows [{start}, {stop}) of sample {index} asked for, but it has {length} tokens"
            )
        pieces = [
            self._slice(segment, max(start, segment.sample_row), min(stop, segment.sample_row + segment.rows))
            for segment in segments
            if segment.sample_row < stop and start < segment.sample_row + segment.rows
        ]
        missing = stop - max(start, stored)
        if missing > 0 or not pieces:
            pieces.append(torch.zeros(max(missing, 0), self.feature_width, dtype=self.dtype))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def damaged_samples(self) -> list[tuple[str, str, str]]:
        """(sample id, part or table, what differs) of each sample failing its checksums. Reads everything."""
        row_bytes = self.feature_width * self.dtype.itemsize
        damaged = []
        for index in range(len(self)):
            fields = self._fields(index).to_pylist()[0]
            if row_digest(fields) != fields["digest"]:
                damaged.append((fields["id"], "samples table", "token ids or mask altered"))
                continue
            for segment in self._sample_segments(index):
                file = self.path / "features" / segment.part
                if segment_digest(file, segment.part_row, segment.rows, row_bytes) != segment.sha256:
                    damaged.append((fields["id"], segment.part, "feature rows altered"))
                    break
        return damaged

    def _place(self, index: int) -> tuple[pa.Table, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a store with {len(self)} samples")
        shard, row = self._places[index]
        return self._shards[shard], row

    def _length(self, index: int) -> int:
        table, row = self._place(index)
        offsets = _values(table, "token_ids").offsets
        return int(offsets[row + 1].as_py() - offsets[row].as_py())

    def _fields(self, index: int) -> pa.Table:
        table, row = self._place(index)
        return table.slice(row, 1)

    def _list_tensor(self, name: str, index: int) -> Tensor:
        table, row = self._place(index)
        column = _values(table, name)
        start, stop = column.offsets[row].as_py(), column.offsets[row + 1].as_py()
        values = column.values.slice(start, stop - start).to_numpy(zero_copy_only=False)
        return torch.from_numpy(np.array(values))

    def _sample_segments(self, index: int) -> list[_Segment]:
        if index not in self._segments:
            segments, at = [], 0
            for entry in self._fields(index)["segments"][0].as_py():
                segments.append(
                    _Segment(entry["part"], entry["part_row"], at, entry["rows"], entry["sha256"])
                )
                at += entry["rows"]
            self._segments[index] = segments
        return self._segments[index]

    def _slice(self, segment: _Segment, start: int, stop: int) -> Tensor:
        offset = segment.part_row - segment.sample_row
        return self._part(segment.part)[start + offset : stop + offset]

    def _part(self, name: str) -> Any:
        if name in self._parts:
            self._parts.move_to_end(name)
            return self._parts[name][1]
        try:
            handle = safe_open(self.path / "features" / name, framework="pt")
            part = handle.get_slice(TENSOR)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise StoreError(
                _damage_message(self.path, [f"{name}: cannot be read as safetensors ({error})"])
            ) from None
        self._parts[name] = (handle, part)
        if len(self._parts) > _OPEN_PARTS:
            self._parts.popitem(last=False)
        return part


def _values(table: pa.Table, name: str) -> pa.ListArray:
    """The one chunk of a list column (a shard is written as one record batch)."""
    return table.column(name).chunk(0)


def _damage_message(path: Path, problems: list[str]) -> str:
    listed = "\n  ".join(problems[:20]) + ("\n  ..." if len(problems) > 20 else "")
    return (
        f"{path}: {len(problems)} damaged part(s) or sample(s):\n  {listed}\n"
        "run the capture command again with --verify: it drops and recaptures exactly these"
    )
