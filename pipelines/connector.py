"""A KV connector for vLLM that streams feature rows to disk while they are made.

vLLM's `extract_hidden_states` method keeps the tapped hidden states of a step in the pages of a cache-only
layer. This connector reads them at the end of the same step and appends them to one row file per request, so
nothing has to wait for the request to end. The scheduler half says which slots hold new rows that the request
asked for; the worker half reads them. Rows that nobody asked for are never read.

A request names the rows that it wants in `kv_transfer_params`: {"rows": {family: [[start, stop], ...]}}. When
it ends, `<spool>/<request>.json` appears: {"files": {family: [{"part", "rows", "sha256"}]}, "error": text |
null}. Imported by the engine through `kv_connector_module_path`; nothing else of the project imports vLLM.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

from pipelines.rowfile import RowFile, StoreError
from pipelines.rowformat import FEATURES, LAST, RowFormat, all_finite, row_formats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_BUFFER_BYTES = 1 << 18  # decode rows of a request gather here before they reach the file


Ranges = list[tuple[int, int]]


@dataclass
class NewRows(KVConnectorMetadata):
    """What the worker has to save after this step.

    Attributes:
        slots: family of rows -> request id -> cache slots of its new rows, in order.
    """

    slots: dict[str, dict[str, list[int]]] = field(default_factory=dict)


class StreamingRows(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector.

    Extra config: `spool` (folder), `dtype` (of the rows, as in a manifest), `last_hidden` (the last of the
    extracted states is the last hidden state, not a tap), `part_bytes`.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group, self._block_size = _cache_only_group(kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._spool = Path(extra["spool"])
        self._dtype = str(extra["dtype"])
        self._last_hidden = bool(extra["last_hidden"])
        self._part_bytes = int(extra["part_bytes"])
        self._wanted: dict[str, dict[str, Ranges]] = {}  # scheduler half: request id -> family -> its rows
        self._sent: dict[str, int] = {}  # rows that the worker has been told of so far
        self._cache: torch.Tensor | None = None  # worker half: [blocks, taps, block_size, hidden]
        self._formats: dict[str, RowFormat] = {}
        self._writes = False
        self._requests: dict[str, _RequestRows] = {}

    # ---------------------------------------------------------------- scheduler half

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NewRows:
        """Slots of the rows that this step adds.

        The rows of a prefix-cache hit were made by another request: they are read from its pages along with
        the first new ones. Rows that a preempted request makes again are skipped. Draft positions are never
        counted.
        """
        meta = NewRows()
        cached = scheduler_output.scheduled_cached_reqs
        starts = {
            request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs
        }
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        blocks_of = scheduler_output.kv_connector_block_state
        for request_id, start in starts.items():
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            stop = start + scheduler_output.num_scheduled_tokens[request_id] - drafts
            first = self._sent.get(request_id, 0)
            if stop <= first:
                continue
            self._sent[request_id] = stop
            for family, ranges in self._wanted[request_id].items():
                rows = rows_between(ranges, first, stop)
                if not rows:
                    continue
                assert blocks_of is not None
                tables = blocks_of.get_block_ids(request_id)
                assert tables is not None
                meta.slots.setdefault(family, {})[request_id] = self._slots(
                    tables[self._group], rows, request_id
                )
        return meta

    def _slots(self, blocks: list[int], rows: list[int], request_id: str) -> list[int]:
        size = self._block_size
        slots = [blocks[row // size] * size + row % size for row in rows]
        if min(slots) < size:  # the null block: the pages of these rows were given back
            raise RuntimeError(
                f"rows {rows[0]}..{rows[-1]} of request {request_id} are no longer in the hidden-state "
                "cache; a bounded cache cannot be combined with prefix caching or draft tokens"
            )
        return slots

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids  # every row is on its way already: the pages may be freed at once
        self._sent.pop(request.request_id, None)
        self._wanted.pop(request.request_id, None)
        return False, {"rows": request.request_id}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        del request, num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        del blocks, num_external_tokens
        asked = (request.kv_transfer_params or {}).get("rows", {})
        self._wanted[request.request_id] = {
            family: [(int(start), int(stop)) for start, stop in ranges] for family, ranges in asked.items()
        }

    # ---------------------------------------------------------------- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        (name,) = layers
        self._cache = kv_caches[name]
        # All tensor-parallel ranks hold the same hidden states; the first one writes.
        self._writes = get_tensor_model_parallel_rank() == 0
        _, states, page, hidden = self._cache.shape
        taps = states - int(self._last_hidden)
        self._formats = row_formats(self._dtype, taps, hidden, last_hidden=self._last_hidden)
        if page != self._block_size:
            raise RuntimeError(
                f"the hidden-state cache has pages of {page} rows, the scheduler counts "
                f"{self._block_size}; rows would come from wrong slots"
            )

    def wait_for_save(self) -> None:
        """Called once per step after the hidden states are in their pages."""
        meta = self._get_connector_metadata() if self.has_connector_metadata() else None
        if not self._writes or not isinstance(meta, NewRows) or not meta.slots:
            return
        assert self._cache is not None
        taps = self._formats[FEATURES].taps
        states = {FEATURES: self._cache[:, :taps], LAST: self._cache[:, taps:]}
        for family, slots_of in meta.slots.items():
            self._save(family, states[family], slots_of)

    def _save(self, family: str, cache: torch.Tensor, slots_of: dict[str, list[int]]) -> None:
        row_format = self._formats[family]
        slots = torch.tensor([slot for of in slots_of.values() for slot in of], device=cache.device)
        rows = row_format.cast(cache[slots // self._block_size, :, slots % self._block_size].flatten(1))
        # Judged and packed once for the step; if it is not finite, each request looks for itself.
        if all_finite(rows):
            rows = row_format.pack(rows)
        rows = rows.to("cpu")
        at = 0
        for request_id, of in slots_of.items():
            if request_id not in self._requests:
                self._requests[request_id] = _RequestRows(
                    self._spool, request_id, self._formats, self._part_bytes
                )
            self._requests[request_id].append(family, rows[at : at + len(of)])
            at += len(of)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Close the files of requests that ended in the step before."""
        for request_id in finished_req_ids if self._writes else ():
            nothing = _RequestRows(self._spool, request_id, self._formats, self._part_bytes)
            self._requests.pop(request_id, nothing).finish()
        return None, None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        del forward_context

    def wait_for_layer_load(self, layer_name: str) -> None:
        del layer_name

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        del layer_name, kv_layer, attn_metadata

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """All taps of a token side by side, as a feature row is."""
        del vllm_config
        return "LBNHC"


class _RequestRows:
    """Row files of one running request."""

    def __init__(self, spool: Path, request_id: str, formats: dict[str, RowFormat], part_bytes: int) -> None:
        self._base = spool / request_id
        self._formats = formats
        self._part_bytes = part_bytes
        self._open: dict[str, RowFile] = {}
        self._files: dict[str, list[dict[str, Any]]] = {family: [] for family in formats}
        self._error: str | None = None

    def append(self, family: str, rows: torch.Tensor) -> None:
        """The next rows, packed or not (then they may hold NaN)."""
        if self._error is not None:
            return
        try:
            if family in self._open and self._open[family].bytes >= self._part_bytes:
                self._close(family)
            if family not in self._open:
                path = Path(f"{self._base}.{family}.{len(self._files[family]):03d}.rows")
                self._open[family] = RowFile(path, self._formats[family], buffer_bytes=_BUFFER_BYTES)
            self._open[family].append(rows)
        except StoreError as error:
            self._error = f"{type(error).__name__}: {error}"

    def _close(self, family: str) -> None:
        part = self._open.pop(family)
        self._files[family].append(part.end_segment())
        part.close()

    def finish(self) -> None:
        try:
            for family in [*self._open]:
                self._close(family)
        except OSError as error:
            self._error = f"DiskFullError: {error}"
        report = self._base.with_name(self._base.name + ".json")
        staged = report.with_suffix(".json.part")
        staged.write_text(json.dumps({"files": self._files, "error": self._error}))
        staged.rename(report)


def rows_between(ranges: Ranges, first: int, stop: int) -> list[int]:
    """Members of ascending ranges in [first, stop)."""
    rows: list[int] = []
    for at in range(max(0, bisect_right(ranges, (first, first)) - 1), len(ranges)):
        start, end = ranges[at]
        if start >= stop:
            break
        rows.extend(range(max(first, start), min(stop, end)))
    return rows


def _cache_only_group(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """(index of the cache group that holds the hidden states, its page size in rows)."""
    found = [
        (index, group.kv_cache_spec.block_size)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if any("cache_only_layers" in name for name in group.layer_names)
    ]
    if len(found) != 1:
        raise RuntimeError(
            f"expected the hidden states in one of the {len(kv_cache_config.kv_cache_groups)} cache groups, "
            f"found {len(found)} (MLA targets cannot isolate them); use --backend hf"
        )
    return found[0]
