"""vLLM's scheduler without the draft tokens of `extract_hidden_states`.

That method returns the sampled token as a "draft" so that its proposer is called every step. Verifying it
would double the tokens of a decode step and is refused most of the time; dropping it costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds


class NoDraftScheduler(Scheduler):
    """Used through `scheduler_cls`, without asynchronous scheduling."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        del draft_token_ids
