"""Sampling is lossless: whatever the proposal, tokens are distributed as the target's own."""

import pytest
import scipy.stats
import torch

from eval.sampling import Draft, Sampling, accept, pick, target_probabilities

V = 6
DRAWS = 6_000
#: A correct sampler fails one of these tests once in 10,000 seeds; the seed is fixed.
SMALLEST_P = 1e-4


def chain(logits, proposal, sampling, seed=0):
    """Counts [V, V] of the first two tokens after the anchor over many speculative steps."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(V, V)
    for _ in range(DRAWS):
        draft = proposal(generator)
        rows = torch.stack([logits[0], logits[1 + int(draft.ids[0])], logits[1 + int(draft.ids[1])]])
        _, tokens = accept(rows, draft, sampling, generator)
        if len(tokens) == 1:
            # The next step would start from this token; its first token is the target's own.
            tokens = [*tokens, int(pick(logits[1 + tokens[0]], sampling, generator))]
        counts[tokens[0], tokens[1]] += 1
    return counts


def expected(logits, sampling):
    first = target_probabilities(logits[:1], sampling)[0]
    return first[:, None] * target_probabilities(logits[1:], sampling)


def full(generator, q):
    ids = torch.multinomial(q, 1, generator=generator)[:, 0]
    return Draft(ids, q)


def candidates(generator, q, table):
    columns = torch.multinomial(q, 1, generator=generator)
    return Draft(table.gather(-1, columns)[:, 0], q, table)


def certain(_generator, ids):
    return Draft(ids)


@pytest.mark.parametrize("kind", ["full", "candidates", "certain"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.3, top_k=3)])
def test_two_tokens_are_distributed_as_the_targets(kind, sampling):
    torch.manual_seed(3)
    logits = torch.randn(1 + V, V) * 1.5  # row 0 after the anchor, row 1 + t after token t
    if kind == "full":
        q = (torch.randn(2, V) * 2).softmax(-1)
        counts = chain(logits, lambda g: full(g, q), sampling)
    elif kind == "candidates":
        table = torch.stack([torch.randperm(V)[:3] for _ in range(2)])
        q = torch.randn(2, 3).softmax(-1)
        counts = chain(logits, lambda g: candidates(g, q, table), sampling)
    else:
        counts = chain(logits, lambda g: certain(g, torch.tensor([2, 4])), sampling)
    truth = expected(logits, sampling)
    assert counts[truth == 0].sum() == 0
    cells = truth > 0
    result = scipy.stats.chisquare(
        counts[cells].double().numpy(), (truth[cells] * DRAWS).double().numpy(), sum_check=False
    )
    assert result.pvalue > SMALLEST_P


def test_the_test_can_fail_a_draft_sampler_that_ignores_its_distribution():
    torch.manual_seed(3)
    logits = torch.randn(1 + V, V) * 1.5
    q = (torch.randn(2, V) * 2).softmax(-1)
    # Drafts come from the argmax while the acceptance test is told q.
    counts = chain(logits, lambda _: Draft(q.argmax(-1), q), Sampling(1.0))
    truth = expected(logits, Sampling(1.0))
    p = scipy.stats.chisquare(
        counts.flatten().double(), (truth * DRAWS).flatten().double(), sum_check=False
    ).pvalue
    assert p < SMALLEST_P


def test_greedy_accepts_the_longest_agreeing_prefix():
    logits = torch.eye(5)[[3, 1, 4, 0]]
    assert accept(logits, Draft(torch.tensor([3, 1, 2])), Sampling(), None) == (2, [3, 1, 4])
    assert accept(logits, Draft(torch.tensor([0, 1, 4])), Sampling(), None) == (0, [3])
    assert accept(logits, Draft(torch.tensor([3, 1, 4])), Sampling(), None) == (3, [3, 1, 4, 0])
    assert accept(logits[:1], Draft(torch.tensor([], dtype=torch.int64)), Sampling(), None) == (0, [3])


def test_certain_draft_of_a_certain_token_is_always_accepted():
    logits = torch.full((2, 4), -1e9)
    logits[:, 1] = 0
    generator = torch.Generator().manual_seed(0)
    assert accept(logits, Draft(torch.tensor([1])), Sampling(1.0), generator) == (1, [1, 1])


def test_top_k_then_top_p():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    torch.testing.assert_close(
        target_probabilities(logits, Sampling(1.0, top_k=3)), torch.tensor([[4 / 9, 3 / 9, 2 / 9, 0.0]])
    )
    torch.testing.assert_close(
        target_probabilities(logits, Sampling(1.0, top_p=0.5)), torch.tensor([[4 / 7, 3 / 7, 0.0, 0.0]])
    )
