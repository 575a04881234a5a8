"""Weights, losses and sums by hand, and their invariance to how blocks are grouped."""

import math

import pytest
import torch
from pydantic import ValidationError

from drafter.objective import ObjectiveConfig, block_loss, leading_run, slot_weights
from drafter.proposal import propose, walk_metrics
from tests.drafter.tiny import VOCABULARY, dense_hidden, tiny_config, tiny_drafter, tiny_head

A, B = 6, 4


def batch(dtype=torch.float64, seed=5):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(A, B, 64, generator=generator, dtype=dtype)
    labels = torch.randint(VOCABULARY, (A, B - 1), generator=generator)
    supervised = torch.rand(A, B - 1, generator=generator) < 0.8
    anchors = torch.randint(VOCABULARY, (A,), generator=generator)
    return hidden, labels, supervised, anchors


def setting(version=2, dtype=torch.float64, **changes):
    return tiny_drafter(tiny_config(version, **changes), dtype=dtype), tiny_head(dtype=dtype)


def test_exponential_weights_by_hand():
    supervised = torch.tensor([[True, True, False]])
    weights = slot_weights(ObjectiveConfig(gamma=2.0), 4, torch.ones(1, 3), supervised)
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(-0.5), 0.0]]))


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (6, 3.0)])
def test_default_decay_is_the_published_one(block, gamma):
    weights = slot_weights(
        ObjectiveConfig(), block, torch.ones(1, block - 1), torch.ones(1, block - 1, dtype=torch.bool)
    )
    assert math.isclose(weights[0, 1], math.exp(-1 / gamma), rel_tol=1e-6)


def test_dpace_weights_by_hand():
    """alpha 0.5: s = (0.6, 1, 0.9), P = (0.6, masked, 0.54), so w1 = 1.14 and w3 = 0.54."""
    probability = torch.tensor([[0.2, 0.7, 0.8]])
    supervised = torch.tensor([[True, False, True]])
    weights = slot_weights(ObjectiveConfig(weights="dpace"), 4, probability, supervised)
    torch.testing.assert_close(weights, torch.tensor([[1.14, 0.0, 0.54]]))


@pytest.mark.parametrize("loss", ["ce", "tv", "lambda"])
@pytest.mark.parametrize("weights", ["exponential", "dpace"])
def test_unary_loss_equals_the_dense_twin(loss, weights):
    drafter, head = setting(version=1, output_multiplier=0.5, final_logit_softcapping=8.0)
    hidden, labels, supervised, anchors = batch()
    hidden.requires_grad_()
    objective = ObjectiveConfig(loss=loss, weights=weights, row_tile=5, vocabulary_tile=20)
    sums = block_loss(drafter, hidden, labels, supervised, anchors, head, objective, step=0)
    sums.loss.backward()
    reference = hidden.detach().requires_grad_()
    logits = 8 * torch.tanh(reference[:, 1:] @ head.head.T * 0.5 / 8)
    p = logits.softmax(-1).gather(-1, labels[..., None])[..., 0]
    share = torch.exp(-3 * p.detach())
    per_slot = {"ce": -p.log(), "tv": 1 - p, "lambda": share * -p.log() + (1 - share) * (1 - p)}[loss]
    w = slot_weights(objective, B, p.detach(), supervised)
    (w * per_slot).sum().backward()
    torch.testing.assert_close(sums.loss, (w * per_slot).sum())
    torch.testing.assert_close(hidden.grad, reference.grad)


def dense_selector_loss(drafter, hidden, labels, supervised, anchors, head, weights):
    """The published objective, slot by slot: strict top-k, true predecessor."""
    selector = drafter.candidate_selector
    predecessor_table, successor_table = selector.codebooks(head)
    total = hidden.new_zeros(())
    for block in range(len(hidden)):
        previous = anchors[block]
        for slot in range(labels.shape[1]):
            row = hidden[block, slot + 1]
            unary, candidates = (head.head @ row).topk(drafter.config.selector_top_k)
            gold = labels[block, slot]
            if supervised[block, slot] and gold in candidates:
                edge = predecessor_table[previous] * selector.hidden_projection(row)
                scores = unary + successor_table[candidates] @ edge
                place = (candidates == gold).nonzero()[0, 0]
                total = total - weights[block, slot] * scores.log_softmax(0)[place]
            previous = gold
    return total


@pytest.mark.parametrize("parametrisation", ["free", "low_rank"])
def test_selector_loss_and_all_gradients_equal_the_dense_twin(parametrisation):
    drafter, head = setting(selector_parametrisation=parametrisation, selector_top_k=40)
    hidden, labels, supervised, anchors = batch()
    hidden.requires_grad_()
    objective = ObjectiveConfig(selector_weight=0.3)
    sums = block_loss(drafter, hidden, labels, supervised, anchors, head, objective, step=0)
    unary = block_loss(
        drafter, hidden, labels, supervised, anchors, head, ObjectiveConfig(selector_weight=0.0), step=0
    )
    inputs = (hidden, *drafter.candidate_selector.parameters())
    got = torch.autograd.grad(sums.loss - unary.loss, inputs)
    weights = slot_weights(objective, B, torch.ones(A, B - 1, dtype=torch.float64), supervised)
    expected_loss = 0.3 * dense_selector_loss(drafter, hidden, labels, supervised, anchors, head, weights)
    torch.testing.assert_close(sums.loss - unary.loss, expected_loss)
    for found, expected in zip(got, torch.autograd.grad(expected_loss, inputs), strict=True):
        torch.testing.assert_close(found, expected)
    assert sums.metrics["recall_hits"].sum() < sums.metrics["recall_slots"].sum()


def test_selector_starts_late_and_ramps():
    objective = ObjectiveConfig(selector_weight=2.0, selector_start_step=10, selector_ramp_steps=4)
    assert [objective.selector_factor(step) for step in (9, 10, 11, 13, 50)] == [0.0, 0.5, 1.0, 2.0, 2.0]


def test_new_selector_changes_nothing_but_learns():
    for parametrisation in ("free", "low_rank"):
        config = tiny_config(selector_parametrisation=parametrisation, selector_top_k=40)
        drafter, head = tiny_drafter(config), tiny_head()
        drafter.candidate_selector.reset_parameters()
        hidden, labels, supervised, anchors = batch(torch.float32)
        hidden.requires_grad_()
        assert torch.equal(
            propose(drafter, hidden, anchors, head).ids,
            propose(drafter, hidden, anchors, head).candidates[..., 0],
        )
        sums = block_loss(drafter, hidden, labels, supervised, anchors, head, ObjectiveConfig(), step=0)
        sums.loss.backward()
        successor = [
            parameter
            for name, parameter in drafter.candidate_selector.named_parameters()
            if name.startswith("successor")
        ]
        assert successor[0].grad.abs().max() > 0


def test_sums_do_not_depend_on_how_blocks_are_grouped():
    """C18: six blocks at once, or one at a time, give one loss, one gradient and one set of metrics."""
    drafter, head = setting()
    hidden, labels, supervised, anchors = batch()
    objective = ObjectiveConfig(weights="dpace")

    def total(groups):
        drafter.zero_grad()
        losses, metrics = 0.0, {}
        for group in groups:
            sums = block_loss(
                drafter,
                hidden[group],
                labels[group],
                supervised[group],
                anchors[group],
                head,
                objective,
                step=0,
            )
            sums.loss.backward()
            losses += float(sums.loss.detach())
            metrics = {name: metrics.get(name, 0) + value for name, value in sums.metrics.items()}
        gradient = drafter.candidate_selector.hidden_projection.weight.grad.clone()
        return losses, gradient, metrics

    whole = total([slice(0, A)])
    apart = total([slice(i, i + 1) for i in range(A)] + [slice(0, 0)])
    assert math.isclose(whole[0], apart[0], rel_tol=1e-12)
    torch.testing.assert_close(whole[1], apart[1])
    for name, value in whole[2].items():
        torch.testing.assert_close(apart[2][name], value, msg=name)


@pytest.mark.parametrize("version", [1, 2])
def test_no_blocks_and_no_supervised_slots_still_give_every_selector_gradient(version):
    drafter, head = setting(version)
    hidden, labels, supervised, anchors = batch()
    hidden.requires_grad_()
    for blocks, mask in ((slice(0, 0), supervised), (slice(0, A), torch.zeros_like(supervised))):
        sums = block_loss(
            drafter,
            hidden[blocks],
            labels[blocks],
            mask[blocks],
            anchors[blocks],
            head,
            ObjectiveConfig(),
            step=0,
        )
        assert float(sums.loss.detach()) == 0.0
        sums.loss.backward()
        assert all(float(p.grad.abs().max()) == 0.0 for p in drafter.parameters() if p.grad is not None)
        if version == 2:
            assert all(p.grad is not None for p in drafter.candidate_selector.parameters())


def test_a_share_of_blocks_is_rescaled_to_the_expected_selector_loss():
    """Mean over 300 draws of half the blocks within 4 standard errors of the loss on all blocks."""
    drafter, head = setting(selector_top_k=40)
    hidden, labels, supervised, anchors = batch()
    generator = torch.Generator().manual_seed(0)

    def selector_loss(fraction):
        objective = ObjectiveConfig(selector_blocks_fraction=fraction)
        sums = block_loss(drafter, hidden, labels, supervised, anchors, head, objective, 0, generator)
        return sums.metrics["selector_loss"]

    draws = torch.stack([selector_loss(0.5) for _ in range(300)])
    assert abs(draws.mean() - selector_loss(1.0)) < 4 * draws.std() / 300**0.5


def test_metrics_by_hand():
    """Two blocks whose rows are the head rows of chosen tokens: hits are known without computing logits."""
    drafter, head = setting(version=1)
    rows = head.head / head.head.norm(dim=1, keepdim=True) * 50
    labels = torch.tensor([[10, 11, 12], [20, 21, 22]])
    best = torch.tensor([[10, 11, 40], [20, 41, 22]])
    hidden = torch.cat((torch.zeros(2, 1, 64, dtype=torch.float64), rows[best]), 1)
    supervised = torch.tensor([[True, True, True], [True, True, False]])
    anchors = torch.tensor([5, 6])
    metrics = block_loss(drafter, hidden, labels, supervised, anchors, head, ObjectiveConfig(), 0).metrics
    assert metrics["slots"].tolist() == [2, 2, 1]
    assert metrics["top1_hits"].tolist() == [2, 1, 0]
    assert metrics["unary_run"] == 3
    assert metrics["run_blocks"] == 2
    walk = walk_metrics(drafter, hidden, anchors, labels, supervised, head)
    assert walk["walk_run"] == 3
    assert walk["walk_prefix_hits"].tolist() == [2, 1, 0]
    assert walk["walk_prefix_slots"].tolist() == [2, 2, 1]
    assert all(value.dtype == torch.float64 for value in (*metrics.values(), *walk.values()))


def test_leading_run_stops_at_the_first_miss():
    hits = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    assert leading_run(hits).tolist() == [3, 2, 1, 0]


def test_sampled_vocabulary_reports_full_top1_only_where_it_is_known():
    drafter, head = setting()
    hidden, labels, supervised, anchors = batch()
    objective = ObjectiveConfig(vocabulary_sample=20, selector_blocks_fraction=0.5)
    generator = torch.Generator().manual_seed(0)
    sums = block_loss(drafter, hidden, labels, supervised, anchors, head, objective, 0, generator)
    full = block_loss(drafter, hidden, labels, supervised, anchors, head, ObjectiveConfig(), 0)
    assert 0 < sums.metrics["top1_slots"].sum() < full.metrics["top1_slots"].sum()
    assert sums.metrics.keys() == full.metrics.keys()
    assert (sums.metrics["sample_top1_hits"] >= full.metrics["top1_hits"]).all()


def test_unsupervised_labels_may_be_padding():
    drafter, head = setting()
    hidden, labels, supervised, anchors = batch()
    padded = labels.masked_fill(~supervised, -100)
    for objective in (ObjectiveConfig(), ObjectiveConfig(vocabulary_sample=20)):
        sums = block_loss(drafter, hidden, padded, supervised, anchors, head, objective, 0)
        assert torch.isfinite(sums.loss)


def test_unknown_keys_are_refused():
    with pytest.raises(ValidationError):
        ObjectiveConfig(gama=3.0)


@pytest.mark.parametrize("version", [1, 2])
def test_bfloat16_autocast_keeps_the_direction_of_the_gradient(version):
    """Eight bits of mantissa through two layers: cosine to the float32 gradient above 0.995."""
    config = tiny_config(version, selector_top_k=40) if version == 2 else tiny_config(1)
    drafter, head = tiny_drafter(config, scale=0.1), tiny_head()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, config.feature_width, generator=generator)
    ids = torch.randint(VOCABULARY, (24,), generator=generator)
    anchors = torch.tensor([4, 9, 15])
    labels = ids[anchors[:, None] + torch.arange(1, B)]
    gradients = []
    for enabled in (False, True):
        drafter.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            hidden = dense_hidden(drafter, head, features, anchors, ids)
            supervised = torch.ones_like(labels, dtype=torch.bool)
            sums = block_loss(drafter, hidden, labels, supervised, ids[anchors], head, ObjectiveConfig(), 0)
        sums.loss.backward()
        assert sums.loss.dtype == torch.float32
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.995
