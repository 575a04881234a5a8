"""Real (random, tiny) drafters in the loop: lossless, sampled, shorter blocks, parity with z-lab's loop."""

import json
import time

import dflash.model as zlab
import pytest
import scipy.stats
import torch

from drafter.checkpoint import save_drafter
from eval.block_drafter import without_dflash2
from eval.decode import Limits, decode_plain, decode_speculative
from eval.errors import EvalError
from eval.lookup import LookupDrafter
from eval.sampling import Sampling, target_probabilities
from tests.eval.conftest import VOCAB, head_of, tiny_drafter

PROMPT = [5, 17, 3, 60, 41, 17, 3, 22, 9, 5, 17, 3]
GREEDY = {"sampling": Sampling(), "generator": None}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sliding", [None, 8])
def test_greedy_tokens_equal_plain_decoding(target, make_drafter, version, sliding):
    limits = Limits(40)
    reference = decode_plain(target, PROMPT, limits=limits, **GREEDY)
    decoded = decode_speculative(
        target, make_drafter(target, version=version, sliding_window=sliding), PROMPT, limits=limits, **GREEDY
    )
    assert decoded.ids == reference.ids


def test_one_object_serves_one_sequence_after_another(llama, make_drafter):
    drafter = make_drafter(llama)
    runs = [decode_speculative(llama, drafter, PROMPT[i:], limits=Limits(20), **GREEDY) for i in (0, 3, 0)]
    fresh = decode_speculative(llama, make_drafter(llama), PROMPT, limits=Limits(20), **GREEDY)
    counts = [[s[:4] for s in run.steps] for run in (*runs, fresh)]
    assert counts[0] == counts[2] == counts[3]


def test_prompt_read_in_parts_gives_the_same_drafts(llama, make_drafter, monkeypatch):
    whole = decode_speculative(llama, make_drafter(llama), PROMPT, limits=Limits(24), **GREEDY)
    monkeypatch.setattr("eval.target._PREFILL_ROWS", 5)
    parts = decode_speculative(llama, make_drafter(llama), PROMPT, limits=Limits(24), **GREEDY)
    assert [s[:4] for s in parts.steps] == [s[:4] for s in whole.steps]


def test_shorter_block_than_trained_drafts_fewer_tokens(llama, make_drafter):
    decoded = decode_speculative(
        llama, make_drafter(llama, decode_block=4), PROMPT, limits=Limits(20), **GREEDY
    )
    assert decoded.ids == decode_plain(llama, PROMPT, limits=Limits(20), **GREEDY).ids
    assert max(s.drafted for s in decoded.steps) == 3


@pytest.mark.parametrize("block", [1, 9])
def test_block_longer_than_trained_is_refused(llama, make_drafter, block):
    with pytest.raises(EvalError, match="take 2 to 8"):
        make_drafter(llama, decode_block=block)


def test_drafter_of_a_deeper_target_is_refused(llama, make_drafter):
    drafter = make_drafter(llama)
    drafter.taps = (0, 4)
    with pytest.raises(EvalError, match="layers 0 to 3"):
        decode_speculative(llama, drafter, PROMPT, limits=Limits(4), **GREEDY)


def test_v1_of_a_v2_keeps_the_backbone_and_drops_the_rest(llama):
    model = tiny_drafter(llama, version=2)
    plain = without_dflash2(model)
    assert plain.candidate_selector is None
    torch.testing.assert_close(plain.layers[1].mlp.up_proj.weight, model.layers[1].mlp.up_proj.weight)
    with pytest.raises(EvalError, match="already"):
        without_dflash2(plain)


def zlab_trace(target, directory, class_name, prompt, *, block=None, new=40, stop=None):
    """Drafts of every step, tokens and acceptances of PyPI dflash's own loop with its own model."""
    loaded = getattr(zlab, class_name).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    drafts = []
    verify = target.model.forward

    def spy(input_ids, **options):
        drafts.append(input_ids[0, 1:].tolist())
        return verify(input_ids, **options)

    target.model.forward = spy
    try:
        stats = zlab.dflash_generate(
            loaded, target.model, torch.tensor([prompt]), new, stop, block_size=block, return_stats=True
        )
    finally:
        target.model.forward = verify
    return drafts[1:], stats.output_ids[0, len(prompt) :].tolist(), stats.acceptance_lengths


def our_trace(target, drafter, prompt, *, new=40, stop=None):
    drafts = []
    propose = drafter.draft

    def spy(anchor, count):
        draft = propose(anchor, count)
        drafts.append(draft.ids.tolist())
        return draft

    drafter.draft = spy
    decoded = decode_speculative(target, drafter, prompt, limits=Limits(new, frozenset(stop or ())), **GREEDY)
    return drafts, decoded.ids, [s.emitted for s in decoded.steps]


def favour_few_tokens(target):
    """Let four tokens win nearly always, so that a random drafter is right now and then."""
    with torch.no_grad():
        rows = target.head_weight[:4]
        rows[:2] *= 6
        rows[2:] = -rows[:2]


@pytest.mark.parametrize(("version", "name"), [(1, "DFlashDraftModel"), (2, "DFlash2DraftModel")])
@pytest.mark.parametrize("block", [8, 4])
@pytest.mark.parametrize("target", ["qwen3", "sliding"], indirect=True)
def test_drafts_and_acceptances_equal_those_of_zlabs_loop(
    target, make_drafter, tmp_path, monkeypatch, version, name, block
):
    monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)
    favour_few_tokens(target)
    options = {"version": version, "sliding_window": 8 if version == 2 else None, "dtype": "float32"}
    save_drafter(tiny_drafter(target, **options), tmp_path / "d", target_name="tiny", head=head_of(target))
    assert json.loads((tmp_path / "d/config.json").read_text())["architectures"] == [name]
    longest = 0
    for prompt in (PROMPT, PROMPT[::-1], [*PROMPT, *range(40, 60)]):
        reference = decode_plain(target, prompt, limits=Limits(40), **GREEDY).ids
        stop = [max(reference, key=reference.index)]  # the token that comes first as late as possible
        theirs = zlab_trace(target, tmp_path / "d", name, prompt, block=block, stop=stop)
        ours = our_trace(target, make_drafter(target, decode_block=block, **options), prompt, stop=stop)
        assert ours == theirs
        longest = max(longest, *theirs[2])
    assert longest > 1


@pytest.mark.parametrize("kind", ["v1", "v2", "lookup"])
def test_sampled_tokens_are_distributed_as_the_targets(llama, make_drafter, kind):
    """Second and third token of a response, given the first, over 400 speculative runs."""
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    sampling = Sampling(temperature=0.8, top_k=3)
    drafter = (
        LookupDrafter(4, shortest=1)
        if kind == "lookup"
        else make_drafter(llama, version=int(kind[1]), block=4)
    )
    generator = torch.Generator().manual_seed(1)
    runs = 400
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(runs):
        ids = decode_speculative(
            llama, drafter, prompt, limits=Limits(3), sampling=sampling, generator=generator
        ).ids
        counts[tuple(ids)] = counts.get(tuple(ids), 0) + 1
    truth = exact_distribution(llama, prompt, sampling, 3)
    assert set(counts) <= set(truth)
    observed = [counts.get(path, 0) for path in truth]
    expected = [p * runs for p in truth.values()]
    # Rare paths are pooled: the chi-square approximation wants about five a cell.
    rare = [i for i, e in enumerate(expected) if e < 5]
    common = [i for i, e in enumerate(expected) if e >= 5]
    cells = [observed[i] for i in common], [expected[i] for i in common]
    if sum(expected[i] for i in rare) > 1:
        cells[0].append(sum(observed[i] for i in rare))
        cells[1].append(sum(expected[i] for i in rare))
    assert len(cells[0]) >= 5
    assert scipy.stats.chisquare(*cells, sum_check=False).pvalue > 1e-3


@torch.inference_mode()
def exact_distribution(target, prompt, sampling, length):
    paths = {(): 1.0}
    for _ in range(length):
        longer = {}
        for path, chance in paths.items():
            logits = target.open().prefill(torch.tensor([*prompt, *path]))
            for token, p in enumerate(target_probabilities(logits[None], sampling)[0].tolist()):
                if p > 0:
                    longer[*path, token] = chance * p
        paths = longer
    assert len(paths) <= VOCAB
    return paths
