"""A hidden-state cache whose size does not depend on the sequence length.

The rows of a step are read at the end of that step, so a page is not needed afterwards. The cache-only layer
is declared with a window of one token; vLLM's sliding-window manager then gives its pages back step by step.

Importing this module (the engine does, as `worker_extension_cls`) puts the subclass in place of vLLM's model
class through vLLM's own registries. A vLLM without one of the names used here fails the import; the engine
process then starts with the plain paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionLayer,
    ExtractHiddenStatesModel,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class OneTokenHiddenStateSpec(HiddenStateCacheSpec):
    """Pages for the rows of the steps in flight, not for the sequence."""

    sliding_window: int | None = 1
    extra_retained_tokens: int = 0
    in_flight_tokens: int

    @property
    def blocks_per_request(self) -> int:
        """Pages a request holds at most: those of the tokens in flight, which may begin inside a page."""
        return cdiv(self.in_flight_tokens, self.block_size) + 1

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        del vllm_config
        return self.blocks_per_request * self.page_size_bytes


class _OneTokenManager(SlidingWindowManager):
    def __init__(self, kv_cache_spec: OneTokenHiddenStateSpec, **kwargs: Any) -> None:
        # Without the cap a long prompt would have to fit as a whole before it is admitted.
        kwargs["max_admission_blocks_per_request"] = kv_cache_spec.blocks_per_request
        super().__init__(kv_cache_spec, **kwargs)


class _OneTokenLayer(CacheOnlyAttentionLayer):
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> OneTokenHiddenStateSpec:
        return OneTokenHiddenStateSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            in_flight_tokens=min(vllm_config.max_in_flight_tokens, vllm_config.model_config.max_model_len),
        )


class BoundedExtractModel(ExtractHiddenStatesModel):
    """vLLM's cache-only model with the one-token spec."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.cache_only_layers.values():
            # The layer registered itself in the engine's context on construction: it changes its class in
            # place.
            layer.__class__ = _OneTokenLayer


class BoundedCache:
    """Marker for `worker_extension_cls`; the import does the work."""


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # fills the registry with vLLM's own specs first
KVCacheSpecRegistry.register(OneTokenHiddenStateSpec, _OneTokenManager, OneTokenHiddenStateSpec)
ModelRegistry.register_model("ExtractHiddenStatesModel", BoundedExtractModel)
