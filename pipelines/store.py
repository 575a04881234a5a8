"""The feature store: token ids, loss masks and metadata as Arrow tables, feature rows as safetensors parts.

    manifest.json                        what was captured: target, taps, dtype, rows kept, counts, command
    samples/shard-000000.arrow           a row per sample (readable by `datasets`); appears last
    features/shard-000000.part-000.safetensors      tensor `features` [rows, taps * hidden]
    last_hidden/shard-000000.last-000.safetensors   tensor `last_hidden` [rows, hidden], if asked for
    staging/                             the shard being written; nothing in it is ever read as data
    rejected.jsonl                       records that gave no sample, with the reason

A feature row is the concatenation of the taps in the order of `target_layer_ids`. The last token of a sample
may have no row, because a generated token that ended the sample was never an input of the target; readers get
zeros for it. No block can see that row: an anchor has at least one token after it and only rows before it.

A store may hold only the rows that blocks of a sliding drafter can see (`pipelines.keep`). Then anchors are
drawn from `Sample.anchor_spans`, and asking for a row that is not there is an error.

This module needs neither vLLM nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from csbp.rows import RowSet
from pipelines.rowfile import PartReader, StoreError, segment_digest
from pipelines.rowformat import FEATURES, LAST
from pipelines.store_schema import Manifest, part_family, part_path, part_problem
from pipelines.store_table import TokenSample, ranges_table, read_shard, row_digest, shard_row
from pipelines.store_writer import StoreWriter

__all__ = ["FeatureStore", "Manifest", "Sample", "StoreError", "StoreWriter", "TokenSample"]

_OPEN_PARTS = 64  # files kept open per store
_PLACES = 4096  # samples whose places are remembered


@dataclass(frozen=True)
class Sample:
    """One captured sequence.

    Attributes:
        id: content hash of the record it came from.
        token_ids: int64 [L].
        loss_mask: bool [L]; true where the token was produced by the target (or is a given answer).
        document_starts: int64 [documents]; the first is 0.
        conversation: id shared by all samples of one conversation; hold-out splits go by it.
        num_rows: feature rows that the target made, L or L - 1.
        metadata: `source` (file and line) and `prompt_length` (tokens before the first supervised one).
        kept: int64 [n, 2], ascending disjoint half-open ranges of the rows that are stored.
        anchor_spans: int64 [m, 2], ascending half-open ranges of the tokens that anchors may be drawn from.
        last_rows: int64 [k, 2], as `kept`: rows whose last hidden state is stored.
    """

    id: str
    token_ids: Tensor
    loss_mask: Tensor
    document_starts: Tensor
    conversation: str
    num_rows: int
    metadata: dict[str, Any]
    kept: Tensor
    anchor_spans: Tensor
    last_rows: Tensor


@dataclass(frozen=True)
class _Run:
    """Stored rows [start, stop) of a sample, counted over what is stored of it, as they lie in a part."""

    part: str
    part_row: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Place:
    """Where a sample's rows are."""

    length: int
    num_rows: int
    rows: dict[str, RowSet]  # family -> rows of the sample that are stored
    runs: dict[str, list[_Run]]


class FeatureStore:
    """Reader. Samples are ordered by id, so the order does not depend on how the capture ran.

    Rows may be read from several threads.
    """

    def __init__(self, path: Path, manifest: Manifest, shards: list[pa.Table]) -> None:
        self.path = path
        self.manifest = manifest
        self._shards = shards  # memory maps, one record batch each
        places = [(shard, row) for shard, table in enumerate(shards) for row in range(len(table))]
        ids = [sample_id for table in shards for sample_id in table.column("id").to_pylist()]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        self.ids = [ids[at] for at in order]  # sample ids in the store's order
        self._places = [places[at] for at in order]
        self._formats = manifest.formats
        self._place_of = lru_cache(_PLACES)(self._read_place)
        self._part = lru_cache(_OPEN_PARTS)(self._open_part)

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
                problem = part_problem(path, name, rows, manifest)
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
        """The dtype of rows as read; e4m3 rows come as bfloat16."""
        return self._formats[FEATURES].dtype

    @property
    def has_last_hidden(self) -> bool:
        """Whether the target's last hidden states are stored (at label rows)."""
        return LAST in self._formats

    @property
    def lengths(self) -> Tensor:
        """int64 [samples]: tokens of each sample, without reading the tokens."""
        per_shard = [pc.list_value_length(table["token_ids"]).to_numpy() for table in self._shards]
        return torch.tensor([int(per_shard[shard][row]) for shard, row in self._places], dtype=torch.int64)

    @property
    def conversations(self) -> list[str]:
        """Conversation of each sample, without reading the tokens."""
        per_shard = [table.column("conversation").to_pylist() for table in self._shards]
        return [per_shard[shard][row] for shard, row in self._places]

    def sample(self, index: int) -> Sample:
        """Everything but the rows of sample `index` (0 <= index < len(store))."""
        table, at = self._shard_of(index)
        fields = shard_row(table, at)
        length = len(fields["token_ids"])
        place = self._place_of(index)
        return Sample(
            id=fields["id"],
            token_ids=torch.from_numpy(fields["token_ids"]).to(torch.int64),
            loss_mask=torch.from_numpy(fields["loss_mask"]),
            document_starts=torch.tensor(fields["document_starts"], dtype=torch.int64),
            conversation=fields["conversation"],
            num_rows=fields["rows"],
            metadata={"source": fields["source"], "prompt_length": fields["prompt_length"]},
            kept=ranges_table(place.rows[FEATURES]),
            anchor_spans=ranges_table(_ranges(fields["anchor_spans"], length)),
            last_rows=ranges_table(place.rows[LAST]),
        )

    def rows(self, index: int, start: int, stop: int) -> Tensor:
        """Feature rows [stop - start, taps * hidden] of sample `index` in `dtype`.

        Only these rows are read. The last token's row is zeros if it has none (see the module).

        Raises:
            StoreError: the range is not inside the sample, some of it is not stored, or a part cannot be
                read.
        """
        place = self._place_of(index)
        if not 0 <= start <= stop <= place.length:
            raise StoreError(
                f"rows [{start}, {stop}) of sample {index} asked for, but it has {place.length} tokens"
            )
        last = min(stop, place.num_rows)
        kept = place.rows[FEATURES]
        edges = kept.rank_of(torch.tensor([start, max(start, last)]))
        first, end = edges.tolist()
        if end - first != max(0, last - start):
            raise StoreError(self._not_kept(index, start, stop, kept))
        rows = self._read(place, FEATURES, first, end)
        missing = stop - max(start, place.num_rows)
        return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing > 0 else rows

    def last_hidden(self, index: int, positions: Tensor) -> Tensor:
        """The target's state before its final norm, [n, hidden] in `dtype`, at int64 `positions` [n].

        The target's own norm and head of the state at t give its logits for token t + 1.

        Raises:
            StoreError: it is not stored at a position, or a part cannot be read.
        """
        if not self.has_last_hidden:
            raise StoreError(f"{self.path} holds no last hidden states; capture with --last-hidden")
        place = self._place_of(index)
        stored = place.rows[LAST]
        at = stored.rank_of(positions)
        absent = positions[stored.rank_of(positions + 1) == at]
        if len(absent):
            raise StoreError(
                f"{self.path}: sample {self.ids[index]} has no last hidden state at position "
                f"{int(absent[0])}; they are stored where the next token is a label of a block: "
                f"{_listed(stored)}"
            )
        wanted, order = at.unique(return_inverse=True)
        runs = RowSet.union_of(wanted, wanted + 1).ranges
        pieces = [self._read(place, LAST, first, end) for first, end in runs]
        width = self._formats[LAST].width
        return torch.cat([torch.empty(0, width, dtype=self.dtype), *pieces])[order]

    def damaged_samples(self) -> list[tuple[str, str, str]]:
        """(sample id, part or table, what differs) of each sample failing its checksums. Reads everything."""
        damaged = []
        for sample_id, (shard, at) in zip(self.ids, self._places, strict=True):
            fields = shard_row(self._shards[shard], at)
            if row_digest(fields) != fields["digest"]:
                damaged.append((sample_id, "samples table", "token ids or mask altered"))
                continue
            for segment in fields["segments"] + (fields["last_segments"] or []):
                family = part_family(segment["part"])
                file = part_path(self.path, segment["part"])
                row_bytes = self._formats[family].row_bytes
                if segment_digest(file, segment["part_row"], segment["rows"], row_bytes) != segment["sha256"]:
                    damaged.append((sample_id, segment["part"], f"{family} rows altered"))
                    break
        return damaged

    def _shard_of(self, index: int) -> tuple[pa.Table, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a store with {len(self)} samples")
        shard, row = self._places[index]
        return self._shards[shard], row

    def _read_place(self, index: int) -> _Place:
        table, at = self._shard_of(index)
        names = ["rows", "kept", "last_rows", "segments", "last_segments"]
        fields = table.select(names).slice(at, 1).to_pylist()[0]
        last_rows = fields["last_rows"] or []
        return _Place(
            length=pc.list_value_length(table["token_ids"].slice(at, 1))[0].as_py(),
            num_rows=fields["rows"],
            rows={FEATURES: _ranges(fields["kept"], fields["rows"]), LAST: _ranges(last_rows, 0)},
            runs={FEATURES: _runs(fields["segments"]), LAST: _runs(fields["last_segments"] or [])},
        )

    def _read(self, place: _Place, family: str, first: int, end: int) -> Tensor:
        """Stored rows [first, end) of a sample, counted over what is stored of it."""
        pieces = []
        for run in place.runs[family]:
            start, stop = max(first, run.start), min(end, run.stop)
            if start < stop:
                offset = run.part_row - run.start
                pieces.append(self._part(run.part).read(start + offset, stop + offset))
        if len(pieces) == 1:
            return pieces[0]
        row_format = self._formats[family]
        return torch.cat([torch.empty(0, row_format.width, dtype=row_format.dtype), *pieces])

    def _open_part(self, name: str) -> PartReader:
        try:
            return PartReader(part_path(self.path, name), self._formats[part_family(name)])
        except StoreError as error:
            raise StoreError(_damage_message(self.path, [str(error)])) from None

    def _not_kept(self, index: int, start: int, stop: int, kept: RowSet) -> str:
        rule = ", ".join(f"{name} {value}" for name, value in self.manifest.keep.items())
        return (
            f"{self.path}: rows [{start}, {stop}) of sample {self.ids[index]} asked for, but only its rows "
            f"{_listed(kept)} are stored ({rule}); draw anchors from the sample's anchor spans for a window "
            "no larger than the capture's, or capture with --keep all"
        )


def _runs(segments: list[dict[str, Any]]) -> list[_Run]:
    runs, at = [], 0
    for segment in segments:
        runs.append(_Run(segment["part"], segment["part_row"], at, at + segment["rows"]))
        at += segment["rows"]
    return runs


def _ranges(ranges: list[list[int]] | None, everything: int) -> RowSet:
    return RowSet.of([(0, everything)] if ranges is None else [(a, b) for a, b in ranges])


def _listed(rows: RowSet) -> str:
    shown = [f"[{start}, {stop})" for start, stop in rows.ranges[:8]]
    more = ", ..." if len(rows.ranges) > 8 else ""
    return (", ".join(shown) + more) if shown else "none"


def _damage_message(path: Path, problems: list[str]) -> str:
    listed = "\n  ".join(problems[:20]) + ("\n  ..." if len(problems) > 20 else "")
    return (
        f"{path}: {len(problems)} damaged part(s) or sample(s):\n  {listed}\n"
        "run the capture command again with --verify: it drops and recaptures exactly these"
    )
