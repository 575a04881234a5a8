"""`check` and `export --check`: wrong drafters made on purpose, and engines that misread right ones.

The engine of most tests is the project's own loop in its place; `test_engines.py` has real ones.
"""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafter.checkpoint import load_drafter, save_drafter
from drafter.rope import Rotary
from eval.block_drafter import BlockDrafter, without_dflash2
from eval.decode import decode_speculative
from eval.errors import EvalError
from eval.sampling import Sampling
from eval.serving_check import CheckOptions, render_check, run_check
from eval.target import Target
from eval.vllm_engine import Generated
from tests.eval.counting import VOCABULARY, counting_drafter, counting_target

MASK = 3
#: What `varied` makes, and the first cause that the check has to name.
WRONG_EXPORTS = {
    "wrong-mask": f"mask id {MASK} in place of 60",
    "wrong-taps": "features of one layer lower",
    "wrong-rope": "the target's rope {'rope_theta': 10000.0",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The counting target as a checkpoint with a tokenizer, its drafter, and prompts."""
    folder = tmp_path_factory.mktemp("counting")
    target = counting_target()
    target.save_pretrained(folder / "target")
    words = ["<unk>", "<bos>", "<eos>", "<mask>", *(f"t{i}" for i in range(4, VOCABULARY))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", mask_token="<mask>"
    ).save_pretrained(folder / "target")
    rows = [{"prompt": " ".join(f"t{10 + (i + j) % 40}" for j in range(8 + 3 * i))} for i in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    drafter, _ = counting_drafter(target, sliding_window=16, steps=300)
    drafter.eval()
    return folder, drafter


def exported(folder, drafter, name):
    out = folder / name
    if not out.exists():
        save_drafter(drafter, out, target_name=str(folder / "target"))
    return out


def varied(drafter, name):
    """The drafter as a careless export would write it: the weights of training, another config."""
    config = drafter.config
    if name == "wrong-mask":
        changed = replace(config, mask_token_id=60)
    elif name == "wrong-taps":
        changed = replace(config, target_layer_ids=tuple(layer + 1 for layer in config.target_layer_ids))
    elif name == "wrong-rope":
        changed = replace(config, rope={**config.rope, "rope_theta": 100.0})
    else:
        assert name == "right"
        return drafter
    wrong = type(drafter)(changed)
    wrong.load_state_dict(drafter.state_dict())
    return wrong


def options(folder, drafter, **changes):
    settings = {"data": str(folder / "prompts.jsonl"), "prompts": 4, "max_new_tokens": 16, "device": "cpu"}
    return CheckOptions(**{"drafter": drafter, "log": folder / "engine.log", **settings, **changes})


def own_loop(misread=lambda model: model, taps=None):
    """The project's own loop as an engine; `misread` changes the drafter that it has loaded."""

    def serve(settings, log, prompts, limits):
        from transformers import AutoModelForCausalLM

        target = Target(AutoModelForCausalLM.from_pretrained(settings.target))
        drafter = BlockDrafter(misread(load_drafter(settings.drafter)), target.frozen_head, name="engine")
        drafter.taps = taps or drafter.taps
        responses, drafts = [], []
        for prompt in prompts:
            seen = []

            def spy(anchor, count, seen=seen):
                # An engine does not shrink its last blocks.
                found = BlockDrafter.draft(drafter, anchor, settings.drafts)
                seen.append(found.ids.tolist())
                return replace(found, ids=found.ids[:count])

            drafter.draft = spy
            decoded = decode_speculative(
                target, drafter, prompt, limits=limits, sampling=Sampling(), generator=None
            )
            places = [s.context - len(prompt) + 1 for s in decoded.steps]
            responses.append(decoded)
            drafts.append(list(zip(places, seen, strict=True)))
        steps = [s for decoded in responses for s in decoded.steps]
        counters = {
            "drafts": len(steps),
            "draft_tokens": settings.drafts * len(steps),
            "accepted_tokens": sum(s.accepted for s in steps),
        }
        return Generated(responses, drafts, counters, 1.0), {"vllm": "0.0", "platform": "cpu"}

    return serve


def test_good_export_passes_and_every_draft_is_compared(made):
    folder, drafter = made
    result = run_check(options(folder, exported(folder, drafter, "right")), own_loop())
    assert result.passed
    assert result.acceptance > 5
    assert result.agreement == result.worst_agreement == 1.0
    assert result.prompts == 5  # and one that is longer than the window
    assert result.drafts >= 5 * 3
    assert render_check(result)
    assert result.to_dict()["passed"]


@pytest.mark.parametrize(("name", "cause"), WRONG_EXPORTS.items())
def test_wrong_export_is_caught_and_the_right_value_found(made, name, cause):
    """C14, D4, F1 of the serving check: the engine does as it is told, and what it is told is wrong."""
    folder, drafter = made
    path = exported(folder, varied(drafter, name), name)
    for floor, problem in ((3.5, "below the floor 3.50"), (1.0, "twice as well")):
        result = run_check(options(folder, path, min_acceptance=floor), own_loop())
        assert not result.passed
        assert result.acceptance < 3.5  # the right one reaches more than 5
        assert result.agreement == 1.0
        assert problem in result.problems[0]
        assert cause in result.causes[0]
        assert "as exported" in result.causes[0]


def test_export_whose_blocks_stand_one_position_late_is_caught(made):
    """A drafter trained with blocks one position off drafts well only there."""
    folder, _ = made
    target = counting_target()
    late, _ = counting_drafter(target, sliding_window=16, steps=300, shift=1)
    result = run_check(options(folder, exported(folder, late.eval(), "late")), own_loop())
    assert not result.passed
    assert "blocks 1 position later" in result.causes[0]


def other_rope(model):
    model.rotary = Rotary({"rope_type": "default", "rope_theta": 1e6}, 32, 4096)
    return model


def full_attention(model):
    model.config = replace(model.config, layer_types=("full_attention",) * 2)
    return model


def other_mask(model):
    model.config = replace(model.config, mask_token_id=2)
    return model


@pytest.mark.parametrize(
    ("misread", "cause"),
    [
        (other_rope, "rope_theta': 1000000.0"),
        (other_mask, "mask id 2 in place of 3"),
        (full_attention, "sliding layers looking at the whole context"),  # C9: only beyond the window
    ],
)
def test_engine_that_misreads_a_right_export_is_told_apart(made, misread, cause):
    folder, drafter = made
    path = exported(folder, drafter, "right")
    checked = options(folder, path, min_acceptance=1.0, min_agreement=0.99)  # float32: all are equal
    result = run_check(checked, own_loop(misread))
    assert not result.passed
    assert "that the project's own loop drafts" in result.problems[0]
    assert cause in result.causes[0]
    assert result.own_acceptance > 4


def test_engine_with_layers_one_too_high_is_named(made):
    folder, drafter = made
    taps = tuple(layer + 1 for layer in drafter.config.target_layer_ids)
    checked = options(folder, exported(folder, drafter, "right"), min_acceptance=1.0)
    result = run_check(checked, own_loop(taps=taps))
    assert "features of one layer higher" in result.causes[0]


def test_engine_that_ignores_the_selector_is_named(made):
    """D11, D14: DFlash2 weights served as DFlash."""
    folder, _ = made
    target = counting_target()
    second, _ = counting_drafter(target, version=2, sliding_window=16, steps=60)
    with torch.no_grad():
        second.candidate_selector.successor_codebook.normal_(std=2.0)
        for layer in second.layers:
            layer.mlp_conv.base_kernel.add_(torch.randn_like(layer.mlp_conv.base_kernel))
    path = exported(folder, second.eval(), "second")
    result = run_check(options(folder, path, min_acceptance=1.0), own_loop(without_dflash2))
    assert "neither convolutions nor selector" in result.causes[0]


def test_engine_of_another_target_is_named(made, tmp_path):
    folder, drafter = made
    serve = own_loop()

    def other(settings, log, prompts, limits):
        found, facts = serve(settings, log, prompts, limits)
        for decoded in found.responses:
            decoded.ids[5:] = [(token + 1) % VOCABULARY for token in decoded.ids[5:]]
        return found, facts

    result = run_check(options(folder, exported(folder, drafter, "right")), other)
    assert "not what the target chooses" in result.problems[0]
    assert "another target" in result.causes[0]


def test_weak_drafter_fails_without_a_false_cause(made):
    folder, drafter = made
    torch.manual_seed(0)
    weak = type(drafter)(drafter.config)
    result = run_check(options(folder, exported(folder, weak.eval(), "weak")), own_loop())
    assert not result.passed
    assert "the drafter is weak" in result.causes[0]
    assert len(result.causes) == 1


def test_export_without_a_target_and_prompts_that_do_not_fit_are_refused(made, tmp_path):
    folder, drafter = made
    path = exported(folder, drafter, "nameless")
    config = json.loads((path / "config.json").read_text())
    del config["target_name_or_path"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EvalError, match="give --target"):
        run_check(options(folder, path), own_loop())
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "t10 " * 5000}))
    with pytest.raises(EvalError, match="take shorter ones"):
        run_check(options(folder, exported(folder, drafter, "right"), data=str(long)), own_loop())
