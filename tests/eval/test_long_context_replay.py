"""The replay of `benchmarks/long_context` counts the steps that the real loop takes."""

import pytest
import torch

from benchmarks.long_context.replay import replay
from eval.decode import Limits, decode_speculative
from eval.sampling import Sampling

PROMPT = [5, 17, 3, 44, 60, 2, 8]
LIMITS = Limits(33)


def features(target, ids, taps):
    rows = []
    target.open(taps).prefill(torch.tensor(ids), rows.append)
    return torch.cat(rows)


@pytest.mark.parametrize("sliding_window", [None, 9])
def test_replay_of_a_drafter_equals_the_loop(llama, make_drafter, sliding_window):
    drafter = make_drafter(llama, sliding_window=sliding_window)
    decoded = decode_speculative(llama, drafter, PROMPT, limits=LIMITS, sampling=Sampling(), generator=None)
    ids = PROMPT + decoded.ids
    steps = replay(drafter, ids, len(PROMPT), features(llama, ids[:-1], drafter.taps))
    assert steps == [(s.drafted, s.emitted) for s in decoded.steps]


def test_replay_counts_accepted_and_rejected_drafts(llama, scripted):
    class HalfRight(scripted):
        """Right at first, wrong from its third token on in every other draft."""

        def prefill(self, features):
            pass

        def observe(self, emitted, features):
            self.emitted += len(emitted)

        def draft(self, anchor, count):
            draft = super().draft(anchor, count)
            if len(self.asked) % 2:
                draft.ids[2:] = (draft.ids[2:] + 1) % 97
            return draft

    plain = decode_speculative(
        llama, scripted([], 2), PROMPT, limits=LIMITS, sampling=Sampling(), generator=None
    ).ids
    decoded = decode_speculative(
        llama, HalfRight(plain, 6), PROMPT, limits=LIMITS, sampling=Sampling(), generator=None
    )
    rows = torch.zeros(len(PROMPT) + len(plain) - 1, 1)
    steps = replay(HalfRight(plain, 6), PROMPT + plain, len(PROMPT), rows)
    assert steps == [(s.drafted, s.emitted) for s in decoded.steps]
    assert {emitted for _, emitted in steps[:4]} == {3, 6}
