"""A KV connector for vLLM that streams feature rows to disk while they are made.

vLLM's `extract_hidden_states` method keeps the tapped hidden states of a step in the pages of a cache-only
layer. This connector reads them at the end of the same step and appends them to one row file per request, so
nothing has to wait for the request to end. The scheduler half says which slots hold new rows; the worker half
reads them.

When a request ends, `<spool>/<request>.json` appears: {"files": [{"part", "rows", "sha256"}], "error": text |
null}. Imported by the engine through `kv_connector_module_path`; nothing else of the project imports vLLM.
"""

from __future__ import annotations

import json
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
from pipelines.rowformat import DTYPES, RowFormat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_BUFFER_BYTES = 1 << 18  # decode rows of a request gather here before they reach the file


@dataclass
class NewRows(KVConnectorMetadata):
    """What the worker has to save after this step: request id -> cache slots of its new rows, in order."""

    slots: dict[str, list[int]] = field(default_factory=dict)


class StreamingRows(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector; extra config: `spool` (folder), `dtype` (of the rows), `part_bytes`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group, self._block_size = _cache_only_group(kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._spool = Path(extra["spool"])
        self._dtype = DTYPES[extra["dtype"]]
        self._part_bytes = int(extra["part_bytes"])
        self._sent: dict[str, int] = {}  # scheduler half: rows handed to the worker so far
        self._cache: torch.Tensor | None = None  # worker half: [blocks, taps, block_size, hidden]
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
            assert blocks_of is not None
            tables = blocks_of.get_block_ids(request_id)
            assert tables is not None
            meta.slots[request_id] = self._slots(tables[self._group], first, stop, request_id)
            self._sent[request_id] = stop
        return meta

    def _slots(self, blocks: list[int], start: int, stop: int, request_id: str) -> list[int]:
        size = self._block_size
        touched = blocks[start // size : (stop - 1) // size + 1]
        if 0 in touched:  # the null block: the pages of these rows were given back
            raise RuntimeError(
                f"rows {start}..{stop} of request {request_id} are no longer in the hidden-state cache; "
                "a bounded cache cannot be combined with prefix caching or draft tokens"
            )
        return [blocks[row // size] * size + row % size for row in range(start, stop)]

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids  # every row is on its way already: the pages may be freed at once
        self._sent.pop(request.request_id, None)
        return False, {"rows": request.request_id}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        del request, num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        del request, blocks, num_external_tokens

    # ---------------------------------------------------------------- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        (name,) = layers
        self._cache = kv_caches[name]
        # All tensor-parallel ranks hold the same hidden states; the first one writes.
        self._writes = get_tensor_model_parallel_rank() == 0
        if self._cache.shape[2] != self._block_size:
            raise RuntimeError(
                f"the hidden-state cache has pages of {self._cache.shape[2]} rows, the scheduler counts "
                f"{self._block_size}; rows would come from wrong slots"
            )

    def wait_for_save(self) -> None:
        """Called once per step after the hidden states are in their pages."""
        meta = self._get_connector_metadata() if self.has_connector_metadata() else None
        if not self._writes or not isinstance(meta, NewRows) or not meta.slots:
            return
        assert self._cache is not None
        slots = torch.tensor([slot for of in meta.slots.values() for slot in of], dtype=torch.int64)
        slots = slots.to(self._cache.device)
        rows_THD = self._cache[slots // self._block_size, :, slots % self._block_size]
        rows = rows_THD.flatten(1).to(self._dtype).to("cpu")
        finite = bool(torch.isfinite(rows).all())  # once for the step; each request looks for itself if not
        at = 0
        for request_id, of in meta.slots.items():
            if request_id not in self._requests:
                self._requests[request_id] = _RequestRows(
                    self._spool, request_id, self._dtype, self._part_bytes
                )
            self._requests[request_id].append(rows[at : at + len(of)], finite=finite)
            at += len(of)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Close the files of requests that ended in the step before."""
        for request_id in finished_req_ids:
            rows = self._requests.pop(request_id, None)
            if rows is not None:
                rows.finish()
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

    def __init__(self, spool: Path, request_id: str, dtype: torch.dtype, part_bytes: int) -> None:
        self._base = spool / request_id
        self._dtype = dtype
        self._part_bytes = part_bytes
        self._open: RowFile | None = None
        self._files: list[dict[str, Any]] = []
        self._error: str | None = None

    def append(self, rows_TW: torch.Tensor, *, finite: bool) -> None:
        if self._error is not None:
            return
        try:
            if self._open is not None and self._open.bytes >= self._part_bytes:
                self._close()
            if self._open is None:
                path = Path(f"{self._base}.{len(self._files):03d}.rows")
                row_format = RowFormat("features", self._dtype, 1, rows_TW.shape[1])
                self._open = RowFile(path, row_format, buffer_bytes=_BUFFER_BYTES)
            self._open.append(rows_TW, finite=finite)
        except StoreError as error:
            self._error = f"{type(error).__name__}: {error}"

    def _close(self) -> None:
        if self._open is not None:
            self._files.append(self._open.end_segment())
            self._open.close()
            self._open = None

    def finish(self) -> None:
        try:
            self._close()
        except OSError as error:
            self._error = f"DiskFullError: {error}"
        report = self._base.with_name(self._base.name + ".json")
        staged = report.with_suffix(".json.part")
        staged.write_text(json.dumps({"files": self._files, "error": self._error}))
        staged.rename(report)


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
