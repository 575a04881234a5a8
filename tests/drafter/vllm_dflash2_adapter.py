"""DFlash2 on vLLM 0.32's V1 runner, which drafts on CPU but refuses candidate heads.

The runner already runs the convolutions; only the walk over candidates is missing. Three attributes are
replaced in this process, so it works with an in-process engine (VLLM_ENABLE_V1_MULTIPROCESSING=0) and greedy
requests.
"""

import torch
from vllm.config import VllmConfig
from vllm.v1.spec_decode.dflash import DFlashProposer


def install() -> None:
    """Let DFlash2 drafters through and draft by walking their candidates from each anchor."""
    VllmConfig._is_dflash_candidate_draft = lambda self: False
    set_inputs, sample = DFlashProposer.set_inputs_first_pass, DFlashProposer._sample_draft_tokens

    def remember_anchors(self, *args, **kwargs):
        self.anchor_ids = kwargs["next_token_ids"] if "next_token_ids" in kwargs else args[1]
        return set_inputs(self, *args, **kwargs)

    def walk(self, hidden, sampling_metadata):
        selector = getattr(self.model.model, "candidate_selector", None)
        if selector is None:
            return sample(self, hidden, sampling_metadata)
        rows_AKD = hidden.view(len(self.anchor_ids), self.num_speculative_tokens, -1)
        candidates_AKk, unary_AKk = self.model.compute_candidates(hidden)
        if candidates_AKk.is_floating_point():
            candidates_AKk, unary_AKk = unary_AKk, candidates_AKk
        shape = (*rows_AKD.shape[:2], selector.top_k)
        candidates_AKk, unary_AKk = candidates_AKk.view(shape).long(), unary_AKk.view(shape)
        projected_AKr = selector.hidden_projection(rows_AKD)
        previous_A, path = self.anchor_ids.long(), []
        for slot in range(shape[1]):
            edge_Ar = selector.predecessor_codebook[previous_A] * projected_AKr[:, slot]
            successors_Akr = selector.successor_codebook[candidates_AKk[:, slot]]
            scores_Ak = unary_AKk[:, slot] + torch.einsum("Ar,Akr->Ak", edge_Ar, successors_Akr)
            place_A1 = scores_Ak.argmax(-1, keepdim=True)
            previous_A = candidates_AKk[:, slot].gather(1, place_A1).squeeze(1)
            path.append(previous_A)
        return torch.stack(path, 1).flatten(), None

    DFlashProposer.set_inputs_first_pass = remember_anchors
    DFlashProposer._sample_draft_tokens = walk
