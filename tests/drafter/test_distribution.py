"""KL and total variation against the target's own distribution: equal to the dense twin, in tiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from csbp.memory import PeakTracker
from drafter.distribution import TargetStates, distances
from drafter.errors import CheckpointError
from drafter.frozen import _ONE_PLUS_NORMS, FrozenHead, LogitScale, TargetOutput
from drafter.objective import ObjectiveConfig, block_loss, slot_weights
from tests.drafter.tiny import VOCABULARY, tiny_config, tiny_drafter, tiny_head

SCALES = [LogitScale(), LogitScale(0.7, 5.0)]
TILES = [(4, 10), (13, 57), (100, 1000), (1, 1)]


def problem(rows=13, vocabulary=57, width=8, states=9, dtype=torch.float64, own_scale=SCALES[0], loud=1.0):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    table = normal(vocabulary, width) * loud
    output = TargetOutput(1 + 0.3 * normal(width), 1e-5, own_scale)
    target = TargetStates(normal(states, width) * 3, torch.randint(states, (rows,), generator=generator))
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    return normal(rows, width).requires_grad_(), FrozenHead(table, table, output=output), target, labels


def dense(hidden, head, target, labels, scale):
    """The specification, in float64: both distributions as they are defined."""
    table, output = head.head.double(), head.output
    states = target.states.double()[target.rows]
    normed = states / (states.square().mean(1, keepdim=True) + output.eps).sqrt() * output.weight.double()

    def log_softmax(rows, own):
        logits = rows @ table.T * own.multiplier
        return (
            logits if own.softcap is None else own.softcap * torch.tanh(logits / own.softcap)
        ).log_softmax(1)

    q, p = log_softmax(hidden, scale), log_softmax(normed, output.scale)
    kl = (p.exp() * (p - q)).sum(1)
    tv = 0.5 * (p.exp() - q.exp()).abs().sum(1)
    gold = labels[:, None]
    return kl, tv, -q.gather(1, gold)[:, 0], -p.gather(1, gold)[:, 0], q.argmax(1) == labels


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("own_scale", SCALES)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_distances_and_gradients_equal_the_dense_twin(scale, own_scale, tiles, dtype, tolerance):
    """Distances are of order 1, so the tolerance is relative and absolute; gradients sum 57 terms."""
    hidden, head, target, labels = problem(dtype=dtype, own_scale=own_scale)
    weights = torch.linspace(0.1, 2.0, len(labels), dtype=torch.float64)
    found = distances(
        hidden, labels, target, head, scale, kl=True, tv=True, row_tile=tiles[0], vocabulary_tile=tiles[1]
    )
    reference = hidden.detach().double().requires_grad_()
    expected = dense(reference, head, target, labels, scale)
    for name, one in zip(("kl", "tv", "ce", "target_ce"), expected, strict=False):
        torch.testing.assert_close(
            getattr(found, name).double(), one, rtol=tolerance, atol=tolerance, msg=name, check_dtype=False
        )
    assert torch.equal(found.best, expected[4])
    for share in (0.0, 0.3, 1.0):
        mine = ((share * found.kl + (1 - share) * found.tv).double() * weights).sum()
        (got,) = torch.autograd.grad(mine, hidden, retain_graph=True)
        theirs = ((share * expected[0] + (1 - share) * expected[1]) * weights).sum()
        (wanted,) = torch.autograd.grad(theirs, reference, retain_graph=True)
        torch.testing.assert_close(got.double(), wanted, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(("kl", "tv"), [(True, False), (False, True)])
def test_one_distance_alone_is_the_same_and_the_other_gives_no_gradient(kl, tv):
    hidden, head, target, labels = problem()
    both = distances(hidden, labels, target, head, SCALES[1], kl=True, tv=True)
    alone = distances(hidden, labels, target, head, SCALES[1], kl=kl, tv=tv, vocabulary_tile=20)
    assert alone.kl.requires_grad == kl
    assert (alone.tv is not None) == tv
    name = "kl" if kl else "tv"
    (got,) = torch.autograd.grad(getattr(alone, name).sum(), hidden)
    (expected,) = torch.autograd.grad(getattr(both, name).sum(), hidden)
    torch.testing.assert_close(getattr(alone, name), getattr(both, name))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("scale", SCALES)
def test_gradcheck(scale):
    hidden, head, target, labels = problem(rows=5)

    def loss(rows):
        found = distances(rows, labels, target, head, scale, kl=True, tv=True, row_tile=2, vocabulary_tile=10)
        return found.kl.sin() * found.tv

    assert torch.autograd.gradcheck(loss, (hidden,))


def test_a_released_vocabulary_of_248320_stays_exact():
    """Float32 against dense float64, with peaked distributions as those of a real target."""
    hidden, head, target, labels = problem(
        rows=6, vocabulary=248_320, width=24, dtype=torch.float32, loud=2.0
    )
    found = distances(hidden, labels, target, head, LogitScale(), kl=True, tv=True)
    reference = hidden.detach().double().requires_grad_()
    expected = dense(reference, head, target, labels, LogitScale())
    for mine, theirs in ((found.kl, expected[0]), (found.tv, expected[1])):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=1e-6)
        (got,) = torch.autograd.grad(mine.sum(), hidden, retain_graph=True)
        (wanted,) = torch.autograd.grad(theirs.sum(), reference, retain_graph=True)
        assert (got - wanted).norm() < 1e-5 * wanted.norm()  # logits of 50 are right to 1e-5 in float32


def test_memory_is_that_of_a_tile_whatever_the_vocabulary():
    peaks = []
    for vocabulary in (4096, 16_384):
        hidden, head, target, labels = problem(rows=96, vocabulary=vocabulary, width=16, dtype=torch.float32)
        with PeakTracker() as tracker:
            found = distances(
                hidden, labels, target, head, SCALES[1], kl=True, tv=True, row_tile=32, vocabulary_tile=256
            )
            (found.kl + found.tv).sum().backward()
        peaks.append(tracker.peak_bytes)
    tile, rows = 4 * 32 * 256, 4 * 96 * 16
    assert peaks[0] == peaks[1]
    assert peaks[0] < 7 * tile + 8 * rows  # all logits of the smaller vocabulary alone would be 48 tiles


def test_half_precision_states_and_tables_are_widened_by_tiles():
    hidden, head, target, labels = problem(rows=40, vocabulary=3000, dtype=torch.float32)
    half = FrozenHead(head.embedding.bfloat16(), head.head.bfloat16(), output=head.output)
    narrow = TargetStates(target.states.bfloat16(), target.rows)
    rows = hidden.detach().bfloat16().requires_grad_()
    found = distances(rows, labels, narrow, half, LogitScale(), kl=True, tv=True, vocabulary_tile=100)
    expected = dense(rows.detach().double(), half, narrow, labels, LogitScale())
    torch.testing.assert_close(found.kl.double(), expected[0], rtol=1e-5, atol=1e-5)
    found.kl.sum().backward()
    assert rows.grad.dtype == torch.bfloat16


def test_a_draft_that_is_the_target_is_at_no_distance():
    _, head, target, labels = problem()
    own = head.output.normed(target.states, torch.float64)[target.rows].requires_grad_()
    found = distances(own, labels, target, head, LogitScale(), kl=True, tv=True)
    (gradient,) = torch.autograd.grad((found.kl + found.tv).sum(), own)
    assert found.kl.abs().max() < 1e-14
    assert found.tv.abs().max() < 1e-14
    assert gradient.abs().max() < 1e-14
    torch.testing.assert_close(found.ce, found.target_ce)


def test_a_certain_target_gives_the_losses_on_labels():
    """With one token that has all the target's probability, KL is cross entropy and TV is 1 - p."""
    table = torch.eye(12, dtype=torch.float64)
    labels = torch.tensor([3, 7, 0])
    output = TargetOutput(torch.full((12,), 300.0, dtype=torch.float64), 1e-9, LogitScale())
    target = TargetStates(table[labels], torch.arange(3))
    hidden = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = distances(
        hidden, labels, target, FrozenHead(table, table, output=output), LogitScale(), kl=True, tv=True
    )
    torch.testing.assert_close(found.kl, found.ce)
    torch.testing.assert_close(found.tv, 1 - torch.exp(-found.ce))


@pytest.mark.parametrize("loss", ["kl", "target_tv", "lk"])
@pytest.mark.parametrize("weights", ["exponential", "dpace"])
def test_block_loss_equals_the_dense_twin(loss, weights):
    config = tiny_config(1, output_multiplier=0.5, final_logit_softcapping=8.0)
    drafter, head = tiny_drafter(config, dtype=torch.float64), tiny_head(dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    head.output = TargetOutput(torch.rand(64, generator=generator) + 0.5, 1e-6, LogitScale(0.1, 20.0))
    hidden = torch.randn(6, 4, 64, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(VOCABULARY, (6, 3), generator=generator)
    supervised = torch.rand(6, 3, generator=generator) < 0.8
    target = TargetStates(
        torch.randn(7, 64, generator=generator), torch.randint(7, (6, 3), generator=generator)
    )
    objective = ObjectiveConfig(loss=loss, weights=weights, lambda_scale=0.8, row_tile=5, vocabulary_tile=20)
    anchors = torch.zeros(6, dtype=torch.int64)
    sums = block_loss(drafter, hidden, labels, supervised, anchors, head, objective, 0, target=target)
    sums.loss.backward()
    reference = hidden.detach().requires_grad_()
    kl, tv, ce, target_ce, _ = dense(
        reference[:, 1:][supervised],
        head,
        TargetStates(target.states, target.rows[supervised]),
        labels[supervised],
        LogitScale.of(config),
    )
    share = 0.8 * torch.exp(-3 * (1 - tv.detach()))
    per_slot = {"kl": kl, "target_tv": tv, "lk": share * kl + (1 - share) * tv}[loss]
    gold = torch.zeros(6, 3, dtype=torch.float64)
    gold[supervised] = torch.exp(-ce.detach())
    weight = slot_weights(objective, 4, gold, supervised)[supervised]
    (weight * per_slot).sum().backward()
    torch.testing.assert_close(sums.loss, (weight * per_slot).sum())
    torch.testing.assert_close(hidden.grad, reference.grad)
    torch.testing.assert_close(sums.metrics["kl"], kl.sum())
    torch.testing.assert_close(sums.metrics["target_ce"], target_ce.sum())
    assert ("overlap" in sums.metrics) == (loss != "kl")


def test_a_sampled_vocabulary_is_no_distribution():
    with pytest.raises(ValueError, match="vocabulary_sample 100"):
        ObjectiveConfig(loss="kl", vocabulary_sample=100)


TARGETS = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "qwen3_next": {"head_dim": 8, "num_experts": 0, "layer_types": ["full_attention"] * 2},
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_targets_own_logits_come_from_its_state_before_the_norm(kind, tmp_path):
    """B3: norm, its 1 + weight where the model has it, soft cap; against the model itself."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        **TARGETS[kind],
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    norm = model.model.norm
    torch.nn.init.normal_(norm.weight, std=0.5)
    states = []
    norm.register_forward_pre_hook(lambda _, given: states.append(given[0]))
    with torch.no_grad():
        logits = model(torch.arange(9)[None]).logits[0]
    model.save_pretrained(tmp_path)
    output = TargetOutput.from_checkpoint(tmp_path)
    head = FrozenHead.from_checkpoint(tmp_path)
    ours = output.scale(output.normed(states[0][0].double(), torch.float64) @ head.head.double().T)
    torch.testing.assert_close(ours.float(), logits, rtol=1e-5, atol=1e-5)
    moved = head.to("cpu")
    assert moved.output is None
    head.output = output
    assert head.to("cpu").output.scale == output.scale


def test_every_model_whose_norm_adds_one_is_known():
    """transformers' own sources: a text model that gains such a norm has to be listed."""
    folder = Path(transformers.__file__).parent / "models"
    missing = []
    for file in sorted(folder.glob("*/modeling_*.py")):
        if "1.0 + self.weight" not in file.read_text():
            continue
        configuration = next(file.parent.glob("configuration_*.py")).read_text()
        kinds = [line.split('"')[1] for line in configuration.splitlines() if "    model_type = " in line]
        texts = [kind for kind in kinds if not kind.endswith(("_vision", "_encoder", "_decoder", "_module"))]
        missing += [kind for kind in texts if kind not in _ONE_PLUS_NORMS]
    assert missing == []


@pytest.mark.parametrize(
    ("config", "bias", "says"),
    [
        ({"rms_norm_eps": None}, False, "no final RMS norm"),
        ({"rms_norm_eps": 1e-6}, True, "no final RMS norm"),
        ({"rms_norm_eps": 1e-6, "logit_scale": 0.25}, False, "logit_scale"),
    ],
)
def test_a_target_whose_logits_are_made_otherwise_is_refused(tmp_path, config, bias, says):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    tensors = {"model.embed_tokens.weight": torch.zeros(4, 2), "model.norm.weight": torch.ones(2)}
    if bias:
        tensors["model.norm.bias"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        TargetOutput.from_checkpoint(tmp_path)
