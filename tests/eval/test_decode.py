"""Speculative decoding gives plain decoding's tokens, whatever is drafted, and counts them right."""

import pytest
import torch
from transformers import DynamicCache

from eval.decode import Limits, cut, decode_plain, decode_speculative
from eval.lookup import LookupDrafter
from eval.metrics import acceptance_length
from eval.sampling import Sampling

PROMPT = [5, 17, 3, 60, 41, 17, 3, 22, 9, 5, 17, 3]
GREEDY = {"sampling": Sampling(), "generator": None}


def plain(target, new, stop=(), prompt=PROMPT):
    return decode_plain(target, prompt, limits=Limits(new, frozenset(stop)), **GREEDY)


def speculative(target, drafter, new, stop=(), prompt=PROMPT):
    return decode_speculative(target, drafter, prompt, limits=Limits(new, frozenset(stop)), **GREEDY)


def test_plain_loop_equals_transformers_generate(target):
    theirs = target.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert plain(target, 40).ids == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("block", [2, 4, 8])
def test_lookup_gives_plain_tokens(target, block):
    # Repetitive tails make lookup accept now and then; 40 tokens pass the sliding target's window of 16.
    assert speculative(target, LookupDrafter(block), 40).ids == plain(target, 40).ids


def test_half_right_drafter_gives_plain_tokens(target, scripted):
    reference = plain(target, 46).ids
    script = [t if i % 5 else (t + 1) % 97 for i, t in enumerate(reference)]
    decoded = speculative(target, scripted(script, block=8), 46)
    assert decoded.ids == reference
    assert {s.accepted for s in decoded.steps} == {4}  # every fifth token is wrong


def test_perfect_drafter_has_acceptance_length_equal_to_its_block(llama, scripted):
    block, steps = 4, 6
    new = 1 + block * steps
    decoded = speculative(llama, scripted(plain(llama, new + block).ids, block), new)
    assert [s.emitted for s in decoded.steps] == [block] * steps
    assert acceptance_length([decoded.steps]).value == block


def test_always_wrong_drafter_has_acceptance_length_one(llama, scripted):
    reference = plain(llama, 20)
    decoded = speculative(llama, scripted(reference.ids, 4, wrong=True), 20)
    assert decoded.ids == reference.ids
    assert acceptance_length([decoded.steps]).value == 1.0


def test_block_shrinks_at_the_limit_and_the_last_step_counts_what_it_emitted(llama, scripted):
    drafter = scripted(plain(llama, 30).ids, block=8)
    decoded = speculative(llama, drafter, 11)
    # 1 token from the prefill, 8 from the first block, then two are left: two drafts are verified, two
    # emitted.
    assert drafter.asked == [7, 2]
    assert [s.emitted for s in decoded.steps] == [8, 2]
    assert [s.accepted for s in decoded.steps] == [7, 2]
    assert len(decoded.ids) == 11


def test_first_block_can_be_cut_by_the_limit(llama, scripted):
    drafter = scripted(plain(llama, 30).ids, block=8)
    decoded = speculative(llama, drafter, 3)
    assert drafter.asked == [2]
    assert decoded.ids == plain(llama, 3).ids
    assert acceptance_length([decoded.steps]).value == 2.0


@pytest.mark.parametrize("new", [1, 2])
def test_shortest_responses(llama, scripted, new):
    decoded = speculative(llama, scripted(plain(llama, 9).ids, block=8), new)
    assert decoded.ids == plain(llama, new).ids
    assert len(decoded.steps) == new - 1
    assert sum(s.emitted for s in decoded.steps) == new - 1


def test_stop_token_inside_a_block_ends_the_response_there(llama, scripted):
    reference = plain(llama, 30).ids
    stop = reference[9]
    first = reference.index(stop)
    decoded = speculative(llama, scripted(reference, block=8), 30, stop=[stop])
    assert decoded.ids == plain(llama, 30, stop=[stop]).ids == reference[: first + 1]
    assert sum(s.emitted for s in decoded.steps) == len(decoded.ids) - 1


def test_stop_token_of_the_prompt_does_not_end_the_response(llama):
    reference = plain(llama, 8).ids
    in_prompt_only = next(t for t in PROMPT if t not in reference)
    assert plain(llama, 8, stop=[in_prompt_only]).ids == reference
    assert speculative(llama, LookupDrafter(4), 8, stop=[in_prompt_only]).ids == reference


def test_stop_token_from_the_prefill_leaves_no_step(llama, scripted):
    first = plain(llama, 1).ids
    decoded = speculative(llama, scripted([], 4), 8, stop=first)
    assert (decoded.ids, decoded.steps) == (first, [])


def test_contexts_and_times_of_steps(llama, scripted):
    reference = plain(llama, 20)
    decoded = speculative(llama, scripted(reference.ids, 4), 20)
    context = len(PROMPT)
    for step in decoded.steps:
        assert step.context == context
        assert min(step.draft_seconds, step.verify_seconds, step.other_seconds) >= 0
        context += step.emitted
    assert [s.context for s in reference.steps] == list(range(len(PROMPT), len(PROMPT) + 19))
    assert decoded.decode_seconds > 0
    assert decoded.prefill_seconds > 0


def test_nothing_of_the_context_is_computed_twice(llama, scripted):
    rows = []
    llama.model.lm_head.register_forward_hook(lambda _m, i, _o: rows.append(i[0].shape[1]))
    positions = []
    llama.layers[0].register_forward_hook(lambda _m, _i, o: positions.append(o.shape[1]))
    decoded = speculative(llama, scripted(plain(llama, 20).ids, block=4), 20)
    rows, positions = rows[20:], positions[20:]
    assert rows == [1] + [s.drafted + 1 for s in decoded.steps]
    assert positions == [len(PROMPT)] + [s.drafted + 1 for s in decoded.steps]


def test_long_prompts_are_read_in_parts(llama, scripted, monkeypatch):
    reference = plain(llama, 12).ids
    monkeypatch.setattr("eval.target._PREFILL_ROWS", 5)
    assert plain(llama, 12).ids == reference


def test_features_are_the_raw_outputs_of_the_tapped_layers(llama):
    taps = (1, 3)
    session = llama.open(taps)
    seen = []
    ids = torch.tensor(PROMPT)
    with torch.inference_mode():
        session.prefill(ids, seen.append)
        states = {}
        handles = [
            llama.layers[i].register_forward_hook(lambda _m, _i, o, i=i: states.__setitem__(i, o))
            for i in taps
        ]
        llama.model(ids[None], past_key_values=DynamicCache(config=llama.config))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(seen[0], torch.cat([states[1][0], states[3][0]], dim=-1), atol=1e-5, rtol=1e-5)
    # The last layer's output is the residual itself, not the normed state that `hidden_states[-1]` holds.
    assert not torch.allclose(seen[0][:, 64:], llama.model.model.norm(seen[0][:, 64:]))


def test_cut_keeps_the_stop_token():
    assert cut([1, 2, 3], frozenset()) == [1, 2, 3]
    assert cut([1, 2, 3, 2], frozenset({2})) == [1, 2]


def test_lookup_copies_what_followed_the_latest_occurrence():
    drafter = LookupDrafter(block=4, longest=3, shortest=2)
    drafter.start([1, 2, 7, 8, 1, 2, 9, 4, 1], Sampling(), None)
    drafter.observe([2], None)
    assert drafter.draft(torch.tensor([2]), 3).ids.tolist() == [9, 4, 1]
    drafter.observe([50], None)
    assert drafter.draft(torch.tensor([50]), 3).ids.tolist() == []
