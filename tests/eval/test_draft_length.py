"""Cutting drafts: the model against known chances, the rule against brute force, decoding lossless."""

import itertools
import json

import numpy as np
import pytest
import torch

from drafter.proposal import propose
from eval.block_drafter import BlockDrafter
from eval.decode import Limits, decode_plain, decode_speculative
from eval.draft_length import AcceptanceModel, DraftLength, StepCosts, measure_costs
from eval.errors import EvalError
from eval.options import EvalOptions, adaptive_of, blocks_of
from eval.sampling import Sampling
from eval.target import Target
from tests.drafter.targets import qwen3_target
from tests.drafter.tiny import tiny_config, tiny_drafter, tiny_head

GREEDY = {"sampling": Sampling(), "generator": None}


def blocks(count, biases, weights, seed=0):
    """Scores of drafts, and how many are accepted when each is so with the chance that the model gives."""
    generator = torch.Generator().manual_seed(seed)
    scores = -3 * torch.rand(count, len(biases), 2, generator=generator)
    chance = torch.sigmoid(torch.tensor(biases) + scores @ torch.tensor(weights))
    hits = torch.rand(chance.shape, generator=generator) < chance
    return scores, hits.long().cumprod(1).sum(1)


def test_fit_finds_the_chances_that_made_the_data():
    biases, weights = [2.0, 1.0, 0.5], [0.8, 0.4]
    scores, accepted = blocks(40_000, biases, weights)
    model = AcceptanceModel.fit(scores, accepted, torch.full_like(accepted, 3))
    assert model.biases == pytest.approx(biases, abs=0.1)
    assert model.weights == pytest.approx(weights, abs=0.05)
    assert model.log_loss < model.base_log_loss
    # calibrated: of drafts said to be accepted with some chance, that share is
    fresh, found = blocks(20_000, biases, weights, seed=1)
    said = np.array([model.probabilities(s)[0] for s in fresh])
    for low in (0.2, 0.4, 0.6, 0.8):
        some = (said >= low) & (said < low + 0.2)
        assert (found.numpy() > 0)[some].mean() == pytest.approx(said[some].mean(), abs=0.03)


def test_drafts_that_no_token_is_known_for_do_not_count():
    scores, accepted = blocks(2_000, [1.0, 1.0], [0.5, 0.5])
    known = torch.randint(3, (2_000,), generator=torch.Generator().manual_seed(2))
    cut = torch.minimum(accepted, known)
    some = AcceptanceModel.fit(scores, cut, known)
    assert some.drafts == int(((accepted > 0) & (known > 1)).sum() + (known > 0).sum())
    with pytest.raises(EvalError, match="no draft"):
        AcceptanceModel.fit(scores, cut, torch.zeros_like(known))


def test_rule_reaches_the_best_rate_that_any_rule_of_three_kinds_of_block_has():
    """Blocks of three kinds, equally often; brute force over a length for each kind."""
    model = AcceptanceModel([0.0] * 4, [1.0, 0.0], 1, 0.0, 0.0)
    costs = StepCosts(0.2, [1.0, 1.1, 1.3, 1.5, 1.7])
    kinds = [torch.full((4, 2), value) for value in (3.0, 0.0, -2.0)]  # chances 0.95, 0.5, 0.12

    def gain(kind, n):
        return 1 + float(np.cumprod(model.probabilities(kinds[kind]))[:n].sum())

    def rate(lengths):
        return sum(map(gain, range(3), lengths)) / sum(costs.draft + costs.verify[n] for n in lengths)

    best = max(itertools.product(range(5), repeat=3), key=rate)
    rule = DraftLength(model, costs)
    chosen = [[rule.choose(kind) for kind in kinds] for _ in range(200)]
    assert tuple(chosen[-1]) == best
    assert best[0] > best[1] > best[2]


def test_free_rows_are_all_taken_and_dear_ones_are_not():
    model = AcceptanceModel([0.0] * 3, [1.0, 0.0], 1, 0.0, 0.0)
    scores = torch.full((3, 2), -1.0)
    assert DraftLength(model, StepCosts(0.1, [1.0] * 4)).choose(scores) == 3
    assert DraftLength(model, StepCosts(0.1, [1.0, 2.0, 3.0, 4.0])).choose(scores) == 0
    assert DraftLength(model).choose(scores) == 3  # costs are not known yet


@pytest.mark.parametrize("version", [1, 2])
def test_drawn_drafts_are_never_cut(version):
    """Kept because of what it is, a draft is no longer drawn from the proposal that it is tested against."""
    drafter, head = tiny_drafter(tiny_config(version)), tiny_head()
    hidden = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([5, 9])
    drawn = propose(drafter, hidden, anchors, head, 1.0, torch.Generator().manual_seed(0), scored=True)
    assert drawn.scores is None
    greedy = propose(drafter, hidden, anchors, head, scored=True)
    assert greedy.scores.shape == (2, 3, 2)
    assert torch.equal(greedy.ids, propose(drafter, hidden, anchors, head).ids)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_with_cut_blocks_emits_the_targets_tokens(version, temperature):
    target = Target(qwen3_target(vocab_size=128))
    model = tiny_drafter(tiny_config(version, vocab_size=128, block_size=6))
    lengths = DraftLength(AcceptanceModel([0.5] * 5, [1.0, 0.5], 1, 0.0, 0.0))
    drafter = BlockDrafter(model, target.frozen_head, name="cut", length=lengths)
    lengths.costs = StepCosts(0.1, [1.0, 1.1, 1.2, 1.4, 1.7, 2.0])
    prompt, limits = list(range(10, 30)), Limits(24)
    sampled = {"sampling": Sampling(temperature), "generator": torch.Generator().manual_seed(0)}
    found = decode_speculative(target, drafter, prompt, limits=limits, **sampled)
    assert len(found.ids) == 24
    if temperature == 1:
        assert {step.drafted for step in found.steps[:-5]} <= {5}
    else:
        assert found.ids == decode_plain(target, prompt, limits=limits, **GREEDY).ids
        assert len({step.drafted for step in found.steps}) > 1


def test_costs_are_measured_for_every_number_of_rows():
    target = Target(qwen3_target(vocab_size=128))
    drafter = BlockDrafter(
        tiny_drafter(tiny_config(2, vocab_size=128, block_size=4)), target.frozen_head, name="d"
    )
    costs = measure_costs(target, drafter)
    assert costs.draft > 0
    assert len(costs.verify) == 4
    assert sorted(costs.verify) == list(costs.verify)


def test_model_is_saved_and_other_files_are_refused(tmp_path):
    model = AcceptanceModel([0.1], [0.2, 0.3], 4, 0.5, 0.6)
    model.save(tmp_path / "runs" / "model.json")
    assert AcceptanceModel.load(tmp_path / "runs" / "model.json", 1) == model
    (tmp_path / "other.json").write_text(json.dumps({"loss": 1}))
    for name in ("other.json", "none.json"):
        with pytest.raises(EvalError, match=rf"{name}.*replay --adaptive"):
            AcceptanceModel.load(tmp_path / name, 1)
    with pytest.raises(EvalError, match=r"blocks of 2 rows, but 4 .*--block 4"):
        AcceptanceModel.load(tmp_path / "runs" / "model.json", 3)


def options(**changes):
    return EvalOptions(**{"target": "t", "drafter": ["a=runs/a"], "adaptive": ["runs/model.json"], **changes})


def test_adaptive_methods_are_named_after_their_drafters(monkeypatch):
    monkeypatch.setattr("eval.options.read_config", lambda _folder: tiny_config(2, block_size=6))
    assert blocks_of(options(baseline=["none"])) == {"a": 6, "a adaptive": 6}
    two = options(drafter=["a=x", "b=y"], adaptive=["b=m.json"], baseline=["none"])
    assert list(blocks_of(two)) == ["a", "b", "b adaptive"]
    with pytest.raises(EvalError, match="expected NAME=FILE with a drafter among a, b"):
        adaptive_of(options(drafter=["a=x", "b=y"]))
    with pytest.raises(ValueError, match="needs --temperature 0"):
        options(temperature=0.5)
    for changes in ({"backend": "vllm"}, {"batch_size": 2}):
        with pytest.raises(ValueError, match="hf backend with --batch-size 1"):
            options(**changes)
