"""vLLM's scheduler, which also remembers every draft and what became of it, request by request.

vLLM's own counters add all requests of a step. These are the same numbers at the place where the engine
counts them, so that their sums are its counters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds


class RecordingScheduler(Scheduler):
    """Used through `scheduler_cls`, without asynchronous scheduling, in the engine's own process.

    Attributes:
        verified: request -> (drafted, accepted) of the step that has just run.
        proposed: request -> (tokens emitted before the draft, its token ids), filled while `keep_drafts`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keep_drafts = False
        self.verified: dict[str, tuple[int, int]] = {}
        self.proposed: dict[str, list[tuple[int, list[int]]]] = {}

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Called by vLLM for each request whose drafts a step has verified."""
        self.verified[kwargs["request_id"]] = (kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"])
        return super().make_spec_decoding_stats(*args, **kwargs)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Called by vLLM with the drafts for the next step."""
        super().update_draft_token_ids(draft_token_ids)
        if not self.keep_drafts:
            return
        for request_id, ids in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                record = (request.num_output_tokens, [int(token) for token in ids])
                self.proposed.setdefault(request_id, []).append(record)
