"""The whole loop samples the target's own distribution, on a target whose every response can be enumerated.

Four tokens and responses of four tokens: 256 responses, each with an exact probability. The loop draws 2,000
of them; a chi-square test compares the counts with the probabilities.
"""

import math
from collections import Counter
from itertools import product

import pytest
import scipy.stats
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import eval.block_drafter
import eval.decode
from drafter.cache import DraftCache, draft_hidden
from drafter.config import DrafterConfig
from drafter.model import Drafter
from eval.block_drafter import BlockDrafter
from eval.decode import Limits, decode_speculative
from eval.lookup import LookupDrafter
from eval.sampling import Draft, Sampling, accept, target_probabilities
from eval.target import Target

V, LENGTH, SAMPLES = 4, 4, 2_000
ENOUGH_TO_FAIL = 700  # responses by which a wrong rule is seen
PROMPT = [1, 2, 0, 1, 2]
#: A correct loop is called wrong once in 10,000 seeds; the seeds are fixed, so it is never called wrong.
ALPHA = 1e-4
FEWEST_EXPECTED = 5  # cells of fewer are pooled: the chi-square approximation needs them
SAMPLINGS = [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.3, top_k=3)]


@pytest.fixture(scope="module")
def small():
    """A target with opinions, and the frozen tables of its drafters."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(6)
    return Target(model)


def drafter_of(small, version):
    config = DrafterConfig.for_target(
        small.config.to_dict(), mask_token_id=V - 1, version=version, num_layers=1, block_size=4,
        target_layer_ids=(0,), selector_rank=4, selector_top_k=3, sliding_window=None,
    )  # fmt: skip
    torch.manual_seed(9)
    model = Drafter(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return BlockDrafter(model.eval(), small.frozen_head, name="small")


class Remembered:
    """The target with each prefix computed once: there are few, and the loop asks for them very often."""

    def __init__(self, target):
        self.target, self.device, self.known = target, target.device, {}

    def rows(self, ids, taps):
        key = (tuple(ids), taps)
        if key not in self.known:
            self.known[key] = self.target.open(taps).forward(torch.tensor(ids))
        return self.known[key]

    def open(self, taps=()):
        return Sequence(self, tuple(taps))


class Sequence:
    def __init__(self, memory, taps):
        self.memory, self.taps, self.ids = memory, taps, []

    def prefill(self, ids, observe=None):
        logits, features = self.forward(ids)
        if observe is not None and features is not None:
            observe(features)
        return logits[-1]

    def forward(self, ids, logits_to_keep=0):
        self.ids += ids.tolist()
        logits, features = self.memory.rows(self.ids, self.taps)
        return logits[-len(ids) :], None if features is None else features[-len(ids) :]

    def drop(self, rows):
        del self.ids[len(self.ids) - rows :]


@pytest.fixture(autouse=True)
def remembered_drafts(monkeypatch):
    """The drafter's hidden states, too, are computed once for each context."""
    known = {}

    def remembered(model, cache, features, anchor, head, block_size):
        seen = getattr(cache, "seen", features[:0])
        cache.seen = torch.cat([seen, features])
        key = (id(model), cache.seen.numpy().tobytes(), int(anchor), block_size)
        if key not in known:
            fresh = DraftCache(model.config)
            known[key] = draft_hidden(model, fresh, cache.seen, anchor, head, block_size=block_size)
        return known[key]

    monkeypatch.setattr(eval.block_drafter, "draft_hidden", remembered)


def exact(small, sampling):
    """Probability of every response."""
    memory, found = Remembered(small), {}
    with torch.inference_mode():
        for response in product(range(V), repeat=LENGTH):
            logits, _ = memory.rows([*PROMPT, *response[:-1]], ())
            steps = target_probabilities(logits[-LENGTH:], sampling)
            found[response] = float(steps[range(LENGTH), list(response)].prod())
    assert math.isclose(sum(found.values()), 1.0, rel_tol=1e-4)
    return found


def p_value(small, drafter, sampling, samples=SAMPLES):
    """Of a chi-square test of the loop's responses against exact probabilities; and the share accepted."""
    memory, generator, counts = Remembered(small), torch.Generator().manual_seed(0), Counter()
    accepted = drafted = 0
    for _ in range(samples):
        decoded = decode_speculative(
            memory, drafter, PROMPT, limits=Limits(LENGTH), sampling=sampling, generator=generator
        )
        counts[tuple(decoded.ids)] += 1
        accepted += sum(step.accepted for step in decoded.steps)
        drafted += sum(step.drafted for step in decoded.steps)
    truth = exact(small, sampling)
    impossible = sum(count for response, count in counts.items() if truth[response] == 0)
    if impossible:
        return 0.0, accepted / max(1, drafted)
    common = [response for response in truth if truth[response] * samples >= FEWEST_EXPECTED]
    observed = [counts[response] for response in common]
    expected = [truth[response] * samples for response in common]
    observed, expected = [*observed, samples - sum(observed)], [*expected, samples - sum(expected)]
    if expected[-1] < FEWEST_EXPECTED:
        observed, expected = [*observed[:-2], sum(observed[-2:])], [*expected[:-2], sum(expected[-2:])]
    assert len(expected) > 15, "too few cells to see a difference"
    return scipy.stats.chisquare(observed, expected).pvalue, accepted / max(1, drafted)


class GreedyProposals:
    """A drafter whose proposal is certain, whatever the request's temperature."""

    def __init__(self, inner):
        self.inner, self.name, self.taps, self.block = inner, inner.name, inner.taps, inner.block
        self.prefill, self.observe, self.draft = inner.prefill, inner.observe, inner.draft

    def start(self, prompt, sampling, generator):
        self.inner.start(prompt, Sampling(), None)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T 1", "T 0.7, top-p", "T 1.3, top-k"])
@pytest.mark.parametrize("version", [1, 2])
def test_sampled_proposals_keep_the_targets_distribution(small, version, sampling):
    p, share = p_value(small, drafter_of(small, version), sampling)
    assert 0.05 < share < 0.95, "both outcomes of the acceptance test have to occur"
    assert p > ALPHA


@pytest.mark.parametrize("version", [1, 2])
def test_greedy_proposals_under_temperature_keep_the_targets_distribution(small, version):
    p, share = p_value(small, GreedyProposals(drafter_of(small, version)), Sampling(0.8))
    assert 0.02 < share < 0.95  # a certain proposal is accepted with the target's probability of it
    assert p > ALPHA


def test_prompt_lookup_under_temperature_keeps_the_targets_distribution(small):
    p, _ = p_value(small, LookupDrafter(4, longest=2, shortest=1), Sampling(1.0))
    assert p > ALPHA


def accept_greedily(logits, draft, sampling, generator):
    """Wrong: drafts are accepted while they are the target's best tokens; only the next one is sampled."""
    count, _ = accept(logits, draft, Sampling(), None)
    row = target_probabilities(logits[count : count + 1], sampling)
    return count, [*draft.ids[:count].tolist(), int(torch.multinomial(row, 1, generator=generator))]


def accept_without_residual(logits, draft, sampling, generator):
    """Wrong: after a rejection the next token comes from p, not from what q leaves of p."""
    count, tokens = accept(logits, draft, sampling, generator)
    row = target_probabilities(logits[count : count + 1], sampling)
    return count, [*tokens[:count], int(torch.multinomial(row, 1, generator=generator))]


@pytest.mark.parametrize("rule", [accept_greedily, accept_without_residual])
@pytest.mark.parametrize("version", [1, 2])
def test_wrong_acceptance_rule_is_found_out(small, version, rule, monkeypatch):
    monkeypatch.setattr(eval.decode, "accept", rule)
    p, _ = p_value(small, drafter_of(small, version), Sampling(1.0), ENOUGH_TO_FAIL)
    assert p < ALPHA


class Misreporting(GreedyProposals):
    """Wrong: drafts are the best tokens, while the acceptance test is told a sampled distribution."""

    def __init__(self, inner):
        super().__init__(inner)
        self.draft = self._draft

    def start(self, prompt, sampling, generator):
        self.inner.start(prompt, sampling, generator)

    def _draft(self, anchor, count):
        told = self.inner.draft(anchor, count)
        best = told.probabilities.argmax(-1)
        if told.candidates is not None:
            best = told.candidates.gather(-1, best[:, None])[:, 0]
        return Draft(best, told.probabilities, told.candidates)


@pytest.mark.parametrize("version", [1, 2])
def test_drafter_that_ignores_the_temperature_it_reports_is_found_out(small, version):
    p, _ = p_value(small, Misreporting(drafter_of(small, version)), Sampling(1.0), ENOUGH_TO_FAIL)
    assert p < ALPHA
