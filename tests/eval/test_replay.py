"""Replay against texts that were written so that every step's accepted drafts are known."""

import json

import pytest
import torch
from safetensors.torch import save_file

from drafter.checkpoint import save_drafter
from drafter.frozen import FrozenHead
from eval.block_drafter import BlockDrafter
from eval.errors import EvalError
from eval.replay import ReplayOptions, render_replay, replay_spans, run_replay, walk
from eval.sampling import Sampling
from pipelines.rejected import read_rejected
from pipelines.store import FeatureStore, Manifest, StoreWriter, TokenSample
from pipelines.target import config_fingerprint
from tests.drafter.tiny import TARGET, VOCABULARY, tiny_config, tiny_drafter, tiny_head

PROMPT = 9


def scripted_text(drafter, features, script, seed):
    """Token ids whose decoding accepts exactly `script[s]` drafts in step s, and the prompt's length."""
    generator = torch.Generator().manual_seed(seed)
    block = BlockDrafter(drafter, tiny_head(), name="tiny")
    ids = torch.randint(4, VOCABULARY, (PROMPT + 1,), generator=generator).tolist()
    block.start(ids, Sampling(), None)
    block.prefill(features[:PROMPT])
    read = PROMPT
    for agreed in script:
        drafts = block.draft(torch.tensor([ids[-1]]), drafter.config.num_drafts).ids.tolist()
        emitted = drafts[:agreed]
        # the target's own token: any but the draft that it refuses
        refused = drafts[agreed] if agreed < len(drafts) else -1
        emitted.append(
            next(t for t in torch.randperm(VOCABULARY, generator=generator).tolist() if t != refused)
        )
        ids += emitted
        block.observe(emitted, features[read : len(ids) - 1])
        read = len(ids) - 1
    return ids


def write_target(folder):
    folder.mkdir(exist_ok=True)
    config = {**TARGET, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    head = tiny_head()
    tensors = {"model.embed_tokens.weight": head.embedding, "lm_head.weight": head.head}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_store(folder, target, config, samples):
    manifest = Manifest(
        target=str(target),
        target_fingerprint=config_fingerprint(target),
        tokenizer_fingerprint="none",
        target_layer_ids=list(config.target_layer_ids),
        hidden_size=config.target_hidden_size,
        dtype="float32",
        target_dtype="float32",
    )
    with StoreWriter(folder, manifest) as writer:
        for number, (ids, features) in enumerate(samples):
            mask = torch.arange(len(ids)) >= PROMPT
            with writer.stream() as stream:
                stream.append(features[: len(ids)])
                stream.finish(TokenSample(f"sample-{number}", torch.tensor(ids), mask))
    return folder


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("window", [None, 7])
def test_replay_counts_the_steps_that_decoding_takes(tmp_path, version, window):
    """The text is made by the decode loop's own drafter, step by step, over a growing cache."""
    config = tiny_config(version, sliding_window=window)
    drafter = tiny_drafter(config).eval()
    scripts = [[0, 3, 1, 2, 3, 0, 0, 2], [3, 3, 3], [1]]
    samples = []
    for seed, script in enumerate(scripts):
        features = torch.randn(80, config.feature_width, generator=torch.Generator().manual_seed(seed))
        samples.append((scripted_text(drafter, features, script, seed), features))
    target = write_target(tmp_path / "target")
    store = FeatureStore.open(write_store(tmp_path / "store", target, config, samples))
    for number, script in enumerate(scripts):
        ((first, steps),) = replay_spans(drafter, tiny_head(), store, store.ids.index(f"sample-{number}"), 4)
        assert first == 0
        assert [step.accepted for step in steps] == script
        assert sum(step.emitted for step in steps) == len(samples[number][0]) - PROMPT - 1
        assert steps[0].context == PROMPT


def test_report_pools_steps_and_compares_drafters(tmp_path):
    config = tiny_config(2)
    drafter = tiny_drafter(config).eval()
    features = torch.randn(80, config.feature_width, generator=torch.Generator().manual_seed(5))
    script = [3, 2, 3, 3, 1, 3]
    target = write_target(tmp_path / "target")
    write_store(tmp_path / "store", target, config, [(scripted_text(drafter, features, script, 5), features)])
    head = FrozenHead.from_checkpoint(target)
    for name, model in {"good": drafter, "other": tiny_drafter(config, seed=9)}.items():
        save_drafter(model, tmp_path / name, head=head, target_name="tiny")
    options = ReplayOptions(
        store=[tmp_path / "store"], drafter=[str(tmp_path / "good"), f"b={tmp_path / 'other'}"]
    )
    report = run_replay(options)
    tau = report["drafters"]["good"]["acceptance_length"]
    assert tau["value"] == pytest.approx((sum(script) + len(script)) / len(script))
    assert report["drafters"]["good"]["samples"] == {"sample-0": [sum(script) + len(script), len(script)]}
    assert report["drafters"]["good"]["positions"][0]["value"] == 1.0
    assert report["drafters"]["b"]["acceptance_length"]["value"] < tau["value"]
    (difference,) = report["comparisons"]
    assert difference["acceptance_length"]["difference"] < 0
    render_replay(report)


def test_anchors_of_rejected_drafts_are_written_for_training(tmp_path):
    config = tiny_config(2)
    drafter = tiny_drafter(config).eval()
    features = torch.randn(80, config.feature_width, generator=torch.Generator().manual_seed(5))
    script = [3, 2, 3, 0, 1, 3]
    text = scripted_text(drafter, features, script, 5)
    target = write_target(tmp_path / "target")
    write_store(tmp_path / "store", target, config, [(text, features)])
    save_drafter(drafter, tmp_path / "good", head=FrozenHead.from_checkpoint(target), target_name="tiny")
    file = tmp_path / "rejected.jsonl"
    options = {"store": [tmp_path / "store"], "drafter": [str(tmp_path / "good")], "rejected": file}
    report = run_replay(ReplayOptions.model_validate(options))
    # steps of 4, 3, 4, 1, 2 and 4 tokens: the second, fourth and fifth have a rejected draft
    assert read_rejected(file)["sample-0"].tolist() == [PROMPT + 4, PROMPT + 11, PROMPT + 12]
    assert report["rejected"] == {"file": str(file), "anchors": 3}
    assert "3 anchors" in str(render_replay(report).caption)
    options["drafter"].append(f"b={tmp_path / 'good'}")
    with pytest.raises(EvalError, match="--rejected is for one drafter"):
        run_replay(ReplayOptions.model_validate(options))


@pytest.mark.parametrize(
    ("accepted", "emitted"),
    [
        ([0, 0, 0, 0], [1, 1, 1]),
        ([2, 0, 0, 0], [3]),
        ([3, 0, 0, 0, 0], [4]),
        # drafts behind the end are never compared: the last step has one draft
        ([1, 0, 3, 0], [2, 1]),
        ([5], []),
    ],
)
def test_walk_cuts_the_last_step_at_the_end(accepted, emitted):
    steps = walk(accepted, 10, 3)
    assert [step.emitted for step in steps] == emitted
    assert sum(emitted) == len(accepted) - 1
    assert all(step.accepted <= step.drafted <= 3 for step in steps)


def test_store_with_other_taps_is_refused(tmp_path):
    config = tiny_config(1)
    target = write_target(tmp_path / "target")
    features = torch.randn(80, config.feature_width)
    write_store(tmp_path / "store", target, config, [(list(range(20)), features)])
    other = tiny_drafter(tiny_config(1, target_layer_ids=(0, 1, 2)))
    save_drafter(other, tmp_path / "d", head=FrozenHead.from_checkpoint(target), target_name="tiny")
    with pytest.raises(EvalError, match="capture the store again"):
        run_replay(ReplayOptions(store=[tmp_path / "store"], drafter=[str(tmp_path / "d")]))
    with pytest.raises(EvalError, match="trained with 4 rows"):
        run_replay(ReplayOptions(store=[tmp_path / "store"], drafter=[str(tmp_path / "d")], block=9))
