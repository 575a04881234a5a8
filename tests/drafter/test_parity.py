"""Parity with z-lab's reference inference (PyPI dflash 0.1.0), which loads our export in its own loop."""

import pytest
import torch

from drafter.cache import DraftCache, draft_hidden
from drafter.checkpoint import load_drafter, save_drafter
from drafter.frozen import FrozenHead
from drafter.proposal import propose
from drafter.vocabulary import LogitScale
from tests.drafter.targets import qwen3_target
from tests.drafter.test_rope import ROPES
from tests.drafter.tiny import MIXED, tiny_config, tiny_drafter

reference = pytest.importorskip("dflash.model")

KINDS = {
    "full": {"sliding_window": None},
    "sliding": {"sliding_window": 12},
    "causal sliding": {"sliding_window": 12, "is_causal": None},
    "mixed": {"sliding_window": 12, "layer_types": MIXED, "is_causal": None},
    "yarn": {"sliding_window": 12, "rope": ROPES["yarn"]},
    "llama3": {"sliding_window": None, "rope": ROPES["llama3"]},
}


@pytest.fixture(scope="module")
def target():
    return qwen3_target()


def load_both(tmp_path, version, **changes):
    config = tiny_config(version, block_size=6, **changes)
    drafter = tiny_drafter(config, seed=7, scale=0.05)
    save_drafter(drafter, tmp_path / "drafter", target_name="tiny")
    cls = reference.DFlash2DraftModel if version == 2 else reference.DFlashDraftModel
    theirs, report = cls.from_pretrained(tmp_path / "drafter", output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(theirs.rotary_emb.inv_freq, drafter.rotary.frequencies.float())
    assert theirs.rotary_emb.attention_scaling == drafter.rotary.scaling
    return load_drafter(tmp_path / "drafter"), theirs.eval()


def record(theirs, target, prompt, steps):
    """Run z-lab's own decode loop; return each call of its drafter with features, positions and output."""
    calls = []
    original = theirs.forward

    def spy(**kwargs):
        hidden = original(**kwargs)
        calls.append({**kwargs, "hidden": hidden})
        return hidden

    theirs.forward = spy
    output = reference.dflash_generate(
        theirs, target, prompt, steps * 6, stop_token_ids=None, return_stats=False
    )
    del theirs.forward
    return calls[:steps], output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [1, 2])
def test_twenty_decode_steps_draft_the_same_tokens(tmp_path, target, version, kind):
    """Float32: hidden states and logits to 1e-5, drafts identical.

    Their features come from cached steps and are compared with hooks on one uncached pass, hence 1e-4.
    """
    ours, theirs = load_both(tmp_path, version, **KINDS[kind])
    head = FrozenHead(target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach())
    prompt = torch.randint(4, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    calls, output = record(theirs, target, prompt, steps=20)
    assert len(calls) == 20
    taps = []
    hooks = [
        target.model.layers[layer].register_forward_hook(lambda _, __, out: taps.append(out))
        for layer in ours.config.target_layer_ids
    ]
    with torch.no_grad():
        target(output[:, :-1])
    for hook in hooks:
        hook.remove()
    features = torch.cat(taps, -1)[0]
    cache = DraftCache(ours.config)
    for call in calls:
        new = call["target_hidden"][0]
        start = cache.length
        torch.testing.assert_close(new, features[start : start + len(new)], rtol=1e-4, atol=1e-4)
        assert call["position_ids"][0, 0] == start
        anchor = output[0, start + len(new)].view(1)
        block = call["noise_embedding"].shape[1]
        hidden = draft_hidden(ours, cache, new, anchor, head, block)
        their_rows = call["hidden"][:, 1 - block :]
        torch.testing.assert_close(hidden[:, 1:], their_rows, rtol=1e-5, atol=1e-5)
        logits = LogitScale.of(ours.config)(hidden[:, 1:] @ head.head.T)
        with torch.no_grad():
            their_logits = theirs.compute_logits(their_rows, target.lm_head)
            if version == 2:
                drafts, _, _ = theirs.propose(their_rows, anchor, target.lm_head, 0.0)
            else:
                drafts = their_logits.argmax(-1)
        torch.testing.assert_close(logits, their_logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(propose(ours, hidden, anchor, head).ids, drafts)


def test_logit_scale_soft_cap_and_embedding_scale_are_theirs(tmp_path, target):
    changes = {"output_multiplier": 0.2, "final_logit_softcapping": 5.0, "input_embedding_scale": 1.7}
    ours, theirs = load_both(tmp_path, 2, **changes)
    head = FrozenHead(target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach())
    prompt = torch.randint(4, 97, (1, 20), generator=torch.Generator().manual_seed(2))
    (call,), output = record(theirs, target, prompt, steps=1)
    hidden = draft_hidden(ours, DraftCache(ours.config), call["target_hidden"][0], output[0, 20:21], head)
    torch.testing.assert_close(hidden[:, 1:], call["hidden"][:, 1:], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        expected = theirs.compute_logits(call["hidden"], target.lm_head)
    torch.testing.assert_close(
        LogitScale.of(ours.config)(hidden @ head.head.T), expected, rtol=1e-5, atol=1e-5
    )


def test_sampling_probabilities_are_theirs(tmp_path, target):
    ours, theirs = load_both(tmp_path, 2)
    head = FrozenHead(target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach())
    hidden = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    anchor = torch.tensor([9])
    drawn = propose(ours, hidden, anchor, head, temperature=0.8, generator=torch.Generator().manual_seed(0))
    logits = theirs.compute_logits(hidden[:, 1:], target.lm_head)
    unary, candidates = logits[:, 0].topk(5)
    selector = theirs.candidate_selector
    edge = selector.predecessor_codebook(anchor) * selector.hidden_projection(hidden[:, 1])
    scores = unary + torch.einsum("br,bkr->bk", edge, selector.successor_codebook(candidates))
    assert torch.equal(drawn.candidates[:, 0], candidates)
    torch.testing.assert_close(drawn.probabilities[:, 0], torch.softmax(scores / 0.8, -1).detach())
